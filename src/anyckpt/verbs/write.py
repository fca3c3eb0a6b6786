"""Write a checkpoint in a format: layouts, plan, run, and the proof that what was written is what was meant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anyckpt import formats
from anyckpt.core import collector
from anyckpt.core.checkpoint import Checkpoint
from anyckpt.core.layout import FileLayout
from anyckpt.errors import AnyckptError, UsageError
from anyckpt.finding import Finding, Report
from anyckpt.formats.table import Format, WriteOptions
from anyckpt.io.place import Place
from anyckpt.plan.plan import Plan, make_plan
from anyckpt.plan.run import Job, Run, run


@dataclass(frozen=True, slots=True)
class Written:
    """What a write did, or would do where `dry_run`: `files` are (name, size in bytes); sizes and times are exact."""

    destination: str
    format: str
    files: tuple[tuple[str, int], ...]
    n_tensors: int
    bytes_in: int
    bytes_out: int
    peak_bytes: int
    seconds: float = 0.0
    resumed_bytes: int = 0
    proved: bool = False
    dry_run: bool = False
    findings: tuple[Finding, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "destination": self.destination, "format": self.format,
            "files": [{"name": name, "bytes": size} for name, size in self.files],
            "tensors": self.n_tensors, "bytes_in": self.bytes_in, "bytes_out": self.bytes_out,
            "peak_bytes": self.peak_bytes, "seconds": round(self.seconds, 3), "resumed_bytes": self.resumed_bytes,
            "proved": self.proved, "dry_run": self.dry_run, "findings": [f.as_dict() for f in self.findings],
            **self.extra,
        }


def write_checkpoint(
    checkpoint: Checkpoint, destination: Path, row: Format, options: WriteOptions, job: Job | None = None
) -> Written:
    """Write `checkpoint` to `destination` as the format of `row`.

    The result appears whole or not at all, and is read back before it appears. Raises UsageError where there is nothing
    to write, Refused where the destination exists, OutOfSpace before anything is written.
    """
    job = job or Job()
    if not checkpoint.weights:
        raise UsageError("there are no tensors to write", hint="look at the source with: anyckpt inspect --all")
    module = row.load()
    fit = getattr(module, "fit", None)  # what the format makes of it, and what it will read as again
    with collector.paused():
        checkpoint = checkpoint if fit is None else fit(checkpoint, options)
        layouts: list[FileLayout] = module.write(checkpoint, options)
        plan = make_plan(layouts, max_memory=job.max_memory, jobs=job.n_jobs)
    is_folder = row.writes == "folder"
    done = Run(seconds=0.0, resumed_bytes=0)
    if not job.dry_run:
        done = run(plan, destination, is_folder=is_folder, job=job, check=lambda p: _read_back(p, checkpoint, layouts))
    return _written(checkpoint, destination, row, plan, done, job)


def _written(
    checkpoint: Checkpoint, destination: Path, row: Format, plan: Plan, done: Run, job: Job
) -> Written:
    return Written(
        destination=str(destination), format=row.name,
        files=tuple((f.name or destination.name, f.size) for f in plan.files),
        n_tensors=len(checkpoint.weights), bytes_in=plan.bytes_in, bytes_out=plan.bytes_out,
        peak_bytes=plan.peak_bytes, seconds=done.seconds, resumed_bytes=done.resumed_bytes,
        proved=job.prove and not job.dry_run, dry_run=job.dry_run,
    )


class ReadBackError(AnyckptError, RuntimeError):
    """What was written, opened again, is not what was meant: a fault of this program or of the disk."""


def _read_back(path: Path, meant: Checkpoint, layouts: Sequence[FileLayout]) -> None:
    """Open the result by its content alone and hold its description against what was meant."""
    report = Report()
    got = formats.read(Place.at(path), report)
    faults = [f"{f.message} [{f.code}]" for f in report.errors]
    for name, tensor in meant.weights.items():
        read = got.weights.get(name) or got.weights.get(got.aliases.get(name, ""))
        if read is None:
            if name not in meant.aliases:
                faults.append(f"{name} is missing")
        elif (read.dtype, read.shape) != (tensor.dtype, tensor.shape):
            faults.append(f"{name} is {read!r}, not {tensor!r}")
    if extra := set(got.weights) - set(meant.weights) - set(got.aliases):
        faults.append(f"{sorted(extra)[0]} was not asked for")
    if faults:
        raise ReadBackError(
            f"what was written does not read back as meant: {faults[0]}"
            + (f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""),
            hint="nothing was put in place; please report this with the source's description (anyckpt PATH)",
        )
