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

    `like`: a checkpoint of the same model, or a JSON file {name: shape}, that gives the names, order and shapes which a
    format without them lacks (FSDP's flat parameters).

    Succeeds wherever weights can be described. What is wrong with them is in `.findings`, and a conversion refuses
    those that are errors. Raises CheckpointError where nothing can be described (NotACheckpoint: no format recognises
    it), UsageError where there is no such path.
    """
    reference = None if like is None else _reference(like)
    return formats.read(Place.at(path), Report(), reference)


def _reference(path: str | os.PathLike[str]) -> Checkpoint:
    """The checkpoint that `like` names; a JSON file of shapes is one without data."""
    place = Place.at(path)
    if place.is_folder or not os.fspath(path).endswith(".json"):
        return formats.read(place, Report())
    from math import prod

    from anyckpt.core.checkpoint import Checkpoint
    from anyckpt.core.dtypes import DTYPES
    from anyckpt.core.source import Absent
    from anyckpt.core.tensor import from_source

    shapes = place.read_json(place.path.name, Report(), code="bad-header")
    if not isinstance(shapes, dict) or not shapes or not all(_is_shape(shape) for shape in shapes.values()):
        raise UsageError(f"{os.fspath(path)} is no JSON object {{name: [sizes]}}")
    kind = DTYPES["float32"]
    weights = {
        name: from_source(kind, tuple(shape), Absent(kind.nbytes(prod(shape)), "only its shape is known"))
        for name, shape in shapes.items()
    }
    return Checkpoint("shapes", os.fspath(path), weights)


def _is_shape(value: object) -> bool:
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)
