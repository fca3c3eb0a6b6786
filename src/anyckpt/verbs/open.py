"""Open a checkpoint: from a path to a `Checkpoint`, reading headers only."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from anyckpt import formats
from anyckpt.errors import UsageError
from anyckpt.finding import Report
from anyckpt.io.place import Place

if TYPE_CHECKING:
    from anyckpt.core.checkpoint import Checkpoint


def open(path: str | os.PathLike[str], *, like: str | os.PathLike[str] | None = None) -> Checkpoint:
    """Describe the checkpoint at `path`, a file or a folder of any format; no tensor data is read.

    `like`: a file or folder that gives the names and shapes which a format without names lacks.

    Succeeds wherever weights can be described. What is wrong with them is in `.findings`, and a conversion refuses
    those that are errors. Raises CheckpointError where nothing can be described (NotACheckpoint: no format recognises
    it), UsageError where there is no such path.
    """
    if like is not None:
        raise UsageError("no format that is read today takes its names from another file; leave `like` out")
    return formats.read(Place.at(path), Report())
