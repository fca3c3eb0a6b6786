"""Weights only: leave optimizer, scheduler, RNG and everything else behind, and say what that saves."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from anyckpt.core.checkpoint import Checkpoint
from anyckpt.errors import UsageError
from anyckpt.formats.table import by_ending, row_named
from anyckpt.verbs.convert import Source, convert
from anyckpt.verbs.open import open as open_checkpoint
from anyckpt.verbs.write import Written


def prune(source: Source, destination: str | os.PathLike[str], *, to: str | None = None, **options: Any) -> Written:
    """Write only the weights of `source`, in its own format unless the destination's ending or `to` says otherwise.

    The result's `extra` has `bytes_before` and `bytes_saved`. Options as `convert`.
    """
    checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source)
    to = to or same_format(checkpoint, destination)
    written = convert(checkpoint, destination, to=to, only="weights", **options)
    before = size_on_disk(checkpoint.path)
    return replace(written, extra={"bytes_before": before, "bytes_saved": before - written.bytes_out})


def same_format(checkpoint: Checkpoint, destination: str | os.PathLike[str]) -> str:
    """The format of a result that should stay what the source was, where the destination's ending says nothing else."""
    row = by_ending(Path(destination).name)
    if row is None and checkpoint.format in WRITTEN_AS:
        return WRITTEN_AS[checkpoint.format]
    row = row or row_named(checkpoint.format)
    if row is not None and row.writes:
        return row.name
    raise UsageError(f"{checkpoint.format} can't be written", hint="name the format with --to, e.g. --to safetensors")


WRITTEN_AS = {
    **dict.fromkeys(("torch-legacy", "torch-tar", "torchscript", "torch-export"), "torch"),
    **dict.fromkeys(("deepspeed", "deepspeed-universal"), "hf"),
}
"""What the weights alone are written as where the source's own format is out of date, or is for training state only."""


def size_on_disk(path: str) -> int:
    """Bytes of a file, or of all regular files below a folder."""
    if os.path.isfile(path):
        return os.path.getsize(path)
    return sum(
        os.lstat(os.path.join(folder, name)).st_size for folder, _, names in os.walk(path) for name in names
    )
