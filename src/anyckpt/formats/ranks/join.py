"""The objects that every rank saved, joined into the one that a single process would have saved.

The objects are walked side by side. Where they hold a sharded tensor its parts are put together; what several ranks
hold of it is taken once. Anything else should be the same on every rank and is taken from the first that has it, except
generators' states, which are kept by rank.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from anyckpt.core.box import Box, cover
from anyckpt.core.inert import Mapping as SavedMapping
from anyckpt.core.tensor import Piece, Tensor
from anyckpt.errors import CheckpointError
from anyckpt.finding import Report
from anyckpt.formats.ranks.located import is_sharded, part_of, pieces_of
from anyckpt.io.paths import printable

MAX_DEPTH = 64
_BY_RANK = re.compile(r"rng|random_state|dataloader|data_loader|sampler", re.IGNORECASE)
_STEPS = ("step", "global_step", "iteration", "epoch")


def joined(objects: Mapping[int, Any], report: Report, where: str) -> Any:
    """One object of those of all ranks. `objects` by rank."""
    return _Joiner(report, where).join(objects, ())


class _Joiner:
    """The walk: where faults are told, and the names of tensors that lack a part, told together at the end."""

    def __init__(self, report: Report, where: str) -> None:
        self.report, self.where = report, where

    def join(self, values: Mapping[int, Any], path: tuple[str, ...]) -> Any:
        """What the ranks hold under one path."""
        first = next(iter(values.values()))
        if any(is_sharded(value) for value in values.values()):
            return self._tensor({r: v for r, v in values.items() if is_sharded(v)}, path) or first
        if len(path) < MAX_DEPTH and isinstance(first, dict):
            return self._dict({r: v for r, v in values.items() if isinstance(v, dict)}, path)
        if len(path) < MAX_DEPTH and type(first) in (list, tuple) and self._differ_inside(values):
            rows = {r: v for r, v in values.items() if type(v) is type(first) and len(v) == len(first)}
            parts = [self.join({r: v[i] for r, v in rows.items()}, (*path, str(i))) for i in range(len(first))]
            return type(first)(parts)
        if path and path[-1] in _STEPS and len({v for v in values.values() if isinstance(v, int)}) > 1:
            steps = sorted({v for v in values.values() if isinstance(v, int)})
            self.report.add(
                "mixed-steps", f"the ranks were saved at different steps: {path[-1]} is {steps[0]} and {steps[-1]}",
                where=self.where, hint="take the files of all ranks from one save",
            )
        return first

    def _dict(self, values: Mapping[int, Any], path: tuple[str, ...]) -> Any:
        first = next(iter(values.values()))
        out: dict[Any, Any] = {}
        if isinstance(first, SavedMapping):
            out = SavedMapping(kind=first.kind)
            out.attributes = first.attributes
        for key in dict.fromkeys(key for value in values.values() for key in value):
            held = {rank: value[key] for rank, value in values.items() if key in value}
            if _BY_RANK.search(str(key)) and len(held) > 1 and not any(map(is_sharded, held.values())):
                out[key] = {f"rank_{rank}": value for rank, value in held.items()}
            else:
                out[key] = self.join(held, (*path, str(key)))
        return out

    def _differ_inside(self, values: Mapping[int, Any]) -> bool:
        return any(is_sharded(v) or isinstance(v, dict | list | tuple) for value in values.values() for v in value)

    def _tensor(self, values: Mapping[int, Any], path: tuple[str, ...]) -> Tensor | None:
        """One tensor of the parts that ranks hold."""
        name = printable(".".join(path))
        shape, dtype, n_ranks = None, None, 0
        pieces: dict[Box, Piece] = {}
        for rank, value in values.items():
            try:
                part = part_of(value, rank)
                located = list(pieces_of(part))
            except CheckpointError as error:
                finding = error.finding
                self.report.add(finding.code, finding.message, where=f"{self.where}, {name}, rank {rank}")
                continue
            if shape is not None and part.shape != shape:
                self.report.add("inconsistent", "its shape differs between ranks", where=f"{self.where}, {name}")
                continue
            shape, n_ranks = part.shape, max(n_ranks, part.n_ranks)
            dtype = dtype or value.dtype
            for box, piece in located:
                pieces.setdefault(box, piece)
            for _, _, local in part.held:
                dtype = local.dtype
        if shape is None or dtype is None:
            return None
        found = cover(list(pieces), shape)
        if found.overlap is not None:
            self.report.add("offset-overlap", "ranks hold parts that overlap", where=f"{self.where}, {name}")
        elif found.missing:
            self.report.add(
                "missing-shard", f"{found.missing:,} of its elements are in no file; it was saved by {n_ranks} ranks, "
                f"{len(values)} are here", where=f"{self.where}, {name}",
                hint="copy the files of every rank into one folder",
            )
        whole = [Piece(p.source, None, p.strides) if b.shape == shape else p for b, p in pieces.items()]
        return Tensor(dtype, shape, tuple(whole))


def differing_plain_tensors(objects: Sequence[Any], *, limit: int = 8, max_bytes: int = 1 << 20) -> str:
    """The name of a plain tensor under which the ranks hold different things, "" where the samples are equal.

    Only a few small tensors are read: enough to tell replicas from parts.
    """
    first = _tensors(objects[0])
    others = [_tensors(value) for value in objects[1:]]
    for name, tensor in first.items():
        if any(name not in other or other[name].shape != tensor.shape for other in others):
            return name
    small = [n for n, t in first.items() if 0 < t.nbytes <= max_bytes and t.is_stored][:limit]
    for name in small:
        data = first[name].tobytes()
        if any(other[name].tobytes() != data for other in others):
            return name
    return ""


def _tensors(value: Any) -> dict[str, Tensor]:
    from anyckpt.core.inert import walk

    return {
        ".".join(map(str, path)): inner
        for path, inner in walk(value)
        if isinstance(inner, Tensor) and inner.ndim and not _BY_RANK.search(".".join(map(str, path)))
    }
