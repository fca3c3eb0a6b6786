r"""One array in a file of numpy's.

    0   \x93NUMPY, u8 major, u8 minor            versions 1.0, 2.0, 3.0
    8   u16 (1.0) or u32 (2.0, 3.0) n: length of the header, little-endian
    …   n bytes: a Python literal {'descr': '<f4', 'fortran_order': False, 'shape': (2, 3)}, spaces, newline
        latin-1, in 3.0 UTF-8
    …   the elements, in C or Fortran order; for object arrays a pickle

Facts from numpy 2.4 `lib/_format_impl.py`. numpy parses the header with `literal_eval`; here it is read by a parser
that knows only these literals. A pickle in the file is judged like any other.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

from anyckpt.core.box import Shape, c_strides
from anyckpt.core.checkpoint import Checkpoint
from anyckpt.core.dtypes import DTYPES, DType
from anyckpt.core.inert import Global, Opaque
from anyckpt.core.source import File, Span
from anyckpt.core.tensor import Tensor, from_source
from anyckpt.errors import CheckpointError
from anyckpt.finding import Report, fail
from anyckpt.io.bounds import cut_short
from anyckpt.io.paths import printable
from anyckpt.pickle.streams import run_all

MAGIC = b"\x93NUMPY"
MAX_HEADER_BYTES = 64 << 10
MAX_DEPTH = 16
MAX_PICKLE_BYTES = 1 << 30

_CODES: dict[str, str] = {
    "f2": "float16", "f4": "float32", "f8": "float64", "b1": "bool", "c8": "complex64", "c16": "complex128",
    "i1": "int8", "i2": "int16", "i4": "int32", "i8": "int64", "u1": "uint8", "u2": "uint16", "u4": "uint32",
    "u8": "uint64",
    "V1": "bits8", "V2": "bits16",  # what numpy writes for float8 and bfloat16 of ml_dtypes
}  # fmt: skip
_TOKEN = re.compile(
    r"""\s*(?:('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")|([+-]?\d{1,20})[lL]?|(True|False|None)|([()\[\]{},:]))"""
)


@dataclass(frozen=True, slots=True)
class Header:
    """What the header says. `dtype` is None for what are no numbers; `offset` is where the elements begin."""

    descr: Any
    dtype: DType | None
    big_endian: bool
    fortran: bool
    shape: Shape
    offset: int

    @property
    def has_objects(self) -> bool:
        """Whether the elements, or a field of them, are pickled objects."""
        return any(isinstance(part, str) and part.lstrip("<>|=").startswith("O") for part in _flat(self.descr))


def matches(file: File, head: bytes) -> bool:
    """Whether the magic stands at the start; the table looked already."""
    return head.startswith(MAGIC)


def read(file: File, report: Report) -> Checkpoint:
    """One array as a checkpoint of one tensor, called `array`. Raises CheckpointError where the header is no header."""
    value = read_array(file, report)
    weights = {"array": value} if isinstance(value, Tensor) else {}
    state = {} if weights else {"array": value}
    return Checkpoint("npy", file.name, weights, state=state, facts={"container": "npy"})


def read_array(file: File, report: Report) -> Tensor | Any:
    """The array as a Tensor; text and structured arrays as Opaque, object arrays as what their pickle holds."""
    header = read_header(file)
    if header.has_objects:
        return _objects(file, header, report)
    if header.dtype is None:
        message = f"elements of type {printable(str(header.descr), limit=80)} are no numbers"
        report.add("unsupported", message, where=file.name, severity="warning")
        return Opaque(Global("numpy", "ndarray"), (header.shape, str(header.descr)))
    n_bytes = header.dtype.nbytes(prod(header.shape))
    if header.offset + n_bytes > file.size:
        raise cut_short(file.name, file.size, header.offset, header.offset + n_bytes)
    if header.offset + n_bytes < file.size:
        extra = file.size - header.offset - n_bytes
        report.add("trailing-data", f"{extra:,} bytes follow the array", where=file.name, severity="warning")
    unit = header.dtype.unit or header.dtype.itemsize
    span = Span(file, header.offset, n_bytes, unit if header.big_endian and unit > 1 else 0)
    strides = c_strides(header.shape[::-1])[::-1] if header.fortran and len(header.shape) > 1 else None
    return from_source(header.dtype, header.shape, span, strides)


def _objects(file: File, header: Header, report: Report) -> Any:
    """Judge the pickle of an object array and give back its list of objects, inert."""
    n_bytes = file.size - header.offset
    if n_bytes > MAX_PICKLE_BYTES:
        report.add("not-looked-at", f"its pickle of {n_bytes:,} bytes is too large to judge", where=file.name)
        report.worsen("unknown")
        return None
    streams = run_all(file.read(header.offset, n_bytes), where=file.name)
    report.extend(streams.findings)
    report.worsen(streams.verdict)
    return streams.results[0].value


def read_header(file: File) -> Header:
    """Parse the header. Raises [bad-header], [header-too-large], [truncated], [unsupported-version, negative-size]."""
    start = file.read(0, min(12, file.size))
    if len(start) < 10:
        raise cut_short(file.name, file.size, 0, 10)
    major, minor = start[6], start[7]
    if major not in (1, 2, 3):
        raise fail("unsupported-version", f"npy version {major}.{minor} is not known", where=file.name)
    n_length = 2 if major == 1 else 4
    n = int.from_bytes(start[8 : 8 + n_length], "little")
    offset = 8 + n_length + n
    if offset > file.size:
        raise cut_short(file.name, file.size, 8 + n_length, offset)
    if n > MAX_HEADER_BYTES:
        raise fail("header-too-large", f"a header of {n:,} bytes; the limit is {MAX_HEADER_BYTES:,}", where=file.name)
    try:
        text = file.read(8 + n_length, n).decode("utf-8" if major == 3 else "latin-1")
        found = parse_literal(text)
    except ValueError as error:
        if isinstance(error, CheckpointError):
            raise
        message = f"the header is not what numpy writes: {printable(str(error), limit=120)}"
        raise fail("bad-header", message, where=file.name) from error
    if not isinstance(found, dict) or set(found) != {"descr", "fortran_order", "shape"}:
        raise fail("bad-header", "the header is not a dict of descr, fortran_order and shape", where=file.name)
    shape, fortran = found["shape"], found["fortran_order"]
    if not isinstance(shape, tuple) or not all(type(size) is int for size in shape) or not isinstance(fortran, bool):
        raise fail("bad-header", "shape or fortran_order is of the wrong type", where=file.name)
    if any(size < 0 for size in shape):
        raise fail("negative-size", f"shape {list(shape)} has a negative size", where=file.name)
    dtype, big = element_type(found["descr"])
    return Header(found["descr"], dtype, big, fortran, shape, offset)


def element_type(descr: Any) -> tuple[DType | None, bool]:
    """The type of a `descr`, and whether it is big-endian; None for text, times and structures.

    >>> element_type(">f4")
    (float32, True)
    """
    if not isinstance(descr, str):
        return None, False
    order, code = (descr[0], descr[1:]) if descr[:1] in ("<", ">", "|", "=") else ("", descr)
    name = _CODES.get(code)
    return (DTYPES[name] if name else None), order == ">"


def _flat(descr: Any) -> Iterator[Any]:
    """Every string in a descr: the type, or the names and types of its fields at any depth."""
    if isinstance(descr, list | tuple):
        for part in descr:
            yield from _flat(part)
    else:
        yield descr


def parse_literal(text: str) -> Any:
    """A Python literal of dicts, lists, tuples, strings, whole numbers, True, False and None.

    Raises ValueError for anything else, and for nesting beyond 16.

    >>> parse_literal("{'descr': '<f4', 'shape': (2, 3)}")
    {'descr': '<f4', 'shape': (2, 3)}
    """
    tokens: list[Any] = []
    position, end = 0, len(text.rstrip(" \n"))
    while position < end:
        match = _TOKEN.match(text, position, end)
        if match is None:
            raise ValueError(f"unexpected {text[position : position + 20]!r}")
        tokens.append(match)
        position = match.end()
    value, used = _value(tokens, 0, 0)
    if used != len(tokens):
        raise ValueError("something follows the header's dict")
    return value


_CLOSING = {"(": ")", "[": "]", "{": "}"}
_WORDS = {"True": True, "False": False, "None": None}


def _value(tokens: list[re.Match[str]], at: int, depth: int) -> tuple[Any, int]:
    """The value that begins at a token, and the index behind it."""
    if at >= len(tokens):
        raise ValueError("it ends early")
    if depth > MAX_DEPTH:
        raise ValueError("it is nested too deep")
    string, number, word, mark = tokens[at].groups()
    if string is not None:
        if "\\" in string:
            raise ValueError("an escape in a string")
        return string[1:-1], at + 1
    if number is not None:
        return int(number), at + 1
    if word is not None:
        return _WORDS[word], at + 1
    if mark not in _CLOSING:
        raise ValueError(f"unexpected {mark!r}")
    return _items(tokens, at + 1, depth + 1, mark)


def _items(tokens: list[re.Match[str]], at: int, depth: int, opening: str) -> tuple[Any, int]:
    """The rest of a container behind its opening bracket."""
    items: list[Any] = []
    pairs: dict[Any, Any] = {}
    comma = True
    while True:
        if at >= len(tokens):
            raise ValueError("a bracket is not closed")
        if tokens[at][4] == _CLOSING[opening]:
            break
        if not comma:
            raise ValueError("a comma is missing")
        value, at = _value(tokens, at, depth)
        if opening == "{":
            if not isinstance(value, str) or value in pairs or at >= len(tokens) or tokens[at][4] != ":":
                raise ValueError("a dict has a key twice, or one that is no string")
            pairs[value], at = _value(tokens, at + 1, depth)
        else:
            items.append(value)
        comma = at < len(tokens) and tokens[at][4] == ","
        at += comma
    if opening == "{":
        return pairs, at + 1
    if opening == "[":
        return items, at + 1
    # A tuple of one needs its comma; without it the brackets only group.
    return (items[0] if len(items) == 1 and not comma else tuple(items)), at + 1
