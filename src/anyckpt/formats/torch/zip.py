"""torch.save, torch 1.6 and later: a zip whose `data.pkl` names storages that are members of it.

The layout is in `archive`; versions 1.6 to 2.13 differ in which small records there are and in the order of members.
All members are stored as they are, so tensors are spans of the file itself. Members deflated by other tools are read
through a decoder. A file cut short has lost the directory at its end: data.pkl and the storages behind it, whose sizes
the pickle tells, are found again by walking from the front.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from anyckpt.core.checkpoint import Checkpoint
from anyckpt.core.layout import FileLayout
from anyckpt.core.source import Absent, File, Source, Span
from anyckpt.errors import CheckpointError
from anyckpt.finding import Report, fail
from anyckpt.formats.table import WriteOptions
from anyckpt.formats.torch.archive import (
    STANDARD,
    Records,
    is_big_endian,
    judge_strays,
    members_of,
    open_archive,
    run_member,
    run_pickle,
)
from anyckpt.formats.torch.state import read_state
from anyckpt.io.bounds import byte_count
from anyckpt.io.view import SubFile, sub_file
from anyckpt.io.zip import ZipArchive, crc32_of, walk_local_headers
from anyckpt.pickle.machine import run
from anyckpt.pickle.result import Result
from anyckpt.pickle.storage import Storage, StorageId, storage_id

SINCE = ("1.6", "the zip container")
_FIRST_NAME = re.compile(rb"[^/\0]+/(data\.pkl|data/\d+|version|byteorder|constants\.pkl|code/.*|extra/.*)")
_SAMPLE_BYTES = 4096
_PICKLE_BYTES = 1 << 20
MAX_PICKLE_BYTES = 1 << 30

def matches(file: File, head: bytes) -> bool:
    """A zip with `<top>/data.pkl`; one that is cut short, by the name of its first member."""
    archive = members_of(file)
    if archive is not None:
        return data_pickle(archive) is not None
    n_name = int.from_bytes(head[26:28], "little")
    return bool(_FIRST_NAME.fullmatch(head[30 : 30 + n_name]))


def data_pickle(archive: ZipArchive) -> str | None:
    """The name of the member that holds the object: in the first entry's folder, else in the only one that has it."""
    name = f"{archive.top}/data.pkl"
    if name in archive.members:
        return name
    found = [m for m in archive.members if m.count("/") == 1 and m.endswith("/data.pkl")]
    return found[0] if found else None


def read(file: File, report: Report) -> Checkpoint:
    """Describe the checkpoint. Raises CheckpointError where not even data.pkl can be had."""
    try:
        archive = open_archive(file, report)
    except CheckpointError as error:
        if error.finding.code != "truncated":
            raise
        return _salvage(file, error, report)
    result, records = load(archive, report)
    known = {f"{records.top}/{name}" for name in STANDARD} | records.used
    judge_strays(archive, known, report)
    _check_skipped(archive, records, report)
    facts = {
        "container": "torch zip",
        "since": SINCE,
        "object": result.value,
        "results": (result,),
        "storages": tuple(records.storages.values()),
        "byteorder": "big" if records.swapped else "little",
        "container_bytes": file.size,
    }
    return read_state(result.value, format="torch", path=file.name, report=report, facts=facts)


def load(archive: ZipArchive, report: Report, *, lazy: bool = False) -> tuple[Result, Records]:
    """Run data.pkl of an archive of torch.save; `lazy` as in `Records`. Raises [missing-record] where there is none."""
    name = data_pickle(archive)
    if name is None:
        raise fail("missing-record", "there is no data.pkl in the archive", where=archive.file.name)
    top = name.rpartition("/")[0]
    if top != archive.top:
        report.add("ambiguous", f"its first member is not in the folder of {name}", where=archive.file.name)
    records = Records(archive, top, "data", is_big_endian(archive, report), lazy=lazy)
    return run_member(archive, name, report, records.persistent), records


def write(checkpoint: Checkpoint, options: WriteOptions) -> list[FileLayout]:
    """The file that torch.save would write; see `zipwrite`."""
    from anyckpt.formats.torch import zipwrite

    return zipwrite.write(checkpoint, options)


def verify(file: File, checkpoint: Checkpoint, report: Report) -> None:
    """Check what reading leaves out: every local header, the bytes between members, every checksum."""
    archive = members_of(file)
    if archive is None:
        return  # cut short: the reader has told
    archive = replace(archive, report=report)
    try:
        archive.check_all()
    except CheckpointError as error:
        report.extend([error.finding])
    check_sums(archive, report)


def check_sums(archive: ZipArchive, report: Report) -> None:
    """Compare the bytes of every member with its CRC; 0 means that none was computed, which the reader tells."""
    for member in archive.members.values():
        if not member.crc:
            continue
        try:
            crc = crc32_of(archive.open(member, max_ratio=None))
        except CheckpointError as error:
            report.extend([error.finding])
            continue
        if crc != member.crc:
            report.add(
                "crc-mismatch",
                f"its CRC-32 is {crc:08x}, not {member.crc:08x}: its bytes are not those that were saved",
                where=f"{archive.file.name}!{member.name}",
                hint="torch.load would not notice; take this file from its source again",
            )


def _check_skipped(archive: ZipArchive, records: Records, report: Report) -> None:
    """Storages without a checksum beside members with one: torch.serialization.skip_data left holes for them."""
    names = [name for name in records.used if archive.members[name].size]
    if not names or any(archive.members[name].crc for name in names):
        return
    if not any(member.crc for member in archive.members.values()):
        return
    n_bytes = sum(archive.members[name].size for name in names)
    largest = sorted(names, key=lambda name: -archive.members[name].size)[:8]
    if any(_sample(archive, name).strip(b"\0") for name in largest):
        message = f"its {len(names)} storages have no checksums: they were filled in after saving (skip_data)"
        report.add("no-checksums", message, where=archive.file.name)
    else:
        message = f"was saved with skip_data: the {byte_count(n_bytes)} of its {len(names)} storages were never written"
        report.add("missing-record", message, where=archive.file.name)


def _sample(archive: ZipArchive, name: str) -> bytes:
    record = archive.open(name, max_ratio=None)
    return record.read(0, min(record.size, _SAMPLE_BYTES))


def _salvage(file: File, error: CheckpointError, report: Report) -> Checkpoint:
    """Describe what is whole of a file that lost its end: the pickle, and the storages that lie before the cut.

    Raises `error` where the pickle itself is cut.
    """
    promised: dict[str, Storage] = {}
    pickles: list[bytes] = []

    def promise(pid: Any) -> Storage:
        wanted = storage_id(pid)
        absent = Absent(wanted.n_bytes, "the file is cut short before it")
        return promised.setdefault(wanted.key, _storage(wanted, absent))

    def size_of(name: str, rest: File) -> int | None:
        inner = name.partition("/")[2]
        if inner == "data.pkl" and not pickles:
            pickles.append(_whole_pickle(rest, promise, report))
            return len(pickles[0]) or None
        if inner.startswith("data/"):
            storage = promised.get(inner[5:])
            return storage.n_bytes if storage else None
        return next((n for n, text in _SMALL if rest.size >= n and text.fullmatch(rest.read(0, n))), None)

    walked = walk_local_headers(file, size_of)
    if not pickles:  # a writer that knows the sizes beforehand has them in the local headers
        own = (sub_file(file, at, m.size) for m, at in walked if m.name.endswith("/data.pkl") and not m.method)
        pickles.extend(_whole_pickle(member, promise, report) for member in own)
    if not pickles or not pickles[0]:
        raise error
    base, start = (file.file, file.start) if isinstance(file, SubFile) else (file, 0)
    at = {m.name.partition("/")[2]: start + offset for m, offset in walked if not m.method}
    found: dict[str, Storage] = {}

    def persistent(pid: Any) -> Storage:
        wanted = storage_id(pid)
        old = promised[wanted.key]
        offset = at.get(f"data/{wanted.key}")
        span = old.source if offset is None else Span(base, offset, wanted.n_bytes)
        return found.setdefault(wanted.key, _storage(wanted, span))

    result = run_pickle(pickles[0], f"{file.name}!data.pkl", report, persistent)
    lost = [s for s in found.values() if isinstance(s.source, Absent) and s.n_bytes]
    total = sum(s.n_bytes for s in found.values())
    missing = byte_count(sum(s.n_bytes for s in lost))
    message = f"is cut short: {missing} of {byte_count(total)}, {len(lost)} of {len(found)} storages, are missing"
    if not lost:
        message = "is cut short: the archive's directory is missing, its storages are all there"
    report.extend([replace(error.finding, message=message)])
    facts = {
        "container": "torch zip", "since": SINCE, "object": result.value, "results": (result,),
        "storages": tuple(found.values()), "container_bytes": file.size,
    }
    return read_state(result.value, format="torch", path=file.name, report=report, facts=facts)


_SMALL = ((1, re.compile(rb"1")), (6, re.compile(rb"little")), (3, re.compile(rb"big")), (2, re.compile(rb"3\n|\d\d")),
          (4, re.compile(rb"\d{4}")), (3, re.compile(rb"\d{3}")), (40, re.compile(rb"\d{40}")))


def _whole_pickle(rest: File, persistent: Callable[[Any], Any], report: Report) -> bytes:
    """The pickle that begins a file of unknown end, b"" where it is cut; what it would do is judged either way."""
    n_bytes = min(_PICKLE_BYTES, rest.size)
    while True:
        data = rest.read(0, n_bytes)
        result = run(data, persistent=persistent, where=rest.name)
        if result.complete:
            return data[: result.end]
        if n_bytes == rest.size or n_bytes > MAX_PICKLE_BYTES or result.findings[-1].code != "truncated":
            report.worsen(result.verdict)
            report.extend(f for f in result.findings if f.code in ("dangerous-code", "unknown-code"))
            return b""
        n_bytes = min(8 * n_bytes, rest.size)


def _storage(wanted: StorageId, source: Source) -> Storage:
    return Storage(source, wanted.dtype, wanted.key, wanted.location, wanted.n_bytes, wanted.n_elements)
