"""The zip that torch.save, torch.jit.save and torch.export.save write, and the storages in it.

    <top>/data.pkl                       the object; its persistent ids name storages
    <top>/data/<key>                     one record a storage: n_elements × itemsize raw bytes
    <top>/byteorder                      "little" or "big" (torch >= 2.1; little where absent)
    <top>/version, .format_version, .storage_alignment, .data/serialization_id

Facts from torch 2.13 `torch/serialization.py` and `caffe2/serialize/inline_container.cc`. `<top>` is the first entry's
folder, not the file's name, which users change.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from anyckpt.core.source import Absent, File, Span
from anyckpt.errors import CheckpointError
from anyckpt.finding import Report, fail, located
from anyckpt.io.bounds import check_range
from anyckpt.io.paths import printable
from anyckpt.io.view import SubFile
from anyckpt.io.zip import ZipArchive, read_zip
from anyckpt.io.zip_directory import Member
from anyckpt.pickle.machine import run
from anyckpt.pickle.result import Result
from anyckpt.pickle.storage import Storage, storage_id
from anyckpt.pickle.streams import run_all

STANDARD = frozenset(
    ("data.pkl", "byteorder", "version", ".format_version", ".storage_alignment", ".data/serialization_id",
     ".data/version")
)
MAX_STRAY_BYTES = 64 << 20  # a member that should not be there is judged as a pickle up to this size
_PICKLE_ENDINGS = (".pkl", ".pickle", ".p", ".pt", ".pth", ".bin", ".ckpt", ".joblib", ".dill", ".dat")
_FIRST_OPCODES = b"(]}ci)lNdIFSVXKJM"
_ARCHIVES = (b"PK\3\4", b"\x1f\x8b", b"7z\xbc\xaf", b"Rar!", b"BZh", b"\xfd7zXZ")


@lru_cache(maxsize=1)
def _directory(file: File) -> tuple[ZipArchive, Report]:
    """The central directory of the latest archive: several formats are asked in turn whether a zip is theirs."""
    report = Report()
    return read_zip(file, report), report


def open_archive(file: File, report: Report) -> ZipArchive:
    """Read a zip's directory; faults go to `report`. Raises as `io.zip.read_zip`."""
    archive, found = _directory(file)  # type: ignore[arg-type]  # every File is hashable
    report.extend(found.findings)
    report.worsen(found.verdict)
    return replace(archive, report=report)


def members_of(file: File) -> ZipArchive | None:
    """The archive for a look at its names, None where its directory can't be read."""
    try:
        return _directory(file)[0]  # type: ignore[arg-type]
    except CheckpointError:
        return None


@dataclass(slots=True, eq=False)
class Records:
    """The storages of one archive, found by the persistent ids of its pickles.

    They are the members `<top>/<folder>/<key>`. `used` are the names of those that pickles named. `may_be_empty`: only
    types and shapes are kept where a record is empty (TorchScript's traced inputs). `lazy`: local headers are looked at
    when a record is read, for checkpoints of very many files.
    """

    archive: ZipArchive
    top: str
    folder: str
    swapped: bool = False
    storages: dict[str, Storage] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    may_be_empty: bool = False
    lazy: bool = False

    def persistent(self, pid: Any) -> Storage:
        """The storage of a persistent id; its record must be there and of the right size.

        Raises CheckpointError [missing-record, size-mismatch, inconsistent] and what `storage_id` raises.
        """
        wanted = storage_id(pid)
        known = self.storages.get(wanted.key)
        if known is not None:
            if (known.dtype, known.n_bytes) != (wanted.dtype, wanted.n_bytes):
                raise fail("inconsistent", f"storage {printable(wanted.key)!r} is named with two types or lengths")
            return known
        name = f"{self.top}/{self.folder}/{wanted.key}"
        member = self.archive.members.get(name)
        if member is None:
            raise fail("missing-record", f"there is no record for storage {printable(wanted.key)!r}")
        absent = self.may_be_empty and not member.size
        if member.size != wanted.n_bytes and not absent:
            raise fail(
                "size-mismatch",
                f"storage {printable(wanted.key)!r} should have {wanted.n_bytes:,} bytes "
                f"({wanted.n_elements:,} elements), its record has {member.size:,}",
            )
        self.used.add(name)
        span: Absent | Span
        if absent:
            span = Absent(wanted.n_bytes, "only its shape was saved")
        elif self.lazy and not member.method and member.size == member.stored_size:
            span = Span(LazyRecord(self.archive, member), 0, member.size)
        else:
            span = record_span(self.archive, member)
        storage = Storage(
            span, wanted.dtype, wanted.key, wanted.location, wanted.n_bytes, wanted.n_elements, self.swapped
        )
        self.storages[wanted.key] = storage
        return storage


@dataclass(slots=True, eq=False)
class LazyRecord:
    """A member that is stored as it is, as a file whose local header is looked at on first use."""

    archive: ZipArchive
    member: Member
    _span: Span | None = None

    @property
    def name(self) -> str:
        """The archive and the member."""
        return f"{self.archive.file.name}!{printable(self.member.name)}"

    @property
    def size(self) -> int:
        """Its bytes."""
        return self.member.size

    def span(self) -> Span:
        """Where it lies in the archive's own file."""
        if self._span is None:
            self._span = record_span(self.archive, self.member)
        return self._span

    def read(self, offset: int, length: int) -> bytes:
        """Bytes of it."""
        check_range(self.name, self.size, offset, length)
        span = self.span()
        return span.file.read(span.offset + offset, length)

    def readinto(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from an offset."""
        check_range(self.name, self.size, offset, buffer.nbytes)
        span = self.span()
        span.file.readinto(span.offset + offset, buffer)

    def on_disk(self) -> tuple[File, int] | None:
        """The local file and the place in it."""
        span = self.span()
        place = span.file.on_disk()
        return place and (place[0], place[1] + span.offset)

    def fileno(self) -> None:
        return None


def record_span(archive: ZipArchive, member: str | Member) -> Span:
    """The bytes of a member as tensors point at them: of the file itself where they are stored as they are."""
    record = archive.open(member, max_ratio=None)
    if isinstance(record, SubFile):
        return Span(record.file, record.start, record.size)
    return Span(record, 0, record.size)


def is_big_endian(archive: ZipArchive, report: Report) -> bool:
    """What the `byteorder` record says; no record means little (torch before 2.1 wrote none)."""
    name = f"{archive.top}/byteorder"
    if name not in archive.members:
        return False
    member = archive.members[name]
    text = archive.open(name).read(0, min(member.size, 16))
    if text not in (b"little", b"big"):
        shown = printable(text.decode("latin-1"))
        report.add("unknown-byteorder", f"its byteorder record says {shown!r}; read as little", where=archive.file.name)
    return text == b"big"


def run_member(archive: ZipArchive, name: str, report: Report, persistent: Callable[[Any], Any] | None) -> Result:
    """Read the pickle in a member, inertly; its findings and verdict go to `report`, those of what follows it too."""
    member = archive.open(name)
    return run_pickle(member.read(0, member.size), member.name, report, persistent)


def run_pickle(data: bytes, where: str, report: Report, persistent: Callable[[Any], Any] | None = None) -> Result:
    """Read a pickle that should fill `data`; what stands behind it is judged as well, and told as trailing data."""
    streams = run_all(data, persistent=persistent, where=where)
    report.extend(streams.findings)
    report.worsen(streams.verdict)
    first = streams.results[0]
    if len(streams.results) > 1:
        report.add("trailing-data", f"{len(data) - first.end:,} bytes follow the pickle: another one", where=where)
    return first


def looks_like_pickle(data: bytes) -> bool:
    """Whether bytes begin as pickles from protocol 2 on do, or begin with an opcode and end with STOP as all do."""
    if len(data) < 2:
        return False
    return (data[0] == 0x80 and data[1] <= 5) or (data[:1] in _FIRST_OPCODES and data.rstrip(b"\0\r\n")[-1:] == b".")


def judge_strays(archive: ZipArchive, known: set[str], report: Report) -> None:
    """Report members that the format does not know, and judge those that are pickles: a loader may find them."""
    strays = [m for m in archive.members.values() if m.name not in known]
    for member in (*archive.shadowed, *strays):
        where = f"{archive.file.name}!{printable(member.name)}"
        ending = member.name.lower().endswith(_PICKLE_ENDINGS)
        try:
            file = archive.open(member)
            head = file.read(0, min(16, file.size))
            too_large = file.size > MAX_STRAY_BYTES
            data = head if too_large else file.read(0, file.size)
        except CheckpointError as error:
            report.extend([located(error, where).finding])
            report.worsen("unknown")
            continue
        if head.startswith(_ARCHIVES) or (too_large and (ending or looks_like_pickle(head))):
            report.worsen("unknown")
            report.add("unexpected-member", "was not looked into: it is an archive, or too large", where=where)
        elif ending or looks_like_pickle(data):
            result = run(data, persistent=lambda pid: None, where=where)
            if not result.imports and not result.complete:
                report.add("unexpected-member", "is not a part of this format, and no pickle", where=where)
                continue
            report.worsen(result.verdict)
            report.add("unexpected-member", f"is a pickle beside data.pkl ({result.verdict})", where=where)
            report.extend(f for f in result.findings if f.code in ("dangerous-code", "unknown-code"))
        elif member.size and not member.name.startswith(f"{archive.top}/data/"):
            report.add("unexpected-member", "is not a part of this format", where=where)
