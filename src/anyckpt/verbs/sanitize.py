"""Rewrite a torch file so that `torch.load(weights_only=True)` takes it, training state and all.

Everything that loader would refuse is replaced by plain data: an object of an unknown class by its attributes, a
path by its text, a numpy array by a tensor. Calls and functions are dropped. Nothing is ever executed to find out.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from anyckpt.core.checkpoint import Checkpoint
from anyckpt.formats.table import WriteOptions, writable
from anyckpt.plan.run import Job
from anyckpt.verbs.convert import Source
from anyckpt.verbs.open import open as open_checkpoint
from anyckpt.verbs.reading import refuse_damaged
from anyckpt.verbs.write import Written, write_checkpoint


def sanitize(source: Source, destination: str | os.PathLike[str], **job: Any) -> Written:
    """Write `source` to `destination` as a torch file that loads with `weights_only=True`.

    Its structure is kept. The result's `extra["replaced"]` lists what was made plain and what was dropped, by place.
    Raises UsageError for a source that is no single pickle-based file.
    """
    checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source)
    refuse_damaged(checkpoint)
    replaced: list[dict[str, str]] = []
    options = WriteOptions(Path(destination).name, extra={"object": True, "replaced": replaced})
    written = write_checkpoint(checkpoint, Path(destination), writable("torch"), options, Job(**job))
    return replace(written, findings=checkpoint.findings, extra={"replaced": replaced})
