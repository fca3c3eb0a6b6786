"""Who holds which box of a tensor on a mesh of processes: DTensor placements and torch.chunk. Pure arithmetic.

    Shard(axis)                     L elements over n parts: part i is [i·c, min((i + 1)·c, L)), c = ceil(L / n); the
                                    last parts may be short or empty, as torch.chunk makes them
    _StridedShard(axis, factor)     as if `factor` parts had been cut before, by a mesh axis further right: chunk into
                                    `factor`, each into n, part i is the i-th of each, one after the other
    Replicate                       everyone has all of it

Placements apply left to right to what is left of the tensor. FSDP2 over tensor parallelism is
(_StridedShard(0, tp), Shard(0)) on a mesh (dp, tp): the tensor is cut for tp first and each part for dp, so that taking
both for plain shards would shuffle rows. Source: torch 2.13 `distributed/tensor/placement_types.py` and `_utils.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from anyckpt.core.box import Box, Shape

Run = tuple[int, int]  # [start, stop) along one axis


@dataclass(frozen=True, slots=True)
class Split:
    """One mesh axis that shards: which tensor axis, into how many parts, which is ours, cut into `factor` before."""

    axis: int
    n_parts: int
    index: int
    factor: int = 1


def chunk(size: int, n_parts: int, index: int) -> Run:
    """Part `index` of `size` elements cut as torch.chunk does, with empty parts at the end where they run out.

    >>> [chunk(5, 4, i) for i in range(4)]
    [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    step = -(-size // n_parts) if size else 0
    return min(index * step, size), min((index + 1) * step, size)


def local_boxes(shape: Shape, splits: Sequence[Split]) -> list[tuple[Box, Box]]:
    """What one process holds: pairs (box of the whole tensor, box of the local one), the local ones in its order.

    One pair unless strided shards are cut unevenly; none where its part is empty.
    """
    runs: list[list[Run]] = [[(0, n)] for n in shape]
    for split in splits:
        runs[split.axis] = _cut(runs[split.axis], split)
    placed: list[list[tuple[Run, Run]]] = []
    for axis_runs in runs:
        at = 0
        pairs = []
        for start, stop in axis_runs:
            if start < stop:
                pairs.append(((start, stop), (at, at + stop - start)))
                at += stop - start
        placed.append(pairs)
    boxes = []
    for combination in product(*placed):
        whole = Box(tuple(w[0] for w, _ in combination), tuple(w[1] for w, _ in combination))
        local = Box(tuple(p[0] for _, p in combination), tuple(p[1] for _, p in combination))
        boxes.append((whole, local))
    return boxes


def _cut(runs: list[Run], split: Split) -> list[Run]:
    """The split's part of the elements of `runs`, in their order."""
    size = sum(stop - start for start, stop in runs)
    if split.factor == 1:
        return _within(runs, *chunk(size, split.n_parts, split.index))
    found: list[Run] = []
    for outer in range(split.factor):
        start, stop = chunk(size, split.factor, outer)
        a, b = chunk(stop - start, split.n_parts, split.index)
        found += _within(runs, start + a, start + b)
    return _joined(found)


def _within(runs: list[Run], start: int, stop: int) -> list[Run]:
    """The elements [start, stop) of runs laid end to end."""
    found = []
    at = 0
    for a, b in runs:
        low, high = max(start, at), min(stop, at + b - a)
        if low < high:
            found.append((a + low - at, a + high - at))
        at += b - a
    return found


def _joined(runs: list[Run]) -> list[Run]:
    out: list[Run] = []
    for start, stop in runs:
        if out and out[-1][1] == start:
            out[-1] = (out[-1][0], stop)
        else:
            out.append((start, stop))
    return out


def shards(shape: Shape, n_parts: int, axis: int = 0) -> list[Box]:
    """The boxes of a tensor sharded along one axis over `n_parts` processes, empty ones included (FSDP2's layout)."""
    boxes = []
    for index in range(n_parts):
        start, stop = [0] * len(shape), list(shape)
        start[axis], stop[axis] = chunk(shape[axis], n_parts, index)
        boxes.append(Box(tuple(start), tuple(stop)))
    return boxes


def coordinate_of(rank: int, mesh_shape: Shape, mesh_ranks: Sequence[int]) -> Shape | None:
    """Where a rank stands in a mesh given by its ranks in C order; None where it does not."""
    if rank not in mesh_ranks:
        return None
    flat = list(mesh_ranks).index(rank)
    out: list[int] = []
    for n in reversed(mesh_shape):
        flat, i = divmod(flat, n)
        out.insert(0, i)
    return tuple(out)
