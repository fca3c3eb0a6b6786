"""Metadata values of GGUF: how each kind lies in the file, read when asked for, and written again byte for byte.

    scalar   little-endian (big-endian in big-endian files), 1 to 8 bytes; a bool is one byte
    string   u64 length (u32 in version 1), UTF-8, no terminator
    array    u32 kind of the elements, u64 count (u32 in version 1), the elements; arrays of arrays nest

A vocabulary is an array of 250,000 strings: nothing is decoded before it is asked for, and where strings end is found
with numpy, not one by one.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from anyckpt.core.source import Inline, Span
from anyckpt.finding import fail

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
SCALARS = {
    U8: "u1", I8: "i1", U16: "u2", I16: "i2", U32: "u4", I32: "i4", F32: "f4", BOOL: "u1", U64: "u8", I64: "i8",
    F64: "f8",
}  # fmt: skip
"""Kind -> numpy type without its byte order."""
NAMES = ("u8", "i8", "u16", "i16", "u32", "i32", "f32", "bool", "string", "array", "u64", "i64", "f64")
MAX_DECODED_BYTES = 1 << 28  # of one value; a vocabulary has a few MB

Value = Any
"""bool, int, float, str, a list of str or of lists, or a numpy array of numbers."""


@dataclass(frozen=True, slots=True)
class Field:
    """One value. `source` is its bytes as they lie (behind kind, element and count); `length_bytes` is 4 in version
    1.
    """

    kind: int
    source: Span | Inline
    element: int = 0
    count: int = 1
    big: bool = False
    length_bytes: int = 8

    @property
    def n_bytes(self) -> int:
        """Bytes of `source`."""
        return self.source.length

    def raw(self) -> bytes:
        """The bytes as they lie. Raises [limit-exceeded] for a value that is no metadata any more."""
        if self.source.length > MAX_DECODED_BYTES:
            raise fail("limit-exceeded", f"a metadata value of {self.source.length:,} bytes is not decoded")
        if isinstance(self.source, Inline):
            return self.source.data
        return self.source.file.read(self.source.offset, self.source.length)

    def value(self) -> Value:
        """The value; text that is no UTF-8 keeps its bytes as lone surrogates."""
        data = self.raw()
        if self.kind == STRING:
            return data[self.length_bytes :].decode("utf-8", "surrogateescape")
        if self.kind != ARRAY:
            found = self._numbers(self.kind, data)[0]
            return bool(found) if self.kind == BOOL else found.item()
        if self.element == STRING:
            return [text.decode("utf-8", "surrogateescape") for text in self.strings()]
        if self.element == ARRAY:
            return self._nested(data, self.count)[0]
        numbers = self._numbers(self.element, data)
        return numbers != 0 if self.element == BOOL else numbers

    def strings(self) -> list[bytes]:
        """The elements of an array of strings, undecoded."""
        data = self.raw()
        starts, lengths, _ = walk_strings(data, 0, self.count, self.length_bytes, self.big)
        stops = starts + lengths
        return [data[a:b] for a, b in zip(starts.tolist(), stops.tolist())]

    def encoded(self) -> bytes:
        """As a little-endian file of version 3 holds it: kind, for arrays element and count, and the bytes."""
        head = struct.pack("<I", self.kind)
        if self.kind == ARRAY:
            head += struct.pack("<IQ", self.element, self.count)
        if not self.big and self.length_bytes == 8:
            return head + self.raw()
        return field(self.kind, self.value(), self.element).encoded()

    def _numbers(self, kind: int, data: bytes) -> Array:
        numbers = np.frombuffer(data, (">" if self.big else "<") + SCALARS[kind])
        return numbers.astype(numbers.dtype.newbyteorder("="))

    def _nested(self, data: bytes, count: int, at: int = 0) -> tuple[list[Any], int]:
        out: list[Any] = []
        for _ in range(count):
            inner = int.from_bytes(data[at : at + 4], "big" if self.big else "little")
            n = int.from_bytes(data[at + 4 : at + 4 + self.length_bytes], "big" if self.big else "little")
            at += 4 + self.length_bytes
            if inner == ARRAY:
                found, at = self._nested(data, n, at)
            elif inner == STRING:
                starts, lengths, stop = walk_strings(data, at, n, self.length_bytes, self.big)
                found = [data[s : s + k].decode("utf-8", "surrogateescape") for s, k in zip(starts, lengths)]
                at = stop
            else:
                stop = at + n * int(SCALARS[inner][1])
                found = self._numbers(inner, data[at:stop]).tolist()
                at = stop
            out.append(found)
        return out, at


class Metadata(Mapping[str, Any]):
    """Key -> value in the order of the file; `fields` has them undecoded."""

    __slots__ = ("fields",)

    def __init__(self, fields: Mapping[str, Field] | Iterable[tuple[str, Field]] = ()) -> None:
        self.fields: dict[str, Field] = dict(fields)

    def __getitem__(self, key: str) -> Value:
        return self.fields[key].value()

    def __iter__(self) -> Iterator[str]:
        return iter(self.fields)

    def __len__(self) -> int:
        return len(self.fields)

    def __contains__(self, key: object) -> bool:
        return key in self.fields

    @property
    def architecture(self) -> str:
        """`general.architecture`, "" where it is missing."""
        found = self.get("general.architecture", "")
        return found if isinstance(found, str) else ""

    def of_model(self, key: str, default: Any = None) -> Any:
        """The value of `ARCHITECTURE.key`."""
        return self.get(f"{self.architecture}.{key}", default)

    def number(self, key: str, default: int = 0) -> int:
        """An integer, or `default` where it is missing or something else."""
        found = self.get(key)
        return int(found) if isinstance(found, int | float) else default


# --- making values ---


def field(kind: int, value: Value, element: int = 0) -> Field:
    """A value to write. Arrays of strings take str or bytes; numbers are checked against the kind's range."""
    if kind == STRING:
        return Field(kind, Inline(_string(value)))
    if kind != ARRAY:
        return Field(kind, Inline(np.array([value]).astype("<" + SCALARS[kind]).tobytes()))
    if element == STRING:
        return Field(kind, Inline(b"".join(map(_string, value))), element, len(value))
    if element == ARRAY:
        parts = [field(ARRAY, inner, _element_of(inner)).encoded()[4:] for inner in value]
        return Field(kind, Inline(b"".join(parts)), element, len(value))
    return Field(kind, Inline(np.asarray(value).astype("<" + SCALARS[element]).tobytes()), element, len(value))


def u32(value: int) -> Field:
    """An unsigned number of 32 bits. Raises OverflowError where it does not fit."""
    return Field(U32, Inline(int(value).to_bytes(4, "little")))


def f32(value: float) -> Field:
    """A float of 32 bits."""
    return field(F32, value)


def text(value: str | bytes) -> Field:
    """A string."""
    return field(STRING, value)


def boolean(value: bool) -> Field:
    """A bool."""
    return field(BOOL, int(value))


def array(element: int, values: Sequence[Any] | Array) -> Field:
    """An array of one kind."""
    return field(ARRAY, values, element)


def _string(value: str | bytes) -> bytes:
    data = value if isinstance(value, bytes) else value.encode("utf-8", "surrogateescape")
    return len(data).to_bytes(8, "little") + data


def _element_of(values: Sequence[Any]) -> int:
    first = next(iter(values), 0)
    kinds = {bool: BOOL, str: STRING, list: ARRAY, float: F32}
    return kinds.get(type(first), I32)


def guess(value: Value) -> Field:
    """A value of the kind that readers expect where nothing says which: u32, i32, f32, bool, string, or arrays of
    them.
    """
    if isinstance(value, bool):
        return boolean(value)
    if isinstance(value, int):
        wide = I64 if value < -(1 << 31) else I32 if value < 0 else U32 if value < 1 << 32 else U64
        return field(wide, value)
    if isinstance(value, float):
        return f32(value)
    if isinstance(value, str):
        return text(value)
    return field(ARRAY, value, _element_of(value))


# --- strings in a row ---


def walk_strings(
    data: bytes | memoryview, start: int, count: int, length_bytes: int = 8, big: bool = False
) -> tuple[Array, Array, int]:
    """Where `count` strings begin and how long they are, and where the last ends; as many as `data` holds whole.

    Lengths are nearly always below 256: positions whose next seven bytes are zero are candidates, found in one pass;
    each that ends where the next candidate is, is the start of a string. Where that chain breaks, one step is taken by
    reading the length, so that any data is walked rightly.
    """
    buffer = np.frombuffer(data, np.uint8)
    starts, lengths = np.empty(count, np.int64), np.empty(count, np.int64)
    order: Any = "big" if big else "little"
    candidates = _candidates(buffer, start, length_bytes, big) if count > 64 else np.empty(0, np.int64)
    value_at = length_bytes - 1 if big else 0
    ends = candidates + length_bytes + buffer[candidates + value_at] if candidates.size else candidates
    breaks = np.flatnonzero(ends[:-1] != candidates[1:]) if candidates.size else candidates
    at, n = start, 0
    while n < count:
        i = int(np.searchsorted(candidates, at))
        if i < len(candidates) and candidates[i] == at:
            j = int(np.searchsorted(breaks, i))
            last = int(breaks[j]) if j < len(breaks) else len(candidates) - 1
            m = min(count - n, last - i + 1)
            chunk = ends[i : i + m]
            if chunk[-1] > len(buffer):
                m -= 1
                if m == 0:
                    break
                chunk = chunk[:m]
            starts[n : n + m] = candidates[i : i + m] + length_bytes
            lengths[n : n + m] = chunk - starts[n : n + m]
            n += m
            at = int(chunk[-1])
            continue
        if at + length_bytes > len(buffer):
            break
        length = int.from_bytes(data[at : at + length_bytes], order)
        if at + length_bytes + length > len(buffer):
            break
        starts[n], lengths[n] = at + length_bytes, length
        at += length_bytes + length
        n += 1
    return starts[:n], lengths[:n], at


def _candidates(buffer: Array, start: int, length_bytes: int, big: bool) -> Array:
    """Positions that hold a length below 256, from the look of it."""
    zero = buffer[start:] == 0
    n = len(zero) - length_bytes + 1
    if n <= 0:
        return np.empty(0, np.int64)
    found = np.ones(n, bool)
    for i in range(length_bytes - 1) if big else range(1, length_bytes):
        found &= zero[i : i + n]
    return np.flatnonzero(found) + start
