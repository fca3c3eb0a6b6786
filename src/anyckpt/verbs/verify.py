"""Check a checkpoint: structure from the headers, and with `deep` every value and checksum in it."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from anyckpt import formats
from anyckpt.core.checkpoint import Checkpoint
from anyckpt.errors import CheckpointError
from anyckpt.finding import Finding, Report, Verdict
from anyckpt.formats import table
from anyckpt.io.place import Place
from anyckpt.verbs.reading import Events
from anyckpt.verbs.resume import Answer, judge, parse
from anyckpt.verbs.telling import most_telling_first


@dataclass(frozen=True, slots=True)
class Verification:
    """The answer. `findings` are the worst and most telling first; `suppressed` counts those left out, by code.

    `format` is empty where nothing could be described. `bytes_read` counts values only.
    """

    path: str
    format: str
    verdict: Verdict
    findings: tuple[Finding, ...]
    suppressed: Mapping[str, int] = field(default_factory=dict)
    deep: bool = False
    resume: Answer | None = None
    n_tensors: int = 0
    bytes_read: int = 0
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """No error finding, and nothing dangerous."""
        return self.verdict != "dangerous" and not any(f.severity == "error" for f in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """The record as `--json` prints it."""
        return {
            "path": self.path,
            "format": self.format,
            "ok": self.ok,
            "verdict": self.verdict,
            "findings": [finding.as_dict() for finding in self.findings],
            "suppressed": dict(self.suppressed),
            "deep": self.deep,
            **({"resume": self.resume.as_dict()} if self.resume else {}),
            "tensors": self.n_tensors,
            "bytes_read": self.bytes_read,
            "seconds": round(self.seconds, 3),
        }


def verify(
    path: str | os.PathLike[str],
    *,
    deep: bool = False,
    strict: bool = False,
    resume: str | None = None,
    jobs: int | None = None,
    events: Events | None = None,
) -> Verification:
    """Check the checkpoint at `path`.

    Without `deep` headers, sizes, indexes and pickles are read; with it checksums and every value too, in memory
    bounded by a few MiB a thread. `resume`: a framework and sizes, "fsdp world=8", that should be able to train on from
    it. `strict` makes warnings errors. `events(bytes done, bytes in all)` is called from
    any thread.

    Faults of the checkpoint are findings, never exceptions. Raises UsageError where there is no such path.
    """
    start = time.monotonic()
    report = Report()
    checkpoint, bytes_read, answer = None, 0, None
    if resume is not None:
        parse(resume)
    try:
        place = Place.at(path)
        checkpoint = formats.read(place, report)
        if deep:
            bytes_read = _deep(place, checkpoint, report, jobs, events)
        if resume is not None:
            answer = judge(replace(checkpoint, findings=tuple(report.findings)), resume)
            report.extend(answer.findings())
    except CheckpointError as error:
        report.extend([error.finding])
        if checkpoint is None:
            report.worsen("unknown")  # what was not looked at is never safe
    findings = most_telling_first(report.findings)
    if strict:
        findings = [replace(f, severity="error") if f.severity == "warning" else f for f in findings]
    return Verification(
        path=os.fspath(path),
        format=checkpoint.format if checkpoint else "",
        verdict=report.verdict,
        findings=tuple(findings),
        suppressed=dict(report.suppressed),
        deep=deep,
        resume=answer,
        n_tensors=len(checkpoint.weights) if checkpoint else 0,
        bytes_read=bytes_read,
        seconds=time.monotonic() - start,
    )


def _deep(place: Place, checkpoint: Checkpoint, report: Report, jobs: int | None, events: Events | None) -> int:
    """Let the format check what only it can (checksums), then read the values."""
    from anyckpt.verbs.values import check_values

    row = table.row_named(checkpoint.format)
    hook = getattr(row.load(), "verify", None) if row is not None else None
    if hook is not None:
        hook(place if place.is_folder else place.open(), checkpoint, report)
    return check_values(checkpoint, report, jobs=jobs, events=events)
