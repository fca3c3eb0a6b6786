"""Tar archives, read header by header: .nemo, torch files of 2016. Nothing is extracted.

    name 100 · mode 8 · uid 8 · gid 8 · size 12 · mtime 12 · checksum 8 · type 1 · link 100 · magic 6 "ustar" ·
    version 2 · user 32 · group 32 · major 8 · minor 8 · prefix 155 · padding 12; then `size` bytes, filled up to a
    multiple of 512. Two blocks of zeros end the archive.

Numbers are octal text, or big-endian with the top bit set (GNU). Longer names stand in a member before: type L (name)
and K (link) of GNU, x (for the next member) and g (for all) of POSIX.1-2001, with records "LENGTH KEY=VALUE\\n". Such
names and sizes are put in place first and checked after.
"""

from __future__ import annotations

import posixpath
from dataclasses import dataclass, field, replace

from anyckpt.core.source import File
from anyckpt.errors import CheckpointError
from anyckpt.finding import Report, fail
from anyckpt.io.bounds import cut_short
from anyckpt.io.paths import name_fault, printable
from anyckpt.io.view import SubFile, sub_file

BLOCK = 512
MAX_MEMBERS = 1_000_000
MAX_EXTRA_BYTES = 1 << 20  # of a long name or of one member's extended records
_FILE_TYPES = b"0\0" + b"7"
_SPECIAL = {b"3": "a character device", b"4": "a block device", b"6": "a pipe"}
_ZEROS = bytes(BLOCK)


@dataclass(frozen=True, slots=True)
class TarMember:
    """A member; `link` is the target, within the archive, of a link, and then there are no bytes of its own."""

    name: str
    offset: int
    size: int
    link: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class TarArchive:
    """The members by name, without folders and without "./" before names. `shadowed`: earlier ones of the same name."""

    file: File
    members: dict[str, TarMember] = field(repr=False)
    shadowed: tuple[TarMember, ...]

    def open(self, member: str | TarMember) -> SubFile:
        """A member's bytes, through a link if it is one."""
        if isinstance(member, str):
            found = self.members.get(member)
            if found is None:
                raise fail("missing-record", f"there is no member {printable(member)!r}", where=self.file.name)
            member = found
        where = f"{self.file.name}!{printable(member.name)}"
        seen: set[str] = set()
        while member.link:
            if member.name in seen:
                raise fail("special-file", "is a link that leads to itself", where=where)
            seen.add(member.name)
            if member.link not in self.members:
                raise fail("broken-link", f"is a link to {printable(member.link)!r}, which is missing", where=where)
            member = self.members[member.link]
        return sub_file(self.file, member.offset, member.size, where)


@dataclass(frozen=True, slots=True)
class _Header:
    """One header as it is written, the numbers decoded."""

    name: str
    size: int
    kind: bytes
    link: str


def read_tar(file: File, report: Report) -> TarArchive:
    """Walk the headers of `file`. What cannot be walked any further ends the list with a finding.

    Raises [not-a-checkpoint] if the very first block is no header, and its own fault if that is a broken one.
    """
    members: dict[str, TarMember] = {}
    shadowed: list[TarMember] = []
    offset, n_seen = 0, 0
    for_all: dict[str, str] = {}
    for_next: dict[str, str] = {}
    while True:
        try:
            header = _header_at(file, offset)
            if header is None:
                break
            n_seen += 1
            if n_seen > MAX_MEMBERS:
                raise fail("limit-exceeded", f"holds more than {MAX_MEMBERS:,} members", where=file.name)
            data_offset = offset + BLOCK
            if header.kind in (b"L", b"K", b"x", b"g"):
                text = _extra_bytes(file, data_offset, header)
                if header.kind in (b"L", b"K"):
                    key = "path" if header.kind == b"L" else "linkpath"
                    for_next[key] = _text(text.rstrip(b"\0"))
                else:
                    (for_next if header.kind == b"x" else for_all).update(_records(text, file.name))
                offset = data_offset + _padded(header.size)
                continue
            header = _with_extras(header, {**for_all, **for_next}, file.name)
            for_next = {}
            where = f"{file.name}!{printable(header.name)}"
            if data_offset + header.size > file.size:
                raise cut_short(where, file.size, data_offset, data_offset + header.size)
        except CheckpointError as error:
            if n_seen == 0:
                raise
            report.extend([error.finding])
            break
        _admit(header, data_offset, where, members, shadowed, report)
        offset = data_offset + (_padded(header.size) if header.kind not in (b"1", b"2", b"5") else 0)
        if offset >= file.size:
            report.add("truncated", "lacks the two blocks of zeros that end a tar archive", where=file.name)
            break
    _check_links(members, file.name, report)
    return TarArchive(file, members, tuple(shadowed))


def _header_at(file: File, offset: int) -> _Header | None:
    """The header at `offset`, None at the archive's end."""
    if offset + BLOCK > file.size:
        if offset == 0:
            raise fail("not-a-checkpoint", "is too short for a tar archive", where=file.name)
        raise cut_short(file.name, file.size, offset, offset + BLOCK)
    raw = file.read(offset, BLOCK)
    if raw == _ZEROS and offset:
        return None
    blank = raw[:148] + b" " * 8 + raw[156:]
    # Historic writers summed signed bytes.
    sums = (sum(blank), sum(blank) - 256 * sum(byte > 127 for byte in blank))
    try:
        right = _number(raw[148:156]) in sums
    except ValueError:
        right = False
    if not right:
        code = "bad-header" if offset else "not-a-checkpoint"
        raise fail(code, f"there is no tar header at byte {offset:,}", where=file.name)
    name = _text(raw[:100].split(b"\0", 1)[0])
    if raw[257:263] == b"ustar\0" and raw[345] and raw[156:157] not in (b"L", b"K"):
        name = f"{_text(raw[345:500].split(bytes(1), 1)[0])}/{name}"
    where = f"{file.name}!{printable(name)}"
    try:
        size = _number(raw[124:136])
    except ValueError as error:
        raise fail("bad-header", "its size is no number", where=where) from error
    if size < 0:
        raise fail("negative-size", f"has a size of {size:,} bytes", where=where)
    return _Header(name, size, raw[156:157], _text(raw[157:257].split(b"\0", 1)[0]))


def _number(raw: bytes) -> int:
    """A number field: octal digits between spaces and NULs, or a signed big-endian integer behind 0x80 or 0xff."""
    if raw[0] in (0x80, 0xFF):
        value = int.from_bytes(raw[1:], "big")
        return value - (1 << 8 * (len(raw) - 1)) if raw[0] == 0xFF else value
    text = raw.split(b"\0", 1)[0].strip()
    if text.lstrip(b"-").strip(b"01234567"):
        raise ValueError(text)
    return int(text or b"0", 8)


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")


def _padded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def _extra_bytes(file: File, offset: int, header: _Header) -> bytes:
    if header.size > MAX_EXTRA_BYTES:
        raise fail("limit-exceeded", f"has an extended header of {header.size:,} bytes", where=file.name)
    return file.read(offset, header.size)


def _records(raw: bytes, where: str) -> dict[str, str]:
    """The records "LENGTH KEY=VALUE\\n" of an extended header; LENGTH counts all of its record."""
    found: dict[str, str] = {}
    position = 0
    while position < len(raw) and raw[position : position + 1] != b"\0":
        space = raw.find(b" ", position, position + 20)
        digits = raw[position:space]
        end = position + int(digits) if space > position and digits.isdigit() else 0
        key, equals, value = raw[space + 1 : end - 1].partition(b"=")
        if not position < end <= len(raw) or raw[end - 1 : end] != b"\n" or not equals:
            raise fail("bad-header", "has a malformed extended header", where=where)
        found[_text(key)] = _text(value)
        position = end
    return found


def _with_extras(header: _Header, extras: dict[str, str], where: str) -> _Header:
    """The header with the values of extended headers in place of its own."""
    if any(key.startswith("GNU.sparse") for key in extras) or header.kind == b"S":
        raise fail("unsupported", "is stored as a sparse file", where=f"{where}!{printable(header.name)}")
    size = header.size
    if (digits := extras.get("size")) is not None:
        if not (digits.isascii() and digits.removeprefix("-").isdigit() and len(digits) < 20):
            raise fail("bad-header", "its size is no number", where=f"{where}!{printable(header.name)}")
        size = int(digits)
        if size < 0:
            raise fail("negative-size", f"has a size of {size:,} bytes", where=f"{where}!{printable(header.name)}")
    return replace(header, name=extras.get("path", header.name), link=extras.get("linkpath", header.link), size=size)


def _admit(
    header: _Header,
    offset: int,
    where: str,
    members: dict[str, TarMember],
    shadowed: list[TarMember],
    report: Report,
) -> None:
    """Check one member and add it. Those with bad names are kept, so that what they hold is judged."""
    name = header.name
    while name.startswith("./"):
        name = name[2:].lstrip("/") or "."
    if reason := name_fault(name):
        report.add("path-escape", f"its name {reason}", where=where)
    if header.kind == b"5" or (name.endswith("/") and header.kind in (b"0", b"\0")) or name == ".":
        return
    link = ""
    if header.kind in (b"1", b"2"):
        target = header.link if header.kind == b"1" else posixpath.join(posixpath.dirname(name), header.link)
        link = posixpath.normpath(target)
        if not header.link or name_fault(link):
            report.add("path-escape", f"is a link to {printable(header.link)!r}, outside of the archive", where=where)
            return
    elif header.kind not in (b"0", b"\0", b"7"):
        what = _SPECIAL.get(header.kind, f"of type {printable(_text(header.kind))!r}")
        report.add("special-file", f"is {what}, not a file", where=where)
        return
    if name in members:
        report.add("duplicate-member", "its name occurs twice (loaders differ in which they take)", where=where)
        shadowed.append(members[name])
    members[name] = TarMember(name, offset, 0 if link else header.size, link)


def _check_links(members: dict[str, TarMember], where: str, report: Report) -> None:
    """Report links to nothing, and members that an extracting reader would write through a link."""
    links = {member.name for member in members.values() if member.link}
    folders = {name.rsplit("/", 1)[0] for name in members if "/" in name} if links else set()
    for name in links:
        if members[name].link not in members and members[name].link not in folders:
            target = printable(members[name].link)
            report.add("broken-link", f"is a link to {target!r}, which is missing", where=f"{where}!{printable(name)}")
    for name in members if links else ():
        parts = name.split("/")
        if any("/".join(parts[:n]) in links for n in range(1, len(parts))):
            report.add("path-escape", "lies below a link", where=f"{where}!{printable(name)}")
