"""The newest checkpoint below a run's folder, by the step in its name, or the newest one that is whole.

Every child that some family recognises is a candidate, whatever its layout (checkpoint-500, step_100, global_step80,
iter_0000100, epoch=3-step=400.ckpt, last.ckpt); trackers that frameworks write only break ties and are told where they
name something else.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from anyckpt import formats
from anyckpt.errors import CheckpointError, UsageError
from anyckpt.finding import Finding, Report
from anyckpt.formats.folder import lacking
from anyckpt.io.paths import printable
from anyckpt.io.place import Place

TRACKERS: Mapping[str, str] = MappingProxyType(
    {
        "latest": "{}",  # DeepSpeed: the folder's name
        "latest_checkpointed_iteration.txt": "iter_{:0>7}",  # Megatron: the iteration
    }
)
"""Files that name the newest checkpoint, and what the name is made of."""

_STEP = re.compile(r"(?:step|iter(?:ation)?|checkpoint|ckpt)[=_\-]?s?(\d{1,15})", re.IGNORECASE)
_NUMBER = re.compile(r"(\d{1,15})(?!.*\d)")
_SKIPPED = re.compile(r"\.|.*\.(tmp|temp|partial|incomplete)([._\-]\w*)?$|tmp-")
MAX_TRACKER_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Candidate:
    """One checkpoint of a run; `step` is that of its name, else of what it holds, else None."""

    name: str
    format: str
    step: int | None
    mtime: float


@dataclass(frozen=True, slots=True)
class Latest:
    """The answer. `path` is empty where there is none; `passed_over` are newer ones that are not whole, with why."""

    folder: str
    path: str
    format: str
    step: int | None
    is_whole: bool | None
    passed_over: tuple[tuple[str, str], ...] = ()
    findings: tuple[Finding, ...] = ()
    n_candidates: int = 0

    def as_dict(self) -> dict[str, Any]:
        """The record as `--json` prints it."""
        return {
            "folder": self.folder, "path": self.path, "format": self.format, "step": self.step, "whole": self.is_whole,
            "passed_over": [{"path": path, "why": why} for path, why in self.passed_over],
            "findings": [f.as_dict() for f in self.findings], "candidates": self.n_candidates,
        }  # fmt: skip


def latest(folder: str | os.PathLike[str], *, complete: bool = False) -> Latest:
    """Find the newest checkpoint below `folder`; with `complete` the newest that is whole by its headers.

    Raises UsageError where `folder` is no folder.
    """
    place = Place.at(folder)
    if not place.is_folder:
        raise UsageError(f"{printable(os.fspath(folder))} is a file", hint="name the folder of the run")
    found = _candidates(place)
    newest_first = sorted(found, key=lambda c: (c.step if c.step is not None else -1, c.mtime, c.name), reverse=True)
    findings = _trackers(place, newest_first)
    passed_over: list[tuple[str, str]] = []
    for candidate in newest_first:
        path = os.path.join(os.fspath(folder), candidate.name)
        why = _fault(place, candidate, [c.name for c in found if c.format == candidate.format]) if complete else ""
        if not why:
            return Latest(
                os.fspath(folder), path, candidate.format, candidate.step, True if complete else None,
                tuple(passed_over), findings, len(found),
            )  # fmt: skip
        passed_over.append((path, why))
    return Latest(os.fspath(folder), "", "", None, None, tuple(passed_over), findings, len(found))


def _candidates(place: Place) -> list[Candidate]:
    found = []
    names = [n for n in (*place.names, *(k for k, kind in place.kinds.items() if kind == "folder")) if "/" not in n]
    for name in names:
        if _SKIPPED.match(name):
            continue
        try:
            one = _recognised(place, name)
        except CheckpointError:
            continue
        if one is not None:
            found.append(one)
    return found


def _recognised(place: Place, name: str) -> Candidate | None:
    is_folder = place.kinds.get(name) == "folder"
    if is_folder:
        row = formats.of_folder(place.subplace(name))
        if row is None or row.name == "folder":
            return None
        kind = row.name
    else:
        file = place.open(name)
        row = formats.of_file(file) if file.size else None
        if row is None and not name.endswith((".ckpt", ".pt", ".pth", ".safetensors")):
            return None
        kind = row.name if row is not None else "?"
    match = _STEP.search(name) or _NUMBER.search(name)
    step = int(match[1]) if match else _step_inside(place, name, is_folder)
    return Candidate(name, kind, step, os.stat(place.path / name).st_mtime)


def _step_inside(place: Place, name: str, is_folder: bool) -> int | None:
    try:
        return formats.read(_inner(place, name, is_folder), Report()).step
    except (CheckpointError, UsageError):
        return None


def _inner(place: Place, name: str, is_folder: bool) -> Place:
    return place.subplace(name) if is_folder else Place.at(place.path / name)


def _fault(place: Place, candidate: Candidate, siblings: list[str]) -> str:
    """Why a candidate is not whole, "" where it is, by its headers and by what its siblings have."""
    is_folder = place.kinds.get(candidate.name) == "folder"
    report = Report()
    try:
        formats.read(_inner(place, candidate.name, is_folder), report)
    except (CheckpointError, UsageError) as error:
        return str(error)
    if report.errors:
        finding = report.ordered()[0]
        return finding.message
    if unfinished := [f for f in report.findings if f.code in ("incomplete", "missing-shard")]:
        return unfinished[0].message
    if is_folder and len(siblings) > 1 and (less := lacking(place, candidate.name, siblings)):
        return f"its siblings have {', '.join(map(printable, less[:4]))} besides"
    return ""


def _trackers(place: Place, newest_first: list[Candidate]) -> tuple[Finding, ...]:
    """What the framework's own tracker names, where that is not the newest."""
    found = []
    for tracker, form in TRACKERS.items():
        if tracker not in place.names or place.size(tracker) > MAX_TRACKER_BYTES:
            continue
        file = place.open(tracker)
        text = file.read(0, file.size).decode("utf-8", "replace").strip()
        named = form.format(text) if text.isdigit() or form == "{}" else text
        if newest_first and named != newest_first[0].name:
            message = f"names {printable(named)!r}, not {printable(newest_first[0].name)!r}, which is newer"
            if named not in {c.name for c in newest_first}:
                message = f"names {printable(named)!r}, which is not there"
            found.append(Finding("bad-tracker", "warning", message, tracker, "write the right name into it"))
    return tuple(found)
