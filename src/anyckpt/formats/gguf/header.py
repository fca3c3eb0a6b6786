"""Read and check the header of one GGUF file: metadata, tensor infos, where the data begin.

Every count is held against the bytes that are left before it is used: a key-value pair takes at least 13 bytes, a
tensor info 24, an element of an array its size. Bytes are read in a window that moves on; memory is bounded whatever
the header says.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

from anyckpt.core.box import Shape
from anyckpt.core.dtypes import DType
from anyckpt.core.ggml.types import BY_ID, REMOVED, spelling
from anyckpt.core.source import File, Inline, Span
from anyckpt.finding import Report, fail
from anyckpt.formats.gguf import kv
from anyckpt.formats.gguf.kv import ARRAY, BOOL, SCALARS, STRING, U32, Field, Metadata
from anyckpt.io.bounds import cut_short
from anyckpt.io.paths import printable

MAGIC = b"GGUF"
ALIGNMENT = 32
MAX_DIMENSIONS = 4
MAX_NAME_BYTES = 63  # GGML_MAX_NAME is 64 with the terminator
MAX_KEY_BYTES = 65_535
MAX_STRING_BYTES = 1 << 30
MAX_ELEMENTS = 1 << 30
MAX_DEPTH = 2  # arrays of arrays; the reference writer makes one level
KEPT_BYTES = 1 << 16  # values up to this size stay in memory, larger ones in the file
WINDOW = 1 << 18
CUT_HINT = "download or copy this file again"
MAX_U64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Info:
    """One tensor as the header describes it; `offset` counts from the file's start."""

    name: str
    dtype: DType
    shape: Shape
    offset: int

    @property
    def n_bytes(self) -> int:
        return self.dtype.nbytes(prod(self.shape))


@dataclass(frozen=True, slots=True)
class Header:
    """What stands before the data."""

    version: int
    big: bool
    metadata: Metadata
    infos: tuple[Info, ...]
    alignment: int
    data_start: int
    infos_start: int


@dataclass(slots=True)
class Cursor:
    """Reads a file from front to back, through a window."""

    file: File
    order: Literal["little", "big"] = "little"
    length_bytes: int = 8
    at: int = 0
    _base: int = 0
    _window: bytes = b""

    @property
    def left(self) -> int:
        """Bytes until the file ends."""
        return self.file.size - self.at

    def take(self, n: int) -> bytes:
        """The next `n` bytes. Raises [truncated] where the file ends before."""
        if n > self.left:
            raise cut_short(self.file.name, self.file.size, self.at, self.at + n)
        start = self.at - self._base
        if start < 0 or start + n > len(self._window):
            self._base = self.at
            self._window = self.file.read(self.at, min(self.left, max(n, WINDOW)))
            start = 0
        self.at += n
        return self._window[start : start + n]

    def skip(self, n: int) -> None:
        """Step over `n` bytes."""
        if n > self.left:
            raise cut_short(self.file.name, self.file.size, self.at, self.at + n)
        self.at += n

    def number(self, n_bytes: int) -> int:
        """An unsigned number."""
        return int.from_bytes(self.take(n_bytes), self.order)

    def length(self) -> int:
        """A count or length, as wide as the version has it."""
        return self.number(self.length_bytes)


def read_header(file: File, report: Report) -> Header:
    """Parse the header; faults that leave the rest readable go to `report`, others raise CheckpointError."""
    where = file.name
    cursor = Cursor(file)
    if cursor.take(4) != MAGIC:
        raise fail("bad-header", "does not begin with GGUF", where=where)
    version, big = _version(cursor, where)
    if version == 1:
        cursor.length_bytes = 4
    n_tensors, n_fields = cursor.length(), cursor.length()
    _check_count("metadata values", n_fields, 5 + cursor.length_bytes, cursor)
    _check_count("tensors", n_tensors, 16 + cursor.length_bytes, cursor)
    if version == 1 and n_tensors and not n_fields:
        raise fail("bad-header", "is of version 1, but its counts are not those of version 1", where=where)
    metadata = _read_metadata(cursor, n_fields, big, report)
    alignment = _alignment(metadata, where)
    infos_start = cursor.at
    raw = [_read_info(cursor, report) for _ in range(n_tensors)]
    data_start = -(-cursor.at // alignment) * alignment
    infos = _judge(raw, data_start, alignment, file, report)
    return Header(version, big, metadata, infos, alignment, data_start, infos_start)


def _version(cursor: Cursor, where: str) -> tuple[int, bool]:
    raw = cursor.take(4)
    version, big = int.from_bytes(raw, "little"), False
    if version & 0xFFFF == 0 and version:
        version, big = int.from_bytes(raw, "big"), True
        cursor.order = "big"
    if version not in (1, 2, 3):
        raise fail(
            "unsupported-version",
            f"is of GGUF version {version:,}; 1, 2 and 3 are known",
            where=where,
            hint="a newer anyckpt may know it",
        )
    return version, big


def _check_count(what: str, n: int, least: int, cursor: Cursor) -> None:
    """Refuse a count that can't be: `least` is the fewest bytes that each of them takes."""
    if n * least <= cursor.left:
        return
    where = cursor.file.name
    n_bytes = cursor.length_bytes
    if int.from_bytes(n.to_bytes(n_bytes, "little"), "big") * least <= cursor.left:
        raise fail("bad-header", "the version is of one byte order, the counts are of the other", where=where)
    if n < 1 << 24:
        raise cut_short(where, cursor.file.size, cursor.at, cursor.at + n * least)
    raise fail("limit-exceeded", f"claims {n:,} {what}, more than its {cursor.file.size:,} bytes can hold", where=where)


def _read_metadata(cursor: Cursor, n: int, big: bool, report: Report) -> Metadata:
    fields: dict[str, Field] = {}
    where = cursor.file.name
    for _ in range(n):
        key = _read_key(cursor, report)
        kind = cursor.number(4)
        found = _read_field(cursor, kind, big, f"{where}, key {printable(key, limit=100)}", report)
        if key in fields:
            report.add("duplicate-key", f"the key '{printable(key, limit=100)}' stands twice", where=where)
        elif not key:
            report.add("bad-header", "a key is empty", where=where)
        else:
            fields[key] = found
    return Metadata(fields)


def _read_key(cursor: Cursor, report: Report) -> str:
    length, where = cursor.length(), cursor.file.name
    if length > cursor.left:
        raise cut_short(where, cursor.file.size, cursor.at, cursor.at + length)
    if length > MAX_KEY_BYTES:
        report.add(
            "limit-exceeded",
            f"a key of {length:,} bytes; the format allows {MAX_KEY_BYTES:,}",
            where=where,
            severity="warning",
        )
        if length > MAX_KEY_BYTES * 16:
            raise fail("limit-exceeded", f"a key of {length:,} bytes", where=where)
    raw = cursor.take(length)
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        report.add("bad-utf8", f"a key is not UTF-8 (byte {error.start})", where=where)
        return raw.decode("utf-8", "surrogateescape")


def _read_field(cursor: Cursor, kind: int, big: bool, where: str, report: Report) -> Field:
    start = cursor.at
    element, count = 0, 1
    if kind == STRING:
        _skip_string(cursor, where)
    elif kind == ARRAY:
        element, count = cursor.number(4), cursor.length()
        start = cursor.at
        _skip_elements(cursor, element, count, where, 1)
    elif kind in SCALARS:
        raw = cursor.take(_size(kind))
        if kind == BOOL and raw[0] > 1:
            report.add("bad-header", f"a bool is {raw[0]}, not 0 or 1", where=where, severity="warning")
    else:
        raise fail("bad-header", f"a value is of kind {kind}, which the format does not have", where=where)
    source = Span(cursor.file, start, cursor.at - start)
    kept: Span | Inline = source
    if kind != ARRAY and source.length <= KEPT_BYTES:
        kept = Inline(_again(cursor, start, source.length))
    return Field(kind, kept, element, count, big, cursor.length_bytes)


def _again(cursor: Cursor, start: int, n: int) -> bytes:
    """Bytes just passed, from the window where they are still in it."""
    stop, cursor.at = cursor.at, start
    data = cursor.take(n)
    cursor.at = stop
    return data


def _size(kind: int) -> int:
    return int(SCALARS[kind][1])


def _skip_string(cursor: Cursor, where: str) -> None:
    length = cursor.length()
    if length > cursor.left:
        raise cut_short(where, cursor.file.size, cursor.at, cursor.at + length)
    if length > MAX_STRING_BYTES:
        raise fail("limit-exceeded", f"a text of {length:,} bytes", where=where)
    cursor.skip(length)


def _skip_elements(cursor: Cursor, element: int, count: int, where: str, depth: int) -> None:
    least = 4 + cursor.length_bytes if element == ARRAY else cursor.length_bytes if element == STRING else 0
    least = least or (_size(element) if element in SCALARS else 0)
    if not least:
        raise fail(
            "bad-header", f"an array's elements are of kind {element}, which the format does not have", where=where
        )
    if count > cursor.left // least:
        raise cut_short(where, cursor.file.size, cursor.at, cursor.at + count * least)
    if element == STRING:
        _skip_strings(cursor, count, where)
    elif element == ARRAY:
        if depth == MAX_DEPTH:
            raise fail("too-deep", f"arrays nest more than {MAX_DEPTH} deep", where=where)
        if count > MAX_ELEMENTS // 1024:
            raise fail("limit-exceeded", f"an array of {count:,} arrays", where=where)
        for _ in range(count):
            inner, n = cursor.number(4), cursor.length()
            _skip_elements(cursor, inner, n, where, depth + 1)
    else:
        cursor.skip(count * least)


def _skip_strings(cursor: Cursor, count: int, where: str) -> None:
    """Step over strings, a window at a time."""
    size = 1 << 20
    while count:
        n = min(cursor.left, size)
        data = cursor.file.read(cursor.at, n)
        starts, _, stop = kv.walk_strings(data, 0, count, cursor.length_bytes, cursor.order == "big")
        count -= len(starts)
        cursor.at += stop
        if not len(starts):  # one string is longer than the window
            _skip_string(cursor, where)
            count -= 1
        size = min(size * 4, 1 << 24)


def _alignment(metadata: Metadata, where: str) -> int:
    found = metadata.fields.get("general.alignment")
    if found is None:
        return ALIGNMENT
    value = found.value() if found.kind == U32 else 0
    if not isinstance(value, int) or value < 1 or value & (value - 1):
        raise fail("bad-header", "general.alignment is not a power of two of kind u32", where=where)
    return value


RawInfo = tuple[str, tuple[int, ...], int, int]


def _read_info(cursor: Cursor, report: Report) -> RawInfo:
    where = cursor.file.name
    length = cursor.length()
    if length > MAX_KEY_BYTES:
        if length > cursor.left:
            raise cut_short(where, cursor.file.size, cursor.at, cursor.at + length)
        raise fail("limit-exceeded", f"a tensor name of {length:,} bytes", where=where)
    raw = cursor.take(length)
    name = raw.decode("utf-8", "surrogateescape")
    if length > MAX_NAME_BYTES or not name or not name.isprintable():
        report.add(
            "bad-name", f"the tensor name '{printable(name, limit=100)}' is empty, not plain text, or longer than the "
            f"{MAX_NAME_BYTES} bytes that llama.cpp reads", where=where,
        )  # fmt: skip
    n_dimensions = cursor.number(4)
    if n_dimensions > MAX_DIMENSIONS:
        raise fail(
            "limit-exceeded",
            f"{n_dimensions:,} dimensions; the format allows {MAX_DIMENSIONS}",
            where=f"{where}, tensor {printable(name, limit=100)}",
        )
    dims = tuple(cursor.length() for _ in range(n_dimensions))
    return name, dims, cursor.number(4), cursor.number(8)


def _judge(raw: list[RawInfo], data_start: int, alignment: int, file: File, report: Report) -> tuple[Info, ...]:
    """The tensors whose own fields hold together, and findings for all else."""
    infos: dict[str, Info] = {}
    for name, dims, type_id, offset in raw:
        where = f"{file.name}, tensor {printable(name, limit=100)}"
        dtype = BY_ID.get(type_id)
        if dtype is None:
            known = REMOVED.get(type_id)
            what = f"{known}, which no reader knows any more" if known else f"{type_id}, which is not known"
            report.add("unknown-dtype", f"is of ggml type {what}", where=where, hint=_fork_hint(type_id))
            continue
        n = prod(dims)
        if n > MAX_U64 or dtype.nbytes(n) > MAX_U64 or data_start + offset + dtype.nbytes(n) > MAX_U64:
            report.add("size-overflow", f"dimensions {list(dims)} at offset {offset:,} are beyond 2⁶⁴", where=where)
            continue
        if dims and dims[0] % dtype.block:
            message = f"rows of {dims[0]:,} values are not whole {spelling(dtype.name)} blocks of {dtype.block}"
            report.add("size-mismatch", message, where=where)
            continue
        if offset % alignment:
            report.add("offset-unaligned", f"offset {offset:,} is no multiple of {alignment}", where=where)
            continue
        if name in infos:
            report.add("duplicate-key", "a second tensor has this name", where=where)
            continue
        infos[name] = Info(name, dtype, tuple(reversed(dims)), data_start + offset)
    _check_places(tuple(infos.values()), data_start, alignment, len(infos) == len(raw), file, report)
    return tuple(infos.values())


def _fork_hint(type_id: int) -> str:
    return "ids from 97 up belong to ik_llama.cpp, whose files llama.cpp can't read" if 97 <= type_id < 400 else ""


def _check_places(
    infos: tuple[Info, ...], data_start: int, alignment: int, complete: bool, file: File, report: Report
) -> None:
    """Tensors must follow each other with nothing but padding between; llama.cpp insists on it."""
    expected, before, told = data_start, "", set()
    ordered = sorted((i for i in infos if i.n_bytes), key=lambda i: (i.offset, i.n_bytes))
    for info in ordered:
        where = f"{file.name}, tensor {printable(info.name, limit=100)}"
        if info.offset < expected and before:
            if "overlap" not in told:
                told.add("overlap")
                report.add("offset-overlap", f"shares bytes with {printable(before, limit=100)}", where=where)
        elif info.offset > expected and complete and "hole" not in told:
            told.add("hole")
            report.add(
                "offset-hole", f"bytes {expected:,}-{info.offset:,} belong to no tensor; llama.cpp refuses such files",
                where=where, severity="warning", hint="convert it to GGUF again to close the gap",
            )  # fmt: skip
        stop = info.offset + info.n_bytes
        expected = max(expected, -(-stop // alignment) * alignment)
        before = info.name
    cut = [i for i in ordered if i.offset + i.n_bytes > file.size]
    if cut:
        first = min(cut, key=lambda i: i.offset)
        more = f"; {len(cut) - 1:,} more tensors are missing" if len(cut) > 1 else ""
        where = f"{file.name}, tensor {printable(first.name, limit=100)}"
        finding = cut_short(where, file.size, first.offset, first.offset + first.n_bytes).finding
        report.add("truncated", finding.message + more, where=where, hint=_cut_hint(infos, data_start, alignment, file))
    elif complete and file.size < expected and ordered:
        report.add(
            "truncated",
            f"the padding after the last tensor is missing: {expected - file.size} bytes",
            where=file.name,
            severity="warning",
        )


def _cut_hint(infos: tuple[Info, ...], data_start: int, alignment: int, file: File) -> str:
    """llama-quantize pads with 32 whatever general.alignment says: such a file is whole, but its offsets are wrong."""
    padded = data_start + sum(-(-i.n_bytes // ALIGNMENT) * ALIGNMENT for i in infos)
    if alignment > ALIGNMENT and padded <= file.size < padded + alignment:
        what = f"its data is padded to {ALIGNMENT} and its offsets to {alignment}"
        return f"{what}: llama-quantize made it so; quantize again"
    return CUT_HINT
