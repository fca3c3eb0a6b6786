"""Instances that a pickler stamps out by the million, read in one step each instead of opcode by opcode.

CPython writes every instance of a plain class with the same opcodes; only numbers and names differ. A `Stamp` knows the
bytes that follow NEWOBJ for one class, and makes the values of a whole row of instances at once. Of the memo, only what
is named again matters, so the indexes that any GET in the stream could name are collected beforehand: a superset, for
bytes that merely look like a GET count too. What a stamp does not know exactly is left to the opcodes.

    NEWOBJ | MEMOIZE, EMPTY_DICT, MEMOIZE, MARK, key, value, key, value, …, SETITEMS, BUILD |

Only streams without PUT opcodes (protocol 4 and later) are read so; any other starts again without stamps.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from struct import Struct
from typing import Any

from anyckpt.core.box import Shape
from anyckpt.core.inert import Global

_UINT4 = Struct("<I").unpack_from
_GET_TEXT = re.compile(rb"g(\d{1,12})\n")
_BLOCK_BYTES = 1 << 24
MAX_CACHED = 1 << 20

GET = rb"(?:h.|j.{4})"
INTEGER = rb"(?:K.|M..|J.{4}|\x8a\x05.{5}|\x8a\x06.{6}|\x8a\x07.{7}|\x8a\x08.{8})"
INTEGERS = rb"(?:" + INTEGER + rb"){1,3}"
HEAD = rb"\x94\}\x94\("
TAIL = rb"ub"
SIZE_TAIL = rb"[\x85-\x87]\x94\x85\x94R\x94"
"""The end of a torch.Size of one to three axes: a tuple, the tuple around it, REDUCE; three memo entries."""
NEW = rb"\)\x81"
TEXT = rb"(?:\x8c(.)([^\x94]{0,255})\x94|(" + GET + rb"))"
"""Text as SHORT_BINUNICODE and MEMOIZE, its length to be checked, or a GET."""


class OutOfOrder(Exception):
    """The stream has PUT opcodes: it must be read without stamps."""


class SparseMemo(dict[int, Any]):
    """The memo of a stream that only MEMOIZE fills, without the entries that no GET can name."""

    __slots__ = ("n", "wanted")

    def __init__(self, wanted: bytearray) -> None:
        super().__init__()
        self.n, self.wanted = 0, wanted

    def __len__(self) -> int:
        return self.n

    def __setitem__(self, index: int, value: Any) -> None:
        """Raises OutOfOrder where the entry is not the next one."""
        if index != self.n:
            raise OutOfOrder
        if index >= len(self.wanted) or self.wanted[index]:
            dict.__setitem__(self, index, value)
        self.n = index + 1

    def advance(self, n: int, values: Callable[[], Iterable[Any]]) -> None:
        """Count `n` entries; `values` gives them in order, and is asked only where one of them could be named."""
        if self.wanted.find(1, self.n, self.n + n) < 0:
            self.n += n
            return
        for value in values():
            self[self.n] = value


def wanted(data: bytes) -> bytearray:
    """For every memo index that the stream can have: whether some GET may name it."""
    import numpy as np

    raw = np.frombuffer(data, np.uint8)
    n = data.count(b"\x94")
    marks = np.zeros(n + 1, np.uint8)
    marks[:256] = 1
    for start in range(0, len(raw), _BLOCK_BYTES):
        found = np.flatnonzero(raw[start : start + _BLOCK_BYTES] == 0x6A) + start
        found = found[found + 4 < len(raw)]
        low, high = (raw[found + i].astype(np.int64) | raw[found + i + 1].astype(np.int64) << 8 for i in (1, 3))
        index = low | high << 16
        marks[index[index <= n]] = 1
    for match in _GET_TEXT.finditer(data):
        if (named := int(match[1])) <= n:
            marks[named] = 1
    return bytearray(marks.tobytes())


class Numbers(dict[bytes, Shape]):
    """Tuples of integers by the bytes of their opcodes, each made once."""

    def __missing__(self, tokens: bytes) -> Shape:
        if len(self) > MAX_CACHED:
            self.clear()
        made = self[tokens] = _numbers(tokens)
        return made


class Texts(dict[bytes, str]):
    """Texts by their bytes, each made once."""

    def __missing__(self, raw: bytes) -> str:
        if len(self) > MAX_CACHED:
            self.clear()
        made = self[raw] = str(raw, "utf-8", "surrogatepass")
        return made


class Stream:
    """What a stamp may ask of the stream: its bytes, what a GET gives, numbers and texts.

    `learned` is for patterns that a stamp makes of the memo indexes that this stream uses.
    """

    __slots__ = ("data", "learned", "memo", "numbers", "texts")

    def __init__(self, data: bytes, memo: SparseMemo) -> None:
        self.data, self.memo = data, memo
        self.numbers, self.texts = Numbers(), Texts()
        self.learned: dict[str, Any] = {}

    def value(self, token: bytes) -> Any:
        """What the GET gives; None where it names nothing."""
        return self.memo.get(token[1] if token[0] == 0x68 else _UINT4(token, 1)[0])

    def get_before(self, at: int) -> bytes | None:
        """The GET that ends at `at`, None where none does."""
        if self.data[at - 5 : at - 4] == b"j":
            return self.data[at - 5 : at]
        return self.data[at - 2 : at] if self.data[at - 2 : at - 1] == b"h" else None


def _numbers(tokens: bytes) -> Shape:
    out = []
    at = 0
    while at < len(tokens):
        op = tokens[at]
        if op == 0x4B:
            out.append(tokens[at + 1])
            at += 2
        elif op == 0x4D:
            out.append(int.from_bytes(tokens[at + 1 : at + 3], "little"))
            at += 3
        elif op == 0x4A:
            out.append(int.from_bytes(tokens[at + 1 : at + 5], "little", signed=True))
            at += 5
        else:
            n = tokens[at + 1]
            out.append(int.from_bytes(tokens[at + 2 : at + 2 + n], "little", signed=True))
            at += 2 + n
    return tuple(out)


Stamp = Callable[[Stream, int, "list[Any]"], "int | None"]
"""(stream, offset behind NEWOBJ, stack) -> the offset behind the last BUILD of as many instances as follow each other,
their values pushed; None, and nothing pushed: read it opcode by opcode."""

SIZE_CLASS = Global("torch", "Size")
