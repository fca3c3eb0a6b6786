"""A folder that is no family's own: one checkpoint file in it, or several, or a run's folders of checkpoints.

Of several files or folders one is read, by a rule that the finding tells: the latest step that is whole. Where no rule
decides, none is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from anyckpt.core.checkpoint import Checkpoint
from anyckpt.errors import CheckpointError
from anyckpt.finding import Report, fail
from anyckpt.formats import manifests, of_file, of_folder, read_file
from anyckpt.formats.hf.beside import look_beside, with_companions
from anyckpt.formats.hf.sets import NOT_WEIGHTS
from anyckpt.formats.table import Format
from anyckpt.io.paths import printable
from anyckpt.io.place import Place

OPENED = (".safetensors", ".bin", ".pt", ".pth", ".pkl", ".ckpt")
MAX_LOOKED_AT = 1000  # files of a folder that are asked what they are
_NUMBER = re.compile(r"(\d+)(?!.*\d)")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A file or folder that could be the checkpoint, and its row of the table."""

    name: str
    row: Format

    @property
    def number(self) -> int:
        """The last number in its name, usually the step; -1 where there is none."""
        match = _NUMBER.search(self.name)
        return int(match[1]) if match and len(match[1]) < 16 else -1


def matches(place: Place) -> bool:
    """Whether there is anything in the folder at all: what it is, `read` says."""
    return bool(place.names or place.kinds)


def read(place: Place, report: Report) -> Checkpoint:
    """Read the one checkpoint of the folder, or the latest whole one. Raises [not-a-checkpoint] where there is none."""
    report.extend(place.unreadable(OPENED))
    manifests.check_names(place, report)
    files = _files(place)
    if files:
        return _read_file(place, files, report)
    folders = _folders(place)
    if folders:
        return _read_folder(place, folders, report)
    if report.errors:
        raise CheckpointError(report.errors[0])
    raise fail(
        "not-a-checkpoint", "nothing in this folder is a checkpoint", where=printable(str(place.path)),
        hint="name the folder or file that holds the weights",
    )


def _files(place: Place) -> list[Candidate]:
    """The folder's own files that are checkpoints, those first that are not called after an optimizer or the like."""
    found: list[Candidate] = []
    for name in [n for n in place.names if "/" not in n][:MAX_LOOKED_AT]:
        file = place.open(name)
        row = of_file(file) if file.size else None
        if row is not None:
            found.append(Candidate(name, row))
    main = [c for c in found if not NOT_WEIGHTS.fullmatch(c.name.rpartition(".")[0])]
    return main or found


def _read_file(place: Place, files: list[Candidate], report: Report) -> Checkpoint:
    """Read the only file, or of several the one of the latest step, by name or by what is in them."""
    chosen = files[0]
    if len(files) > 1:
        chosen = max(files, key=lambda c: (c.number, place.size(c.name), c.name))
        why = "the latest by the number in its name" if chosen.number >= 0 else "the largest"
        report.add(
            "ambiguous", f"{len(files)} checkpoints are in this folder; {printable(chosen.name)} is read, {why}",
            where=printable(str(place.path)), hint="name the file that is meant",
        )
    checkpoint = with_companions(place, read_file(place.open(chosen.name), report), report)
    look_beside(place, {chosen.name}, report)
    facts = {**checkpoint.facts, "file": chosen.name, "inner": checkpoint.format}
    return replace(checkpoint, format="folder", path=str(place.path), facts=facts)


def _folders(place: Place) -> list[Candidate]:
    """The folders directly inside that a family knows."""
    found: list[Candidate] = []
    for name, kind in place.kinds.items():
        if kind != "folder" or "/" in name or name.startswith("."):
            continue
        row = of_folder(place.subplace(name))
        if row is not None and row.name != "folder":
            found.append(Candidate(name, row))
    return sorted(found, key=lambda c: (-c.number, c.name))


def _read_folder(place: Place, folders: list[Candidate], report: Report) -> Checkpoint:
    """Read the only folder, or the latest that is as whole as its siblings."""
    names = ", ".join(printable(c.name) for c in folders[:6])
    if len(folders) > 1 and any(c.number < 0 for c in folders):
        raise fail(
            "not-a-checkpoint", f"this folder holds several checkpoints: {names}", where=printable(str(place.path)),
            hint=f"name one: {place.path / folders[0].name}",
        )
    chosen = folders[0]
    for candidate in folders:
        less = lacking(place, candidate.name, [c.name for c in folders])
        if not less:
            chosen = candidate
            break
        report.add(
            "incomplete", f"was not finished: its siblings have {', '.join(less[:4])} besides",
            where=printable(candidate.name), severity="warning", hint="use the one before it",
        )
    if len(folders) > 1:
        report.add(
            "ambiguous",
            f"{len(folders)} checkpoints are in this folder; {printable(chosen.name)} is read, the latest whole one",
            where=printable(str(place.path)), severity="note", hint="name the folder that is meant",
        )
    inner = place.subplace(chosen.name)
    checkpoint: Checkpoint = chosen.row.load().read(inner, report)
    facts = {**checkpoint.facts, "folder": chosen.name, "inner": checkpoint.format}
    return replace(checkpoint, format="folder", facts=facts)


def lacking(place: Place, name: str, siblings: Iterable[str]) -> list[str]:
    """Files that every sibling has and this folder has not; numbers of ranks and shards do not count."""
    own = _plain_names(place, name)
    others = [_plain_names(place, sibling) for sibling in siblings if sibling != name]
    common: set[str] = set.intersection(*others) if others else set()
    return sorted(common - own)


def _plain_names(place: Place, folder: str) -> set[str]:
    below = folder + "/"
    return {re.sub(r"\d+", "N", n[len(below) :]) for n in place.names if n.startswith(below)}


def verify(place: Place, checkpoint: Checkpoint, report: Report) -> None:
    """What the inner format checks, and the digests that the folder carries."""
    facts: dict[str, Any] = dict(checkpoint.facts)
    inner = replace(checkpoint, format=str(facts["inner"]))
    source: Any = place.subplace(facts["folder"]) if "folder" in facts else place.open(facts["file"])
    row = of_folder(source) if isinstance(source, Place) else of_file(source)
    hook = getattr(row.load(), "verify", None) if row is not None else None
    if hook is not None:
        hook(source, inner, report)
    manifests.verify(place, report)
