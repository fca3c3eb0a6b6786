"""Opening: from a path to the reader that understands it. The rows are in `table.py`, one module a format."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from anyckpt.core import collector
from anyckpt.core.checkpoint import Checkpoint
from anyckpt.core.source import File
from anyckpt.errors import UsageError
from anyckpt.finding import Report, fail
from anyckpt.formats.table import Format, in_turn

if TYPE_CHECKING:
    from anyckpt.io.place import Place

HEAD = 512  # bytes of a file's head that magic numbers and sniffing see


def of_file(file: File) -> Format | None:
    """The format of a file by its content, None where no row matches. Reads headers only."""
    head = file.read(0, min(HEAD, file.size))
    for row in in_turn():
        if row.kind != "file":
            continue
        wanted = not row.magic or any(head[at : at + len(mark)] == mark for at, mark in row.magic)
        if wanted and row.load().matches(file, head):
            return row
    return None


def of_folder(place: Place) -> Format | None:
    """The format of a folder by the names in it, None where no row matches."""
    for row in in_turn():
        if row.kind != "folder":
            continue
        wanted = any(fnmatchcase(name, glob) for glob in row.members for name in (*place.names, *place.kinds))
        if wanted and row.load().matches(place):
            return row
    return None


def read_file(file: File, report: Report, place: Place | None = None) -> Checkpoint:
    """Read one file, whatever it is: a path's, a shard of a folder, a member of an archive.

    Faults that the reader can step over go to `report`; raises CheckpointError for those it can't, [not-a-checkpoint]
    among them, with the better word where the file is something else that is known (a git-lfs pointer, a web page).
    `place` is where the file lies, where the others of its set may be looked for.
    """
    row = of_file(file)
    if row is None:
        row = _by_name(file)
    elif misnamed(row, file.name):
        report.add(
            "wrong-extension", f"is {row.title} in spite of its name", where=file.name,
            hint="loaders that go by the name will fail; rename it or convert it",
        )
    if place is not None and row.siblings:
        checkpoint: Checkpoint = row.load().read_set(place, report)
        return replace(checkpoint, findings=tuple(report.findings), verdict=report.verdict)
    return _read(row, file, report)


def misnamed(row: Format, name: str) -> bool:
    """Whether a file of this format has an ending that is known as another's."""
    lower = name.lower()
    return not lower.endswith(row.endings or ("\0",)) and any(
        lower.endswith(other.endings) for other in in_turn() if other.endings
    )


def _by_name(file: File) -> Format:
    """The row that can say what is wrong with an unrecognised file; raises [not-a-checkpoint] or a better word."""
    from anyckpt.io.sniff import HEAD_BYTES, complain, sniff

    known = sniff(file.read(0, min(HEAD_BYTES, file.size)), file.size, file.name)
    if known is None or known.code == "zero-head":
        lower = file.name.lower()
        for row in in_turn():
            if row.by_name and row.kind == "file" and lower.endswith(row.endings):
                return row
    raise complain(file)


@collector.paused()
def read(place: Place, report: Report, like: Checkpoint | None = None) -> Checkpoint:
    """Read what the user named, file or folder; as `read_file`.

    `like`: a checkpoint of the same model, for formats that keep no names. Raises UsageError where the format has them.
    """
    if like is not None:
        return _read_like(place, report, like)
    if not place.is_folder:
        checkpoint = read_file(place.open(), report, place)
        if place.exists("config.json"):
            from anyckpt.formats.hf.beside import with_companions

            checkpoint = with_companions(place, checkpoint, report)
        return replace(checkpoint, findings=tuple(report.findings))
    row = of_folder(place)
    if row is None:
        raise fail("not-a-checkpoint", "no checkpoint of any known format is in this folder", where=str(place.path))
    return _read(row, place, report)


def _read_like(place: Place, report: Report, like: Checkpoint) -> Checkpoint:
    """Read with a reference: the row's `read_like(place, report, like)`."""
    row = of_folder(place) if place.is_folder else of_file(place.open())
    hook = getattr(row.load(), "read_like", None) if row is not None else None
    if hook is None:
        what = row.title if row is not None else "this"
        raise UsageError(f"{what} has its own names and shapes", hint="leave the reference (`like`) out")
    checkpoint: Checkpoint = hook(place, report, like)
    return replace(checkpoint, findings=tuple(report.findings), verdict=report.verdict)


def _read(row: Format, source: File | Place, report: Report) -> Checkpoint:
    from anyckpt.formats.deepspeed.placeholders import check as check_placeholders

    checkpoint: Checkpoint = row.load().read(source, report)
    check_placeholders(checkpoint, report)
    return replace(checkpoint, findings=tuple(report.findings), verdict=report.verdict)
