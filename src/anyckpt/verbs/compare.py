"""How the values of two tensors of one shape differ, in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from anyckpt.core import kernels
from anyckpt.core.box import Box, c_strides, whole
from anyckpt.core.dtypes import DType
from anyckpt.core.tensor import Tensor
from anyckpt.verbs.reading import BLOCK, SLAB_BYTES, boxes_of, has_values, inner, read_values, widened

if TYPE_CHECKING:
    from anyckpt.core.tensor import Array


@dataclass(frozen=True, slots=True)
class ValueDifference:
    """How the values of one tensor differ between a and b.

    `is_bitwise`: all bytes agree. `is_equal`: the values agree as asked (within the tolerance; with none, bit for bit,
    after the cast of the wider to the narrower type where types differ: `after_cast` then names the type).
    `max_abs` and `max_rel` are over elements where both are finite; the relative error is |a - b| / max(|a|, |b|), so 2
    at most. `n_different` counts elements outside of the tolerance, NaN against a number among them; NaN equals NaN.
    `worst`: the index of the largest absolute error, and both values there. `cosine` is over finite elements, None for
    tensors without direction (integers, all zero). `is_known` False: the types' values are not known and differing
    bytes are all that can be told.
    """

    name: str
    n_elements: int
    is_equal: bool = True
    is_bitwise: bool = True
    after_cast: str = ""
    n_different: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0
    n_nan_a: int = 0
    n_nan_b: int = 0
    worst: tuple[tuple[int, ...], str, str] | None = None
    cosine: float | None = None
    is_known: bool = True

    def as_dict(self) -> dict[str, Any]:
        """The row as `--json` prints it; infinite errors as text."""
        def number(value: float | None) -> float | str | None:
            return value if value is None or math.isfinite(value) else str(value)

        return {
            "name": self.name, "elements": self.n_elements, "equal": self.is_equal, "bitwise": self.is_bitwise,
            "after_cast": self.after_cast or None, "different": self.n_different, "max_abs": number(self.max_abs),
            "max_rel": number(self.max_rel), "nan_a": self.n_nan_a, "nan_b": self.n_nan_b,
            "worst": None if self.worst is None
            else {"index": list(self.worst[0]), "a": self.worst[1], "b": self.worst[2]},
            "cosine": number(self.cosine), "values_known": self.is_known,
        }  # fmt: skip


def compare_values(
    name: str, a: Tensor, b: Tensor, *, rtol: float, atol: float, advance: Callable[[int], None] = lambda _: None
) -> ValueDifference:
    """Read both tensors once, slab by slab, and say how their values differ. Their shapes must be equal."""
    known = has_values(a) and has_values(b)
    if not known and a.dtype != b.dtype:
        return ValueDifference(name, a.size, False, False, is_known=False)
    sums = _Sums(a, b, rtol, atol)
    equal: list[Box] = []
    for box in _common_cut(a, b):
        x, y = (read_values(t, box, name).reshape(-1) for t in (a, b))
        advance(a.dtype.nbytes(box.volume) + b.dtype.nbytes(box.volume))
        if x.dtype == y.dtype and np.array_equal(_raw(x), _raw(y)):
            equal.append(box)
        else:
            sums.is_bitwise = False
            if known:
                sums.add(box, x, y)
    if not known:
        return ValueDifference(name, a.size, sums.is_bitwise, sums.is_bitwise, is_known=False)
    if not sums.is_bitwise:  # only then do slabs that agree matter, for direction and NaN: read again, one side
        for box in equal:
            sums.add_equal(read_values(a, box, name).reshape(-1))
    return sums.result(name)


def _common_cut(a: Tensor, b: Tensor) -> Iterator[Box]:
    """Boxes that both can be read by: along the larger blocks, whole where blocks don't fit rows or each other."""
    small, large = sorted((a, b), key=lambda t: (t.dtype.block, t.dtype.itemsize))
    rows_fit = all(t.dtype.block == 1 or (t.shape and t.shape[-1] % t.dtype.block == 0) for t in (a, b))
    if rows_fit and large.dtype.block % small.dtype.block == 0:
        return boxes_of(large, SLAB_BYTES)
    return iter([whole(a.shape)] if a.size else [])


class _Sums:
    """What is known after some slabs."""

    def __init__(self, a: Tensor, b: Tensor, rtol: float, atol: float) -> None:
        self.a, self.b, self.rtol, self.atol = a, b, rtol, atol
        self.narrow = _narrower(a.dtype, b.dtype) if a.dtype != b.dtype else None
        self.is_bitwise = True
        self.is_cast_equal = True
        self.n_different = self.n_nan_a = self.n_nan_b = 0
        self.max_abs = self.max_rel = 0.0
        self.worst: tuple[tuple[int, ...], str, str] | None = None
        self.dot = self.squares_a = self.squares_b = 0.0

    def add(self, box: Box, x: Array, y: Array) -> None:
        """Count a slab whose bytes or types differ."""
        if self.narrow is not None and self.is_cast_equal:
            self.is_cast_equal = np.array_equal(_raw(_cast(x, self.narrow)), _raw(_cast(y, self.narrow)))
        for i in range(0, x.size, BLOCK):
            self._add_block(box, i, x[i : i + BLOCK], y[i : i + BLOCK])

    def add_equal(self, x: Array) -> None:
        """A slab whose bytes agree has no errors, but it counts for the direction and for NaN."""
        if x.dtype.kind in "iub":
            return
        for i in range(0, x.size, BLOCK):
            values = widened(x[i : i + BLOCK])
            finite = np.isfinite(values)
            if not finite.all():
                n_nan = int(np.isnan(values).sum())
                self.n_nan_a += n_nan
                self.n_nan_b += n_nan
                values = values[finite]
            square = inner(values, values)
            self.dot += square
            self.squares_a += square
            self.squares_b += square

    def _add_block(self, box: Box, start: int, x: Array, y: Array) -> None:
        if x.dtype.kind in "iub" and y.dtype.kind in "iub":
            self._add_integers(box, start, x, y)
            return
        p, q = widened(x), widened(y)
        p, q = (v.astype(np.float64) if v.dtype.kind in "iub" else v for v in (p, q))
        self._add_direction(p, q)
        with np.errstate(invalid="ignore", over="ignore"):
            error = np.abs(p - q)
            size = np.maximum(np.abs(p), np.abs(q))
            largest = float(error.max())
        finite = math.isfinite(largest)
        if not finite:
            largest = self._settle_not_finite(p, q, error, size)
        # Over a size of 0 stands an error of 0: any divisor will do.
        np.maximum(size, np.finfo(np.float64).tiny, out=size)
        if self.atol or self.rtol:
            self.n_different += int((error > np.maximum(self.atol, self.rtol * size)).sum())
        else:
            self.n_different += int(np.count_nonzero(error))
        if largest > self.max_abs:
            at = int((error if finite else np.where(np.isfinite(error), error, -1.0)).argmax())
            self.max_abs = largest
            self.worst = (_index(box, start + at), _text(x[at]), _text(y[at]))
        np.divide(error, size, out=error)
        self.max_rel = max(self.max_rel, float((error if finite else error[np.isfinite(error)]).max(initial=0.0)))

    def _add_direction(self, p: Array, q: Array) -> None:
        squares = inner(p, p), inner(q, q)
        if not all(map(math.isfinite, squares)):
            finite = np.isfinite(p) & np.isfinite(q)
            p, q = p[finite], q[finite]
            squares = inner(p, p), inner(q, q)
        self.dot += inner(p, q)
        self.squares_a += squares[0]
        self.squares_b += squares[1]

    def _settle_not_finite(self, p: Array, q: Array, error: Array, size: Array) -> float:
        """Mend `error` and `size` where a value is not finite; returns the largest finite error.

        Like infinities and two NaN differ by 0, anything else by infinity.
        """
        nan_p, nan_q = np.isnan(p), np.isnan(q)
        self.n_nan_a += int(nan_p.sum())
        self.n_nan_b += int(nan_q.sum())
        odd = ~(np.isfinite(p) & np.isfinite(q))
        error[odd] = np.inf
        error[(p == q) | (nan_p & nan_q)] = 0.0
        size[odd] = 1.0  # an infinite error is beyond any tolerance, relative ones too
        return float(error[np.isfinite(error)].max(initial=0.0))

    def _add_integers(self, box: Box, start: int, x: Array, y: Array) -> None:
        """Integers differ by what Python would say, whatever their widths and signs."""
        unlike = np.flatnonzero(_unlike(x, y))
        if not unlike.size:
            return
        p, q = x[unlike].astype(np.float64), y[unlike].astype(np.float64)
        error = np.maximum(np.abs(p - q), 1.0)  # 1 where float64 does not tell two large integers apart
        size = np.maximum(np.abs(p), np.abs(q))
        self.n_different += int((error > np.maximum(self.atol, self.rtol * size)).sum())
        at = int(error.argmax())
        if error[at] > self.max_abs:
            self.max_abs = float(error[at])
            self.worst = (_index(box, start + int(unlike[at])), _text(x[unlike[at]]), _text(y[unlike[at]]))
        self.max_rel = max(self.max_rel, float((error / size).max()))

    def result(self, name: str) -> ValueDifference:
        tolerant = self.rtol > 0 or self.atol > 0
        after_cast = self.narrow.name if self.narrow is not None and self.is_cast_equal and not self.is_bitwise else ""
        equal = self.is_bitwise or bool(after_cast) or (tolerant and not self.n_different)
        norms = math.sqrt(self.squares_a) * math.sqrt(self.squares_b)
        cosine = self.dot / norms if 0 < norms < math.inf and not self.is_bitwise else None
        return ValueDifference(
            name, self.a.size, equal, self.is_bitwise, after_cast, self.n_different, self.max_abs, self.max_rel,
            self.n_nan_a, self.n_nan_b, self.worst, None if cosine is None else max(-1.0, min(1.0, cosine)),
        )


def _unlike(x: Array, y: Array) -> Array:
    """Where integers differ; signed against 64-bit unsigned ones are not compared through float64, as numpy would."""
    if x.dtype.kind == "b" or y.dtype.kind == "b" or np.result_type(x, y).kind != "f":
        return np.asarray(x != y)
    signed, unsigned = (x, y) if x.dtype.kind == "i" else (y, x)
    return np.asarray((signed < 0) | (signed.astype(np.uint64) != unsigned))


def _narrower(a: DType, b: DType) -> DType | None:
    """The type that both can be cast to for a comparison, the one of fewer bytes; None where neither loses less."""
    if a.block > 1 or b.block > 1 or not a.is_floating or not b.is_floating:
        return None
    return a if a.itemsize <= b.itemsize else b


def _cast(values: Array, dtype: DType) -> Array:
    return values if values.dtype == dtype.numpy_dtype() else kernels.cast(values, dtype)


def _raw(values: Array) -> Array:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)


def _index(box: Box, at: int) -> tuple[int, ...]:
    """The index in the whole tensor of the element at `at` in C order of a box."""
    index = []
    for stride, first in zip(c_strides(box.shape), box.start, strict=True):
        i, at = divmod(at, stride)
        index.append(first + i)
    return tuple(index)


def _text(value: Any) -> str:
    return str(value)
