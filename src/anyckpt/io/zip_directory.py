"""The end records and the central directory of a zip archive, as bytes; `zip.py` has the byte map and the rules."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from anyckpt.core.source import File
from anyckpt.errors import CheckpointError
from anyckpt.finding import Report, fail
from anyckpt.io.paths import printable

MAX_DIRECTORY_BYTES = 1 << 28
UTF8_FLAG = 1 << 11
END = struct.Struct("<4s4H2LH")
END64 = struct.Struct("<4sQ2H2L4Q")
LOCATOR = struct.Struct("<4sLQL")
CENTRAL = struct.Struct("<4s6H3L5H2L")
_U16, _U32 = 0xFFFF, 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Member:
    """A member as the central directory describes it. `header_offset` counts from the start of the file."""

    name: str
    header_offset: int
    stored_size: int
    size: int
    method: int
    crc: int
    flags: int


@dataclass(frozen=True, slots=True)
class Directory:
    """Where the central directory is, and what it says."""

    offset: int
    entries: tuple[Member, ...]
    comment: bytes


def read_directory(file: File, report: Report) -> Directory:
    """Find and parse the central directory; raises as `zip.read_zip` says."""
    end, comment = _find_end(file, report)
    n_entries, n_bytes, claimed, directory_end = _extent(file, end, report)
    if n_bytes > MAX_DIRECTORY_BYTES:
        raise fail("limit-exceeded", f"has a central directory of {n_bytes:,} bytes", where=file.name)
    if n_bytes > directory_end or n_entries * CENTRAL.size > n_bytes:
        raise fail(
            "zip-inconsistent", f"claims {n_entries:,} members in a directory of {n_bytes:,} bytes", where=file.name
        )
    start, shift = _locate(file, claimed, directory_end - n_bytes, report, empty=n_entries == 0)
    entries, used = _entries(file.read(start, n_bytes), n_entries, shift, file.name, report)
    if used != n_bytes:
        report.add("zip-inconsistent", f"{n_bytes - used:,} bytes of its directory belong to no entry", where=file.name)
    return Directory(start, tuple(entries), comment)


def _find_end(file: File, report: Report) -> tuple[int, bytes]:
    """The offset of the end record and the archive's comment."""
    n_tail = min(file.size, END.size + _U16)
    tail = file.read(file.size - n_tail, n_tail)
    at = tail.rfind(b"PK\5\6", 0, n_tail - END.size + 4)
    if at < 0:
        raise _no_end(file, tail)
    candidates = []
    position = at
    while position >= 0:
        n_comment = int.from_bytes(tail[position + 20 : position + 22], "little")
        if position + END.size + n_comment == n_tail:
            candidates.append(position)
        position = tail.rfind(b"PK\5\6", 0, position + 3)
    if len(candidates) > 1:
        report.add("zip-inconsistent", "has more than one end record", where=file.name)
        report.worsen("unknown")
    if at not in candidates:
        n_comment = int.from_bytes(tail[at + 20 : at + 22], "little")
        n_behind = n_tail - at - END.size
        if n_comment > n_behind:
            report.add("truncated", f"its comment is cut short by {n_comment - n_behind:,} bytes", where=file.name)
        else:
            report.add("trailing-data", f"{n_behind - n_comment:,} bytes follow its end record", where=file.name)
    return file.size - n_tail + at, tail[at + END.size :]


def _no_end(file: File, tail: bytes) -> CheckpointError:
    head = file.read(0, min(4, file.size))
    if head != b"PK\3\4":
        return fail("not-a-checkpoint", "is no zip archive: it has no end record", where=file.name)
    zeros = len(tail) - len(tail.rstrip(b"\0"))
    how = f"it ends in {zeros:,} or more zero bytes" if zeros >= END.size else f"it ends at byte {file.size:,}"
    return fail(
        "truncated",
        f"is a zip archive without its central directory, which stands at the end; {how}",
        where=file.name,
        hint="download or copy this file again",
    )


def _extent(file: File, end: int, report: Report) -> tuple[int, int, int, int]:
    """How many entries and bytes the directory has, its claimed offset, and where it ends."""
    _, disk, first_disk, n_here, n_entries, n_bytes, offset, _ = END.unpack(file.read(end, END.size))
    small = (disk, first_disk, n_here, n_entries, n_bytes, offset)
    if end < LOCATOR.size:
        return _one_disk(file, small, end)
    magic, _, claimed, _ = LOCATOR.unpack(file.read(end - LOCATOR.size, LOCATOR.size))
    if magic != b"PK\6\7":
        return _one_disk(file, small, end)
    start = end - LOCATOR.size - END64.size  # as every writer has it: no extensible data between the two
    raw = file.read(start, END64.size) if start >= 0 else b""
    if raw[:4] != b"PK\6\6" and claimed + END64.size <= end - LOCATOR.size:
        start, raw = claimed, file.read(claimed, END64.size)
    if raw[:4] != b"PK\6\6":
        raise fail("zip-inconsistent", "its zip64 end record is missing", where=file.name)
    _, n_record, _, _, disk, first_disk, n_here, n_entries, n_bytes, offset = END64.unpack(raw)
    if start + 12 + n_record != end - LOCATOR.size:
        report.add("zip-inconsistent", "its zip64 end record has the wrong length", where=file.name)
    if claimed - start != offset - (start - n_bytes):
        report.add("zip-inconsistent", "its zip64 end record is not where it is said to be", where=file.name)
        report.worsen("unknown")
    wide = (disk, first_disk, n_here, n_entries, n_bytes, offset)
    limits = (_U16, _U16, _U16, _U16, _U32, _U32)
    if any(s != w and s != limit for s, w, limit in zip(small, wide, limits, strict=True)):
        report.add("zip-inconsistent", "its two end records disagree", where=file.name)
        report.worsen("unknown")
    return _one_disk(file, wide, start)


def _one_disk(file: File, fields: tuple[int, ...], end: int) -> tuple[int, int, int, int]:
    disk, first_disk, n_here, n_entries, n_bytes, offset = fields
    if disk or first_disk or n_here != n_entries:
        raise fail("unsupported", "is one part of a zip archive in several parts", where=file.name)
    return n_entries, n_bytes, offset, end


def _locate(file: File, claimed: int, measured: int, report: Report, *, empty: bool) -> tuple[int, int]:
    """Where the directory is, and what to add to the offsets in it.

    torch looks where the end record says; Python where the directory must begin to end at the end record, and takes
    the difference for the length of something put before the archive.
    """
    if claimed == measured:
        return claimed, 0
    message = f"its directory is said to be at byte {claimed:,} and ends as if it began at {measured:,}"
    if empty or (measured >= 0 and file.read(measured, 4) == b"PK\1\2"):
        if claimed > measured:
            raise fail("zip-inconsistent", message, where=file.name)
        if file.read(0, 4) == b"PK\3\4" or file.read(claimed, 4) == b"PK\1\2":
            report.add("zip-inconsistent", message, where=file.name)
            report.worsen("unknown")
        return measured, measured - claimed
    raise fail("zip-inconsistent", message, where=file.name)


def _entries(data: bytes, n_entries: int, shift: int, where: str, report: Report) -> tuple[list[Member], int]:
    """The entries of the directory in order, and how many bytes of it they take."""
    entries: list[Member] = []
    position = 0
    for _ in range(n_entries):
        if position + CENTRAL.size > len(data) or data[position : position + 4] != b"PK\1\2":
            raise fail("zip-inconsistent", f"its directory breaks off after {len(entries):,} members", where=where)
        values = CENTRAL.unpack_from(data, position)
        _, _, _, flags, method, _, _, crc, stored_size, size, n_name, n_extra, n_comment, _, _, _, offset = values
        name_end = position + CENTRAL.size + n_name
        position = name_end + n_extra + n_comment
        if position > len(data):
            raise fail("zip-inconsistent", f"its directory breaks off after {len(entries):,} members", where=where)
        raw_name = data[name_end - n_name : name_end]
        name = decode_name(raw_name, flags)
        if not raw_name.isascii() and any("\udc80" <= c <= "\udcff" for c in name):
            report.add("bad-utf8", "its name is not UTF-8", where=f"{where}!{printable(name)}")
        if _U32 in (size, stored_size, offset):
            extra = data[name_end : name_end + n_extra]
            try:
                size, stored_size, offset = widen(extra, size, stored_size, offset)
            except ValueError:
                report.add("zip-inconsistent", "lacks its zip64 field", where=f"{where}!{printable(name)}")
        entries.append(Member(name, offset + shift, stored_size, size, method, crc, flags))
    return entries, position


def widen(extra: bytes, size: int, stored_size: int, offset: int = 0) -> tuple[int, int, int]:
    """The values, with each that reads 0xFFFFFFFF taken from the zip64 extra field; ValueError where it lacks one."""
    position = 0
    while position + 4 <= len(extra):
        identifier, length = struct.unpack_from("<HH", extra, position)
        position += 4
        if identifier == 1:
            n_values = min(length, len(extra) - position) // 8
            values = list(struct.unpack_from(f"<{n_values}Q", extra, position))
            narrow = (size, stored_size, offset)
            if narrow.count(_U32) <= n_values:
                size, stored_size, offset = (values.pop(0) if value == _U32 else value for value in narrow)
                return size, stored_size, offset
        position += length
    if _U32 in (size, stored_size, offset):
        raise ValueError("no zip64 field")
    return size, stored_size, offset


def decode_name(raw: bytes, flags: int) -> str:
    """A member's name. Without the UTF-8 flag it should be code page 437, but most writers of today mean UTF-8."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return raw.decode("utf-8", "surrogateescape") if flags & UTF8_FLAG else raw.decode("cp437")
