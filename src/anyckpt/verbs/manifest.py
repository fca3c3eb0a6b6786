"""Digests of a checkpoint's files, and if asked of its tensors, to tell later whether anything has changed.

A file's digest changes with its container; a tensor's is of its elements in C order, little-endian, and stays the same
through every conversion that keeps the values.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from anyckpt.core.read import read_box
from anyckpt.core.source import File
from anyckpt.core.tensor import Tensor
from anyckpt.io.place import Place
from anyckpt.verbs.open import open
from anyckpt.verbs.reading import SLAB_BYTES, Events, boxes_of, each


@dataclass(frozen=True, slots=True)
class Digest:
    """The SHA-256 (hex) of one file or tensor of `n_bytes` bytes."""

    name: str
    n_bytes: int
    sha256: str

    def as_dict(self) -> dict[str, Any]:
        """The row as `--json` prints it."""
        return {"name": self.name, "bytes": self.n_bytes, "sha256": self.sha256}


@dataclass(frozen=True, slots=True)
class Manifest:
    """Digests in the order of names; `tensors` is empty unless they were asked for."""

    path: str
    files: tuple[Digest, ...]
    tensors: tuple[Digest, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The record as `--json` prints it."""
        return {
            "path": self.path,
            "files": [f.as_dict() for f in self.files],
            "tensors": [t.as_dict() for t in self.tensors],
        }


def manifest(
    path: str | os.PathLike[str], *, tensors: bool = False, jobs: int | None = None, events: Events | None = None
) -> Manifest:
    """Digest every file at or under `path`, and every weight if `tensors`; reads all of them once each.

    Raises CheckpointError where a file cannot be read, UsageError where there is no such path.
    """
    place = Place.at(path)
    opened = [(name, place.open(name)) for name in place.names]
    total = sum(file.size for _, file in opened)
    files = each(_of_file, opened, total_bytes=total, jobs=jobs, events=events)
    if not tensors:
        return Manifest(os.fspath(path), tuple(files))
    weights = sorted(open(path).weights.items())
    total = sum(tensor.nbytes for _, tensor in weights)
    found = each(_of_tensor, weights, total_bytes=total, jobs=jobs, events=events)
    return Manifest(os.fspath(path), tuple(files), tuple(found))


def _of_file(item: tuple[str, File], advance: Callable[[int], None]) -> Digest:
    name, file = item
    digest = hashlib.sha256()
    for offset in range(0, file.size, SLAB_BYTES):
        data = file.read(offset, min(SLAB_BYTES, file.size - offset))
        digest.update(data)
        advance(len(data))
    return Digest(name, file.size, digest.hexdigest())


def _of_tensor(item: tuple[str, Tensor], advance: Callable[[int], None]) -> Digest:
    name, tensor = item
    digest = hashlib.sha256()
    for box in boxes_of(tensor):
        array = np.ascontiguousarray(read_box(tensor, box))
        digest.update(array.reshape(-1).view(np.uint8).data)
        advance(array.nbytes)
    return Digest(name, tensor.nbytes, digest.hexdigest())
