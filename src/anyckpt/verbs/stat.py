"""Statistics of values, tensor by tensor, in one bounded pass."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import numpy as np

from anyckpt.core.checkpoint import Checkpoint
from anyckpt.core.tensor import Tensor
from anyckpt.errors import UsageError
from anyckpt.verbs.open import open
from anyckpt.verbs.reading import (
    Events,
    blocks,
    boxes_of,
    each,
    has_values,
    inner,
    read_values,
    widened,
)
from anyckpt.verbs.tensors import optimizer_tensors, other_tensors

if TYPE_CHECKING:
    from anyckpt.core.tensor import Array


@dataclass(frozen=True, slots=True)
class TensorStatistics:
    """One tensor. Everything but the counts is over its finite values; None where there are none to speak of.

    `std` is that of the population (numpy's, not torch's default); `norm` the L2 norm. Complex values count by their
    magnitude. `is_read`: False for types whose values are not known (raw, packed) and for tensors saved without data.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    n_elements: int
    is_read: bool = False
    min: float | int | None = None
    max: float | int | None = None
    mean: float | None = None
    std: float | None = None
    norm: float | None = None
    n_zeros: int = 0
    n_nan: int = 0
    n_infinite: int = 0

    @property
    def zeros_share(self) -> float:
        """Zeros among all elements, 0 to 1."""
        return self.n_zeros / self.n_elements if self.n_elements else 0.0

    def as_dict(self) -> dict[str, Any]:
        """The row as `--json` prints it."""
        return {
            "name": self.name, "dtype": self.dtype, "shape": list(self.shape), "elements": self.n_elements,
            "read": self.is_read, "min": self.min, "max": self.max, "mean": self.mean, "std": self.std,
            "norm": self.norm, "zeros": self.n_zeros, "nan": self.n_nan, "infinite": self.n_infinite,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Statistics:
    """What `stat` found, in the order of the file. `norm` is the L2 norm over all weights, tied ones once."""

    path: str
    tensors: tuple[TensorStatistics, ...]
    norm: float
    n_nan: int
    n_infinite: int

    def as_dict(self) -> dict[str, Any]:
        """The record as `--json` prints it."""
        return {
            "path": self.path, "norm": self.norm, "nan": self.n_nan, "infinite": self.n_infinite,
            "tensors": [t.as_dict() for t in self.tensors],
        }


def stat(
    path: str | os.PathLike[str] | Checkpoint,
    *,
    names: Sequence[str] = (),
    state: bool = False,
    jobs: int | None = None,
    events: Events | None = None,
) -> Statistics:
    """Read every value once and say how the values of each tensor are spread. `names`: patterns (`*.norm.weight`).

    With `state`, optimizer slots (`parameter/slot`) and the other tensors saved as well. Sums are in float64 whatever
    the type. Raises CheckpointError where the file is cut short, UsageError where no tensor has one of `names`.
    """
    checkpoint = path if isinstance(path, Checkpoint) else open(path)
    chosen: dict[str, Tensor] = dict(checkpoint.weights)
    if state:
        chosen.update({**optimizer_tensors(checkpoint), **other_tensors(checkpoint)})
    if names:
        chosen = {n: t for n, t in chosen.items() if any(fnmatchcase(n, pattern) for pattern in names)}
        if not chosen:
            raise UsageError(f"no tensor is called {' or '.join(map(repr, names))}")
    rows = each(
        lambda item, advance: statistics_of(*item, advance=advance),
        chosen.items(),
        total_bytes=sum(t.nbytes for t in chosen.values() if t.is_stored),
        jobs=jobs,
        events=events,
    )
    once = [r for r in rows if r.name in checkpoint.weights and r.name not in checkpoint.aliases]
    norm = math.hypot(*(r.norm for r in once if r.norm is not None))
    return Statistics(
        checkpoint.path, tuple(rows), norm, sum(r.n_nan for r in rows), sum(r.n_infinite for r in rows)
    )


def statistics_of(name: str, tensor: Tensor, *, advance: Callable[[int], None] = lambda _: None) -> TensorStatistics:
    """One tensor's statistics, read in slabs."""
    if not tensor.is_stored or not has_values(tensor):
        if tensor.is_stored:
            advance(tensor.nbytes)
        return TensorStatistics(name, tensor.dtype.name, tensor.shape, tensor.size)
    total = _Sums()
    for box in boxes_of(tensor):
        values = read_values(tensor, box, name).reshape(-1)
        for block in blocks(values):
            total.add(block)
        advance(tensor.dtype.nbytes(box.volume))
    row = TensorStatistics(
        name, tensor.dtype.name, tensor.shape, tensor.size, True,
        n_zeros=total.n_zeros, n_nan=total.n_nan, n_infinite=total.n_infinite,
    )  # fmt: skip
    if not total.n:
        return row
    variance = total.squared_deviations / total.n
    std = math.sqrt(variance) if math.isfinite(variance) else None
    return replace(row, min=total.min, max=total.max, mean=total.mean, std=std, norm=total.norm)


class _Sums:
    """Running sums. Deviations are merged block by block (Chan, Golub, LeVeque 1979), so a large mean loses nothing."""

    __slots__ = ("max", "mean", "min", "n", "n_infinite", "n_nan", "n_zeros", "norm", "squared_deviations")

    def __init__(self) -> None:
        self.n = self.n_zeros = self.n_nan = self.n_infinite = 0
        self.min: float | int | None = None
        self.max: float | int | None = None
        self.mean = self.squared_deviations = 0.0
        self.norm = 0.0

    def add(self, block: Array) -> None:
        values = widened(block)
        exact = values.dtype.kind in "iub"
        self.n_zeros += int(values.size - np.count_nonzero(values))
        if values.dtype.kind == "c":
            values = np.abs(values)
        if not exact:
            finite = np.isfinite(values)
            if not finite.all():
                n_nan = int(np.isnan(values).sum())
                self.n_nan += n_nan
                self.n_infinite += int(values.size - finite.sum()) - n_nan
                values = values[finite]
        if not values.size:
            return
        low, high = values.min(), values.max()
        self.min = _least(self.min, int(low) if exact else float(low))
        self.max = _most(self.max, int(high) if exact else float(high))
        floats = values.astype(np.float64)
        self.norm = math.hypot(self.norm, _norm(floats))
        n, mean = floats.size, float(floats.mean())
        delta, both = mean - self.mean, self.n + n
        floats -= mean
        with np.errstate(over="ignore"):
            self.squared_deviations += inner(floats, floats) + delta * delta * self.n * n / both
        self.mean += delta * n / both
        self.n = both


def _norm(floats: Array) -> float:
    """The L2 norm; huge and tiny values are scaled first, so that their squares neither overflow nor vanish."""
    largest = float(np.abs(floats).max())
    if largest == 0.0 or 1e-100 < largest < 1e100:
        return math.sqrt(inner(floats, floats))
    floats = floats / largest
    return largest * math.sqrt(inner(floats, floats))


def _least(a: float | int | None, b: float | int) -> float | int:
    return b if a is None else min(a, b)


def _most(a: float | int | None, b: float | int) -> float | int:
    return b if a is None else max(a, b)
