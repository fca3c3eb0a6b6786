"""Arguments of opcodes: bytes, lines, numbers and text, each bounded by what remains before it is read."""

from __future__ import annotations

import codecs
from typing import Any

from anyckpt.finding import fail
from anyckpt.pickle.semantics import Machine


def take(m: Machine, pos: int, n: int) -> bytes:
    """`n` bytes at `pos`, checked against what remains before anything is allocated."""
    if n > len(m.data) - pos:
        raise fail("truncated", f"an opcode needs {n:,} bytes and {max(0, len(m.data) - pos):,} remain")
    return bytes(m.data[pos : pos + n])


def line(m: Machine, pos: int, most: int) -> tuple[bytes, int]:
    """The bytes up to a newline, looked for in growing windows: linear for bytes and memoryviews alike."""
    end, at, step = min(len(m.data), pos + most + 1), pos, 256
    while at < end:
        found = bytes(m.data[at : min(at + step, end)]).find(b"\n")
        if found >= 0:
            return bytes(m.data[pos : at + found]), at + found + 1
        at, step = at + step, min(step * 4, 1 << 20)
    if end == len(m.data):
        raise fail("truncated", "a line of a text opcode has no end")
    raise fail("limit-exceeded", f"a line of a text opcode is longer than {most:,} bytes")


def name_line(m: Machine, pos: int) -> tuple[str, int]:
    """A line of GLOBAL or INST, or a text persistent id."""
    raw, pos = line(m, pos, m.limits.line_bytes)
    try:
        return raw.decode("utf-8"), pos
    except UnicodeDecodeError:
        m.report("malformed-pickle", "a global's name is not UTF-8")
        return raw.decode("utf-8", "replace"), pos


def number_line(m: Machine, pos: int) -> tuple[str, int]:
    """A line that holds a number; more digits than Python itself would convert are refused."""
    raw, pos = line(m, pos, m.limits.line_bytes)
    if len(raw) > m.limits.digits + 2:
        raise fail("limit-exceeded", f"a number is written with {len(raw):,} digits")
    return raw.decode("ascii", "replace"), pos


def text(m: Machine, raw: bytes) -> str:
    """UTF-8, lone surrogates allowed as Python writes them."""
    return raw.decode("utf-8", "surrogatepass")


def binary(m: Machine, raw: bytes) -> bytes:
    """Bytes as they are."""
    return raw


def python2(m: Machine, raw: bytes) -> Any:
    """A Python 2 byte string: text where it is UTF-8, as torch.load decodes it, otherwise bytes."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return raw


def little_endian(m: Machine, raw: bytes) -> int:
    """A signed integer of any length."""
    return int.from_bytes(raw, "little", signed=True)


def integer(m: Machine, pos: int) -> tuple[int, int]:
    """The integer of INT; 00 and 01 are the booleans of protocol 1."""
    digits, pos = number_line(m, pos)
    return (digits == "01" if digits in ("00", "01") else int(digits, 0)), pos


def long_integer(m: Machine, pos: int) -> tuple[int, int]:
    """The integer of LONG, with or without its L."""
    digits, pos = number_line(m, pos)
    return int(digits.removesuffix("L"), 0), pos


def real(m: Machine, pos: int) -> tuple[float, int]:
    """The number of FLOAT."""
    digits, pos = number_line(m, pos)
    return float(digits), pos


def quoted(m: Machine, pos: int) -> tuple[Any, int]:
    """The Python 2 byte string of STRING, a literal in quotes."""
    raw, pos = line(m, pos, len(m.data))
    if len(raw) < 2 or raw[:1] not in (b"'", b'"') or raw[-1:] != raw[:1]:
        raise fail("malformed-pickle", "a STRING is not in quotes")
    return python2(m, codecs.escape_decode(raw[1:-1])[0]), pos


def escaped(m: Machine, pos: int) -> tuple[str, int]:
    """The text of UNICODE."""
    raw, pos = line(m, pos, len(m.data))
    return raw.decode("raw-unicode-escape"), pos
