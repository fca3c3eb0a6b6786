"""The rows of instances that make up nearly all of a large `.metadata`, each row read in one step.

    chunks     ChunkStorageMetadata {"offsets": Size, "sizes": Size}                         in a list
    entries    MetadataIndex {"fqn": text, "index": int or None, "offset": Size} and
               _StorageInfo {"relative_path": text, "offset": int, "length": int}            in turn, in a dict

What one stream writes for classes, keys and torch.Size is a GET of the same memo index each time. So the first instance
is read slowly, the second teaches those bytes, and a pattern made of them finds the rest.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from anyckpt.formats.dcp.records import Item
from anyckpt.pickle.stamps import (
    GET,
    HEAD,
    INTEGER,
    INTEGERS,
    NEW,
    SIZE_CLASS,
    SIZE_TAIL,
    TAIL,
    TEXT,
    Stream,
)

MAX_ROW = 1000  # instances that one search takes; CPython closes its batches at as many
MAX_SHORT_ROWS = 10_000
_OFF = "off"  # in `learned`: a row was not what its pattern said, so that no more are looked for
_G = rb"(" + GET + rb")"
_SIZE = _G + rb"(" + INTEGERS + rb")" + SIZE_TAIL
_CHUNK = re.compile(HEAD + _G + _SIZE + _G + _SIZE + TAIL, re.DOTALL)
_ENTRY = re.compile(
    HEAD + _G + TEXT + _G + rb"(?:" + INTEGER + rb"|N)" + _G + _SIZE + TAIL + _G + NEW
    + HEAD + _G + TEXT + _G + INTEGER + _G + INTEGER + TAIL, re.DOTALL,
)  # fmt: skip


class Row(NamedTuple):
    """The pattern of one instance (of a pair for entries) with what varies in groups, that of a row of them, and that
    of what stands before all but the first.

    `fixed_bytes` of each never vary, `lead_bytes` before it among them.
    """

    one: re.Pattern[bytes]
    row: re.Pattern[bytes]
    lead: re.Pattern[bytes]
    fixed_bytes: int
    lead_bytes: int


def chunks(stream: Stream, at: int, stack: list[Any]) -> int | None:
    """Chunks as (start, size)."""
    row = stream.learned.get("chunks") or _learn_chunks(stream, at)
    if row is None or row == _OFF:
        return None
    extent = row.row.match(stream.data, at)
    if extent is None:
        return None
    found = row.one.findall(stream.data, at, extent.end())
    n_bytes = sum(len(start) + len(size) for start, size in found) + row.fixed_bytes * len(found)
    if n_bytes - row.lead_bytes != extent.end() - at:
        stream.learned["chunks"] = _OFF
        return None
    numbers = stream.numbers
    values = [(numbers[start], numbers[size]) for start, size in found]
    stack.extend(values)

    def entries() -> Iterator[Any]:
        for value in values:
            start, size = value
            yield from (value, {"offsets": start, "sizes": size}, start, (start,), start, size, (size,), size)

    stream.memo.advance(8 * len(values), entries)
    return extent.end()


def _learn_chunks(stream: Stream, at: int) -> Row | None:
    found = _CHUNK.match(stream.data, at)
    cls = stream.get_before(at - 2)
    if found is None or cls is None:
        return None
    first, size_class, _, second, same_class, _ = found.groups()
    if [stream.value(t) for t in (first, second, size_class, same_class)] != ["offsets", "sizes", *[SIZE_CLASS] * 2]:
        return None

    def body(numbers: bytes) -> bytes:
        size = re.escape(size_class) + numbers + SIZE_TAIL
        return HEAD + re.escape(first) + size + re.escape(second) + size + TAIL

    lead = re.escape(cls) + NEW
    row = _row(body(rb"(" + INTEGERS + rb")"), body(INTEGERS), lead)
    n_fixed = 4 + 2 + len(first + second) + 2 * (len(size_class) + 6) + len(cls) + 2
    stream.learned["chunks"] = learned = Row(*row, n_fixed, len(cls) + 2)
    return learned


def _row(one: bytes, plain: bytes, lead: bytes) -> tuple[re.Pattern[bytes], re.Pattern[bytes], re.Pattern[bytes]]:
    row = plain + rb"(?:" + lead + plain + rb"){0,%d}" % (MAX_ROW - 1)
    return re.compile(one, re.DOTALL), re.compile(row, re.DOTALL), re.compile(lead, re.DOTALL)


def entries(stream: Stream, at: int, stack: list[Any]) -> int | None:
    """Entries of storage_data, as (name, start) and Item in turn.

    A row ends behind a value, which the machine then sees as any other.
    """
    row = stream.learned.get("entries") or _learn_entries(stream, at)
    if row is None or row == _OFF:
        return None
    extent = row.row.match(stream.data, at)
    if extent is None:
        return None
    found = row.one.findall(stream.data, at, extent.end())
    pairs, n_bytes, n_memo = _pairs(stream, found)
    n = len(pairs) // 2
    end = at + n_bytes + row.fixed_bytes * n - row.lead_bytes
    if not n or not (end == extent.end() if n == len(found) else row.lead.match(stream.data, end)):
        return _short(stream, None)
    stack.extend(pairs)

    def memoised() -> Iterator[Any]:
        for i, (n_name, _, _, index, _, n_path, *_) in enumerate(found[:n]):
            key, info = pairs[2 * i], pairs[2 * i + 1]
            number = None if index == b"N" else stream.numbers[index][0]
            yield from (key, {"fqn": key[0], "index": number, "offset": key[1]})
            if n_name:
                yield key[0]
            yield from (key[1], (key[1],), key[1])
            yield from (info, {"relative_path": info[0], "offset": info[1], "length": info[2]})
            if n_path:
                yield info[0]

    stream.memo.advance(7 * n + n_memo, memoised)
    return end if n == len(found) else _short(stream, end)


def _short(stream: Stream, end: int | None) -> int | None:
    """A row was used in part or not at all: where that goes on and on, rows are not looked for any more."""
    n_short = stream.learned["short"] = stream.learned.get("short", 0) + 1
    if n_short > MAX_SHORT_ROWS:
        stream.learned["entries"] = _OFF
    return end


def _pairs(stream: Stream, found: list[Any]) -> tuple[list[Any], int, int]:
    """Keys and values in turn, how many bytes varied in them, how many texts were memoised.

    Ends before a pair that makes no sense, or that names a text which this very row memoised.
    """
    numbers, texts, value = stream.numbers, stream.texts, stream.value
    pairs: list[Any] = []
    n_bytes = n_memo = 0
    for n_name, name, get_name, index, start, n_path, path, get_path, offset, length in found:
        inline_name, inline_path = bool(n_name), bool(n_path)
        key = texts[name] if inline_name else value(get_name)
        file = texts[path] if inline_path else value(get_path)
        (first,), (n,) = numbers[offset], numbers[length]
        if type(key) is not str or type(file) is not str or first < 0 or n < 0:
            break
        if (inline_name and n_name[0] != len(name)) or (inline_path and n_path[0] != len(path)):
            break
        n_memo += inline_name + inline_path
        n_bytes += len(name) + len(get_name) + len(index) + len(start) + len(path) + len(get_path)
        n_bytes += len(offset) + len(length)
        pairs += (key, numbers[start]), Item(file, first, n)
    return pairs, n_bytes + 3 * n_memo, n_memo


def _learn_entries(stream: Stream, at: int) -> Row | None:
    found = _ENTRY.match(stream.data, at)
    cls = stream.get_before(at - 2)
    if found is None or cls is None:
        return None
    fqn, _, _, _, index, offset, size_class, _, info, path, _, _, _, file_offset, length = found.groups()
    known = [stream.value(t) for t in (fqn, index, offset, path, file_offset, length)]
    if known != ["fqn", "index", "offset", "relative_path", "offset", "length"]:
        return None
    if stream.value(size_class) != SIZE_CLASS or getattr(stream.value(info), "name", "") != "_StorageInfo":
        return None

    def body(grouped: bool) -> bytes:
        open_, text = (rb"(", TEXT) if grouped else (rb"(?:", re.sub(rb"\((?!\?)", rb"(?:", TEXT))
        parts = [
            HEAD, re.escape(fqn), text, re.escape(index), open_, INTEGER, rb"|N)", re.escape(offset),
            re.escape(size_class), open_, INTEGERS, rb")", SIZE_TAIL, TAIL, re.escape(info), NEW, HEAD,
            re.escape(path), text, re.escape(file_offset), open_, INTEGER, rb")", re.escape(length), open_, INTEGER,
            rb")", TAIL,
        ]  # fmt: skip
        return b"".join(parts)

    row = _row(body(True), body(False), re.escape(cls) + NEW)
    tokens = fqn + index + offset + size_class + info + path + file_offset + length + cls
    n_fixed = len(tokens) + 2 * 4 + 2 * 2 + 6 + 2 * 2
    stream.learned["entries"] = learned = Row(*row, n_fixed, len(cls) + 2)
    return learned
