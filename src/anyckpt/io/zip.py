"""Zip archives, read from the central directory: .pt, .npz, .keras, .pt2. Nothing is extracted, nothing trusted.

    local header, name, extra, data [, data descriptor]     for each member      PK 03 04 … [PK 07 08]
    central entry, name, extra, comment                     for each member      PK 01 02
    [zip64 end record, zip64 locator]                       torch writes always  PK 06 06, PK 06 07
    end record, comment                                     ends the file        PK 05 06

Facts from APPNOTE.TXT 6.3.10. Loaders read damaged or crafted archives differently (torch's miniz matches names without
regard to case and ignores CRCs, Python's zipfile does neither), so whatever two of them could read in two ways is an
error. Only what leaves no reading at all raises: the pickles inside are judged even where the archive is at fault.

The directory is one read at the end of the file. The local headers, which alone know where data begins, are scattered
over it and are read member by member as these are opened; `ZipArchive.check_all` reads them all.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from anyckpt.core.source import File
from anyckpt.errors import CheckpointError
from anyckpt.finding import Report, fail
from anyckpt.io.inflate import MAX_RATIO, decoded
from anyckpt.io.paths import name_fault, printable
from anyckpt.io.view import sub_file
from anyckpt.io.zip_directory import Member, decode_name, read_directory, widen

_LOCAL = struct.Struct("<4s5H3L2H")
_USUAL_BYTES = 256  # of a local header with its name and extra fields: read at once
_METHODS = {8: "deflate", 93: "zstd"}
_ENCRYPTED, _DESCRIPTOR = 1 << 0, 1 << 3


@dataclass(frozen=True, slots=True)
class _LocalHeader:
    """A local header; `data_offset` is where the member's bytes begin."""

    name: str
    flags: int
    method: int
    crc: int
    stored_size: int
    size: int
    data_offset: int


@dataclass(frozen=True, slots=True, eq=False)
class ZipArchive:
    """The members by name, without folders. `shadowed`: earlier members of a name that occurs again.

    `top` is the first member's folder, which torch takes for the folder of all ("" where it has none).
    """

    file: File
    report: Report = field(repr=False)
    members: dict[str, Member] = field(repr=False)
    shadowed: tuple[Member, ...]
    top: str
    comment: bytes
    directory_offset: int

    @property
    def strays(self) -> list[str]:
        """The names that lie outside of the top folder."""
        return [name for name in self.members if self.top and not name.startswith(self.top + "/")]

    def open(self, member: str | Member, *, max_ratio: int | None = MAX_RATIO) -> File:
        """A member's bytes, decoded on reading. Faults of its local header are reported; [missing-record] raises."""
        if isinstance(member, str):
            found = self.members.get(member)
            if found is None:
                raise fail("missing-record", f"there is no member {printable(member)!r}", where=self.file.name)
            member = found
        where = self._where(member)
        raw = sub_file(self.file, self.data_offset(member), member.stored_size, where)
        if member.method == 0:
            if member.size != member.stored_size:
                self._fault(f"is stored as it is, yet in {member.stored_size:,} bytes for {member.size:,}", where)
            return raw
        if member.method not in _METHODS:
            raise fail("unsupported-compression", f"uses compression method {member.method}", where=where)
        return decoded(raw, member.size, _METHODS[member.method], name=where, max_ratio=max_ratio)

    def data_offset(self, member: Member) -> int:
        """Where a member's data begins, from its local header, which is compared with the central entry."""
        where = self._where(member)
        local = _local_header(self.file, member.header_offset, self.directory_offset)
        if local is None:
            raise fail("zip-inconsistent", f"has no local header at byte {member.header_offset:,}", where=where)
        if local.data_offset + member.stored_size > self.directory_offset:
            raise fail("zip-inconsistent", "its data would reach into the central directory", where=where)
        if local.name != member.name:
            self._fault(f"its local header calls it {printable(local.name)!r}", where)
        if local.method != member.method:
            self._fault(f"its local header has compression method {local.method}, not {member.method}", where)
        if (local.flags ^ member.flags) & _ENCRYPTED:
            self._fault("only one of its two headers says that it is encrypted", where)
        sizes = (local.size, local.stored_size)
        deferred = local.flags & _DESCRIPTOR and sizes == (0, 0)
        if not deferred and sizes != (member.size, member.stored_size):
            self._fault(f"its local header has sizes {local.stored_size:,} and {local.size:,}", where)
        if local.crc and local.crc != member.crc:
            self._fault("its two headers have different checksums", where)
        return local.data_offset

    def check_all(self) -> None:
        """Read every local header and report faults, members that overlap, and bytes that belong to none."""
        end, last = 0, ""
        for member in sorted((*self.members.values(), *self.shadowed), key=_offset_of):
            try:
                offset = self.data_offset(member)
            except CheckpointError as error:
                self.report.extend([error.finding])
                continue
            if member.header_offset < end:
                self._fault(f"overlaps the member {printable(last)!r}", self._where(member))
            elif end and member.header_offset - end > 24:  # a data descriptor has 12, 16, 20 or 24 bytes
                n_bytes = member.header_offset - end
                self.report.add(
                    "unexpected-member", f"{n_bytes:,} bytes before it belong to no member", where=self._where(member)
                )
            end, last = offset + member.stored_size, member.name

    def crc_matches(self, member: Member) -> bool:
        """Whether a member's bytes have the checksum that the directory gives (one pass over them)."""
        return crc32_of(self.open(member)) == member.crc

    def _where(self, member: Member) -> str:
        return f"{self.file.name}!{printable(member.name)}"

    def _fault(self, message: str, where: str) -> None:
        self.report.add("zip-inconsistent", message, where=where)


def read_zip(file: File, report: Report) -> ZipArchive:
    """Read the central directory of `file`; faults that leave it readable go to `report`.

    Raises [truncated] where the directory is cut off, [not-a-checkpoint] where there never was one,
    [zip-inconsistent] where it cannot be read.
    """
    directory = read_directory(file, report)
    members, shadowed = _by_name(directory.entries, file.name, report)
    _check_extents([*members.values(), *shadowed], directory.offset, file.name, report)
    _check_flags(members.values(), file.name, report)
    first = next(iter(members), "")
    top = first.split("/", 1)[0] if "/" in first else ""
    return ZipArchive(file, report, members, tuple(shadowed), top, directory.comment, directory.offset)


def crc32_of(file: File, *, chunk_bytes: int = 1 << 20) -> int:
    """The CRC-32 of a whole file, streamed."""
    crc, buffer = 0, memoryview(bytearray(min(chunk_bytes, file.size) or 1))
    for offset in range(0, file.size, chunk_bytes):
        part = buffer[: min(chunk_bytes, file.size - offset)]
        file.readinto(offset, part)
        crc = zlib.crc32(part, crc)
    return crc


def walk_local_headers(file: File, size_of: Callable[[str, File], int | None]) -> list[tuple[Member, int]]:
    """What is left of a zip cut short: the whole members from its start, each with the offset of its data.

    A streaming writer (torch) leaves the sizes in local headers at 0 and puts them behind the data, so `size_of` is
    asked, with the name and all bytes from the data's start on; None ends the walk. torch's reader knows them: data.pkl
    ends at its STOP, and it tells the bytes of the storages, which follow in the order of their first use.
    """
    found: list[tuple[Member, int]] = []
    offset = 0
    while local := _local_header(file, offset, file.size):
        size, stored_size = local.size, local.stored_size
        if local.flags & _DESCRIPTOR and not stored_size:
            where = f"{file.name}!{printable(local.name)}"
            known = size_of(local.name, sub_file(file, local.data_offset, file.size - local.data_offset, where))
            if known is None or known < 0:
                break
            size = stored_size = known
        end = local.data_offset + stored_size
        if end > file.size:
            break
        member = Member(local.name, offset, stored_size, size, local.method, local.crc, local.flags)
        found.append((member, local.data_offset))
        offset = _after_descriptor(file, end) if local.flags & _DESCRIPTOR else end
    return found


def _by_name(entries: Iterable[Member], where: str, report: Report) -> tuple[dict[str, Member], list[Member]]:
    """The members by name, the last of a name winning as everywhere, and those that lose."""
    members: dict[str, Member] = {}
    shadowed: list[Member] = []
    folded: dict[str, str] = {}

    def fault(code: str, message: str) -> None:
        report.add(code, message, where=f"{where}!{printable(entry.name)}")

    for entry in entries:
        if reason := name_fault(entry.name):
            fault("path-escape", f"its name {reason}")
        if entry.name.endswith("/"):
            if not entry.size and not entry.stored_size:
                continue
            fault("zip-inconsistent", "is a folder, yet it has bytes")
        other = folded.setdefault(entry.name.casefold(), entry.name)
        if other != entry.name or entry.name in members:
            fault("duplicate-member", "its name occurs twice (loaders differ in which they take)")
        if entry.name in members:
            shadowed.append(members[entry.name])
        members[entry.name] = entry
    return members, shadowed


def _check_extents(members: Iterable[Member], directory_offset: int, where: str, report: Report) -> None:
    """Report members that must overlap, by the least room that each can take, and bytes before the first one."""
    end, last = 0, ""
    for member in sorted(members, key=_offset_of):
        if not end and member.header_offset > 0:
            report.add("polyglot", f"{member.header_offset:,} bytes stand before the first member", where=where)
        if member.header_offset < end:
            place = f"{where}!{printable(member.name)}"
            report.add("zip-inconsistent", f"overlaps the member {printable(last)!r}", where=place)
        end = member.header_offset + _LOCAL.size + len(member.name) + member.stored_size
        last = member.name
        if member.header_offset < 0 or end > directory_offset:
            place = f"{where}!{printable(member.name)}"
            report.add("zip-inconsistent", "does not fit before the directory", where=place)


def _check_flags(members: Iterable[Member], where: str, report: Report) -> None:
    any_crc = any_data = False
    for member in members:
        any_data |= member.size > 0
        any_crc |= member.crc != 0
        if member.flags & _ENCRYPTED:
            report.add("zip-encrypted", "is marked as encrypted", where=f"{where}!{printable(member.name)}")
    if any_data and not any_crc:
        report.add("no-checksums", "was written without checksums (all are 0)", where=where)


def _offset_of(member: Member) -> int:
    return member.header_offset


def _local_header(file: File, offset: int, limit: int) -> _LocalHeader | None:
    """The local header at `offset`, None where there is none that ends before `limit`."""
    if offset < 0 or offset + _LOCAL.size > limit:
        return None
    raw = file.read(offset, min(_USUAL_BYTES, limit - offset))
    magic, _, flags, method, _, _, crc, stored_size, size, n_name, n_extra = _LOCAL.unpack_from(raw)
    n_bytes = _LOCAL.size + n_name + n_extra
    if magic != b"PK\3\4" or offset + n_bytes > limit:
        return None
    if n_bytes > len(raw):
        raw = file.read(offset, n_bytes)
    extra_start = _LOCAL.size + n_name
    with suppress(ValueError):  # without the field they stay, and differ from the central entry's
        size, stored_size, _ = widen(raw[extra_start:n_bytes], size, stored_size)
    name = decode_name(raw[_LOCAL.size : extra_start], flags)
    return _LocalHeader(name, flags, method, crc, stored_size, size, offset + n_bytes)


def _after_descriptor(file: File, offset: int) -> int:
    """Behind the data descriptor, if one is there: PK 07 08, the CRC, two sizes of 4 or 8 bytes each."""
    head = file.read(offset, min(28, file.size - offset))
    if head[:4] != b"PK\7\x08":
        return offset
    return offset + (24 if head[24:28] in (b"PK\3\4", b"PK\1\2") and head[16:20] != b"PK\3\4" else 16)
