"""Where the bytes of a checkpoint are, and what could be saved. Reads headers only.

Bytes are those on the disk: what two tensors share (ties, overlapping views) counts once, under the first of them in
the file; what no tensor shows is dead storage or the container's own.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from anyckpt.core.checkpoint import Checkpoint
from anyckpt.core.source import Absent, Fill, Span
from anyckpt.core.tensor import Tensor
from anyckpt.names.ties import file_identity
from anyckpt.verbs.open import open
from anyckpt.verbs.tensors import other_tensors

# Slots that are no moments: the fp32 copy of the weights, and counters.
SLOT_KINDS: Mapping[str, str] = {"master": "master weights", "step": "counters"}
KINDS = ("weights", "moments", "master weights", "counters", "other state")
HALF_BYTES = 2  # of bfloat16, what `cast` is reckoned with


@dataclass(frozen=True, slots=True)
class Use:
    """Bytes on the disk of one kind of tensors. `logical_bytes`: as if each tensor had its own."""

    name: str
    n_tensors: int
    n_bytes: int
    logical_bytes: int

    def as_dict(self) -> dict[str, Any]:
        """The row as `--json` prints it."""
        return {
            "name": self.name, "tensors": self.n_tensors, "bytes": self.n_bytes, "logical_bytes": self.logical_bytes,
        }


@dataclass(frozen=True, slots=True)
class Saving:
    """What one step would save, in bytes, and the command for it (without a destination)."""

    what: str
    n_bytes: int
    command: str


@dataclass(frozen=True, slots=True)
class DiskUse:
    """What `du` found; all in bytes. The kinds, `dead_bytes` and `overhead_bytes` add up to `total_bytes`.

    `shared_bytes`: what ties and overlapping views save. `overhead_bytes`: headers, padding, pickles, files beside the
    tensors. `is_compressed`: the file is smaller than what it holds, so that the parts are those after unpacking.
    """

    path: str
    total_bytes: int
    kinds: tuple[Use, ...]
    dtypes: tuple[Use, ...]
    prefixes: tuple[Use, ...]
    shared_bytes: int
    dead_bytes: int
    overhead_bytes: int
    is_compressed: bool
    savings: tuple[Saving, ...]

    def as_dict(self) -> dict[str, Any]:
        """The record as `--json` prints it."""
        return {
            "path": self.path, "bytes": self.total_bytes,
            "kinds": [u.as_dict() for u in self.kinds], "dtypes": [u.as_dict() for u in self.dtypes],
            "prefixes": [u.as_dict() for u in self.prefixes],
            "shared_bytes": self.shared_bytes, "dead_bytes": self.dead_bytes, "overhead_bytes": self.overhead_bytes,
            "compressed": self.is_compressed,
            "savings": [{"what": s.what, "bytes": s.n_bytes, "command": s.command} for s in self.savings],
        }  # fmt: skip


def du(path: str | os.PathLike[str] | Checkpoint, *, depth: int = 2) -> DiskUse:
    """Say where the bytes are: by kind, by type, and by the first `depth` segments of the weights' names."""
    checkpoint = path if isinstance(path, Checkpoint) else open(path)
    rows = list(_rows(checkpoint))
    own = _own_bytes([tensor for _, _, tensor in rows])
    kinds, dtypes, prefixes = _Table(), _Table(), _Table()
    for (kind, name, tensor), n_bytes in zip(rows, own, strict=True):
        kinds.add(kind, tensor, n_bytes)
        dtypes.add(tensor.dtype.name, tensor, n_bytes)
        if kind == "weights":
            prefixes.add(".".join(name.split(".")[:depth]), tensor, n_bytes)
    held = sum(own)
    dead = int(checkpoint.facts.get("dead_bytes") or 0)
    total = _size_on_disk(checkpoint.path)
    total = held + dead if total is None else total
    logical = sum(_stored_bytes(tensor) for _, _, tensor in rows)
    return DiskUse(
        checkpoint.path, total, kinds.by_order(KINDS), dtypes.by_size(), prefixes.by_size(), logical - held, dead,
        max(0, total - held - dead), held > total, tuple(_savings(checkpoint, rows, own, total)),
    )


def _rows(checkpoint: Checkpoint) -> Iterator[tuple[str, str, Tensor]]:
    """(kind, name, tensor) of everything saved, weights first."""
    yield from (("weights", name, t) for name, t in checkpoint.weights.items())
    if checkpoint.optimizer is not None:
        for slot, by_parameter in checkpoint.optimizer.slots.items():
            kind = SLOT_KINDS.get(slot, "moments")
            yield from ((kind, f"{name}/{slot}", t) for name, t in by_parameter.items())
    yield from (("other state", name, t) for name, t in other_tensors(checkpoint).items())


def _own_bytes(tensors: list[Tensor]) -> list[int]:
    """Bytes on the disk of each tensor that no earlier one has: by file, in order of offset, first come."""
    extents: dict[Hashable, list[tuple[int, int, int]]] = {}
    own = [0] * len(tensors)
    seen: set[int] = set()
    for i, tensor in enumerate(tensors):
        for leaf in _leaves(tensor):
            for piece in leaf.pieces:
                source = piece.source
                if isinstance(source, Span):
                    file, offset = file_identity(source.file)
                    start = offset + source.offset
                    extents.setdefault(file, []).append((start, i, start + source.length))
                elif not isinstance(source, Absent | Fill) and id(source) not in seen:
                    seen.add(id(source))
                    own[i] += source.length
    for parts in extents.values():
        end = 0
        for start, i, stop in sorted(parts):
            own[i] += max(0, stop - max(start, end))
            end = max(end, stop)
    return own


def _leaves(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors with pieces that a computed one is made of."""
    stack = [tensor]
    while stack:
        one = stack.pop()
        if one.op is None:
            yield one
        else:
            stack.extend(one.op.inputs)


def _stored_bytes(tensor: Tensor) -> int:
    return tensor.nbytes if tensor.is_stored else 0


def _savings(
    checkpoint: Checkpoint, rows: list[tuple[str, str, Tensor]], own: list[int], total: int
) -> Iterator[Saving]:
    weights = sum(t.nbytes for kind, name, t in rows if kind == "weights" and name not in checkpoint.aliases)
    beside = sum(n for (kind, _, _), n in zip(rows, own, strict=True) if kind != "weights")
    dead = int(checkpoint.facts.get("dead_bytes") or 0)
    if checkpoint.is_training or beside or dead:
        yield Saving("keep the weights alone", max(0, min(beside + dead, total)), f"anyckpt prune {checkpoint.path}")
    wide = sum(
        t.size * (t.dtype.itemsize - HALF_BYTES)
        for kind, name, t in rows
        if kind == "weights" and name not in checkpoint.aliases and t.dtype.is_floating and t.is_stored
        if t.dtype.itemsize > HALF_BYTES
    )
    if wide and weights:
        yield Saving("round the weights to bfloat16", wide, f"anyckpt cast {checkpoint.path} --dtype bf16")


def _size_on_disk(path: str) -> int | None:
    """Bytes of a file, or of all regular files below a folder; None where it is no local path."""
    if os.path.isfile(path):
        return os.path.getsize(path)
    if not os.path.isdir(path):
        return None
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            file = os.path.join(folder, name)
            if os.path.isfile(file):
                total += os.path.getsize(file)
    return total


class _Table:
    """Sums by name."""

    def __init__(self) -> None:
        self.rows: dict[str, list[int]] = {}

    def add(self, name: str, tensor: Tensor, n_bytes: int) -> None:
        row = self.rows.setdefault(name, [0, 0, 0])
        row[0] += 1
        row[1] += n_bytes
        row[2] += _stored_bytes(tensor)

    def by_size(self) -> tuple[Use, ...]:
        return tuple(sorted((Use(name, *row) for name, row in self.rows.items()), key=lambda use: -use.n_bytes))

    def by_order(self, names: tuple[str, ...]) -> tuple[Use, ...]:
        return tuple(Use(name, *self.rows[name]) for name in names if name in self.rows)
