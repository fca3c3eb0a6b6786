"""The closed list of operations on tensors.

Each says, for a box of its output, which boxes of its inputs it needs, how to compute from them, and what that costs in
bytes; so any chain of them runs in bounded memory. `TRANSFORMS_MOMENTS` says which also apply to optimizer moments of
the weight: what moves elements does, what changes values does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from anyckpt.core import kernels
from anyckpt.core.box import Box, Shape, boxes_of_range, c_strides, flat_start, intersect, runs, whole
from anyckpt.core.dtypes import DTYPES, DType
from anyckpt.core.source import Foreign
from anyckpt.core.tensor import Piece, Tensor, stored_shape
from anyckpt.errors import UsageError

if TYPE_CHECKING:
    from anyckpt.core.tensor import Array

MAX_RUNS = 4096  # beyond so many separate runs a covering read is cheaper than the bookkeeping


@dataclass(frozen=True, slots=True)
class Slice:
    """Elements start + i·step of every axis."""

    input: Tensor
    start: Shape
    step: Shape

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return (self.input,)

    def regions(self, box: Box) -> list[tuple[Tensor, Box]]:
        start = tuple(s + a * k for s, a, k in zip(self.start, box.start, self.step, strict=True))
        stop = tuple(s + (b - 1) * k + 1 for s, b, k in zip(self.start, box.stop, self.step, strict=True))
        return [(self.input, Box(start, stop))]

    def compute(self, box: Box, arrays: Sequence[Array]) -> Array:
        return arrays[0][tuple(slice(None, None, k) for k in self.step)]

    def scratch(self, box: Box) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class Concat:
    """Tensors joined along one axis."""

    parts: tuple[Tensor, ...]
    axis: int

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return self.parts

    def regions(self, box: Box) -> list[tuple[Tensor, Box]]:
        out, at = [], 0
        for part in self.parts:
            origin = tuple(at if a == self.axis else 0 for a in range(part.ndim))
            common = intersect(whole(part.shape).shifted(origin), box)
            if common is not None:
                out.append((part, common.shifted(origin, -1)))
            at += part.shape[self.axis]
        return out

    def compute(self, box: Box, arrays: Sequence[Array]) -> Array:
        return arrays[0] if len(arrays) == 1 else np.concatenate(list(arrays), axis=self.axis)

    def scratch(self, box: Box) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class Reshape:
    """The same elements in C order under another shape."""

    input: Tensor
    shape: Shape

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return (self.input,)

    def _ranges(self, box: Box) -> list[tuple[int, int]]:
        ranges = []
        for start, length in runs(box, self.shape):
            ranges.append((start, start + length))
            if len(ranges) > MAX_RUNS:
                last = tuple(b - 1 for b in box.stop)
                end = sum(i * s for i, s in zip(last, c_strides(self.shape), strict=True)) + 1
                return [(flat_start(box, self.shape), end)]
        return ranges

    def regions(self, box: Box) -> list[tuple[Tensor, Box]]:
        return [
            (self.input, part)
            for start, stop in self._ranges(box)
            for part in boxes_of_range(self.input.shape, start, stop)
        ]

    def compute(self, box: Box, arrays: Sequence[Array]) -> Array:
        flat = arrays[0].reshape(-1) if len(arrays) == 1 else np.concatenate([a.reshape(-1) for a in arrays])
        if self.input.dtype.block > 1:  # arrays of bytes
            return flat.reshape(stored_shape(self.input.dtype, box.shape))
        if flat.size == box.volume:
            return flat.reshape(box.shape)
        steps = tuple(s * flat.itemsize for s in c_strides(self.shape))
        return np.lib.stride_tricks.as_strided(flat, box.shape, steps)

    def scratch(self, box: Box) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class Permute:
    """Axes in another order: output axis i is input axis axes[i]."""

    input: Tensor
    axes: Shape

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return (self.input,)

    def regions(self, box: Box) -> list[tuple[Tensor, Box]]:
        start, stop = [0] * len(self.axes), [0] * len(self.axes)
        for i, axis in enumerate(self.axes):
            start[axis], stop[axis] = box.start[i], box.stop[i]
        return [(self.input, Box(tuple(start), tuple(stop)))]

    def compute(self, box: Box, arrays: Sequence[Array]) -> Array:
        return np.ascontiguousarray(arrays[0].transpose(self.axes))

    def scratch(self, box: Box) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class Elementwise:
    """Base of operations that compute each element from the same element of one input."""

    input: Tensor

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return (self.input,)

    def regions(self, box: Box) -> list[tuple[Tensor, Box]]:
        return [(self.input, box)]

    def scratch(self, box: Box) -> int:
        return 4 * box.volume


@dataclass(frozen=True, slots=True)
class Cast(Elementwise):
    """Values in another dtype, rounded to nearest even as torch does."""

    dtype: DType

    def compute(self, box: Box, arrays: Sequence[Array]) -> Array:
        return kernels.cast(arrays[0], self.dtype)


@dataclass(frozen=True, slots=True)
class Bitcast(Elementwise):
    """The same bytes under another dtype of the same size."""

    dtype: DType

    def compute(self, box: Box, arrays: Sequence[Array]) -> Array:
        return arrays[0].view(self.dtype.numpy_dtype())

    def scratch(self, box: Box) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class AddConstant(Elementwise):
    """value + constant, computed in the input's dtype (Gemma's norm weights)."""

    constant: float

    def compute(self, box: Box, arrays: Sequence[Array]) -> Array:
        return np.asarray(arrays[0] + arrays[0].dtype.type(self.constant))


@dataclass(frozen=True, slots=True)
class Conj(Elementwise):
    """The complex conjugate (torch's lazy conj bit)."""

    def compute(self, box: Box, arrays: Sequence[Array]) -> Array:
        return np.conjugate(arrays[0])


@dataclass(frozen=True, slots=True)
class Neg(Elementwise):
    """The negated values (torch's lazy neg bit)."""

    def compute(self, box: Box, arrays: Sequence[Array]) -> Array:
        return np.negative(arrays[0])


@dataclass(frozen=True, slots=True)
class Dequantize:
    """(q - zero_point) · scale, with scale and zero point of the whole tensor or of each index of `axis`."""

    q: Tensor
    scale: Tensor
    zero_point: Tensor | None
    axis: int | None
    dtype: DType

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return (self.q, self.scale) if self.zero_point is None else (self.q, self.scale, self.zero_point)

    def regions(self, box: Box) -> list[tuple[Tensor, Box]]:
        return [(self.q, box), *((t, self._along(t, box)) for t in self.inputs[1:])]

    def _along(self, t: Tensor, box: Box) -> Box:
        if self.axis is None or t.ndim == 0:
            return whole(t.shape)
        if t.ndim == 1:
            return Box((box.start[self.axis],), (box.stop[self.axis],))
        return Box(
            tuple(0 if n == 1 else a for n, a in zip(t.shape, box.start, strict=True)),
            tuple(1 if n == 1 else b for n, b in zip(t.shape, box.stop, strict=True)),
        )

    def compute(self, box: Box, arrays: Sequence[Array]) -> Array:
        def spread(a: Array) -> Array:
            if a.ndim != 1 or self.axis is None or len(box.start) == a.ndim:
                return a
            return a.reshape([-1 if i == self.axis else 1 for i in range(len(box.start))])

        return kernels.dequantize(arrays[0], *(spread(a) for a in arrays[1:])).astype(self.dtype.numpy_dtype())

    def scratch(self, box: Box) -> int:
        return 16 * box.volume


@dataclass(frozen=True, slots=True)
class Densify:
    """A sparse tensor made plain. `parts` are the index and value tensors its `layout` needs, in torch's order.

    sparse_coo: indices [ndim, nnz], values; sparse_csr/csc: crow/ccol, col/row, values; sparse_bsr/bsc likewise with
    values of [nnz, block rows, block columns].
    """

    layout: str
    parts: tuple[Tensor, ...]
    shape: Shape

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return self.parts

    def regions(self, box: Box) -> list[tuple[Tensor, Box]]:
        return [(t, whole(t.shape)) for t in self.parts]

    def compute(self, box: Box, arrays: Sequence[Array]) -> Array:
        return kernels.densify(self.layout, arrays, self.shape)[box.slices()]

    def scratch(self, box: Box) -> int:
        return prod(self.shape) * self.parts[-1].dtype.itemsize


@dataclass(frozen=True, slots=True)
class WeightNorm:
    """g · v / ‖v‖, the norm over all axes but `axis` (torch.nn.utils.weight_norm)."""

    g: Tensor
    v: Tensor
    axis: int

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return (self.g, self.v)

    def regions(self, box: Box) -> list[tuple[Tensor, Box]]:
        def only_axis(t: Tensor) -> Box:
            return Box(
                tuple(box.start[a] if a == self.axis else 0 for a in range(t.ndim)),
                tuple(box.stop[a] if a == self.axis else n for a, n in enumerate(t.shape)),
            )

        return [(self.g, only_axis(self.g)), (self.v, only_axis(self.v))]

    def compute(self, box: Box, arrays: Sequence[Array]) -> Array:
        g, v = arrays
        wide = v.astype(np.float32) if v.itemsize < 4 else v
        others = tuple(a for a in range(v.ndim) if a != self.axis)
        norm = np.sqrt(np.sum(wide * wide, axis=others, keepdims=True))
        out = (wide * (g.astype(wide.dtype) / norm)).astype(v.dtype)
        inside = tuple(
            slice(None) if a == self.axis else slice(box.start[a], box.stop[a]) for a in range(v.ndim)
        )
        result: Array = out[inside]
        return result

    def scratch(self, box: Box) -> int:
        rows = box.stop[self.axis] - box.start[self.axis]
        return 12 * rows * prod(n for a, n in enumerate(self.v.shape) if a != self.axis)


@dataclass(frozen=True, slots=True)
class Lora:
    """W + scaling · B A (PEFT): A is [rank, in], B [out, rank]; `transposed` for weights stored [in, out].

    With `magnitude` (DoRA): m · V / ‖V‖ per output row, V = W + scaling · B A.
    """

    base: Tensor
    a: Tensor
    b: Tensor
    scaling: float
    transposed: bool = False
    magnitude: Tensor | None = None

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return (self.base, self.a, self.b) + (() if self.magnitude is None else (self.magnitude,))

    def regions(self, box: Box) -> list[tuple[Tensor, Box]]:
        out_axis = 1 if self.transposed else 0
        in_axis = 1 - out_axis
        rows = (box.start[out_axis], box.stop[out_axis])
        columns = (box.start[in_axis], box.stop[in_axis])
        base = box
        if self.magnitude is not None:  # the norm of a row needs the whole row
            columns = (0, self.base.shape[in_axis])
            start, stop = [0, 0], [0, 0]
            start[out_axis], stop[out_axis] = rows
            start[in_axis], stop[in_axis] = columns
            base = Box(tuple(start), tuple(stop))
        rank = self.a.shape[0]
        regions = [
            (self.base, base),
            (self.a, Box((0, columns[0]), (rank, columns[1]))),
            (self.b, Box((rows[0], 0), (rows[1], rank))),
        ]
        if self.magnitude is not None:
            regions.append((self.magnitude, Box((rows[0],), (rows[1],))))
        return regions

    def compute(self, box: Box, arrays: Sequence[Array]) -> Array:
        base, a, b = (x.astype(np.float32) if x.itemsize < 4 else x for x in arrays[:3])
        delta = (b @ a) * base.dtype.type(self.scaling)
        merged = base + (delta.T if self.transposed else delta)
        if self.magnitude is not None:
            out_axis = 1 if self.transposed else 0
            norm = np.sqrt(np.sum(merged * merged, axis=1 - out_axis, keepdims=True))
            m = arrays[3].astype(merged.dtype)
            merged = merged * ((m[None, :] if self.transposed else m[:, None]) / norm)
            in_axis = 1 - out_axis
            inside: list[Any] = [slice(None), slice(None)]
            inside[in_axis] = slice(box.start[in_axis], box.stop[in_axis])
            merged = merged[tuple(inside)]
        result: Array = merged.astype(arrays[0].dtype)
        return result

    def scratch(self, box: Box) -> int:
        wide = self.base.size // max(1, self.base.shape[0]) if self.magnitude is not None else 0
        return 16 * max(box.volume, (box.stop[0] - box.start[0]) * wide)


TRANSFORMS_MOMENTS = (Slice, Concat, Reshape, Permute)
"""Operations that move elements and so apply to a weight's moments and master as they do to the weight."""


def slice_tensor(t: Tensor, box: Box) -> Tensor:
    """A box of a tensor as a tensor."""
    if box == whole(t.shape):
        return t
    return Tensor(t.dtype, box.shape, op=Slice(t, box.start, (1,) * t.ndim))


def concat(parts: Sequence[Tensor], axis: int) -> Tensor:
    """Tensors of one dtype joined along an axis; their other axes must agree."""
    if len(parts) == 1:
        return parts[0]
    first = parts[0]
    for part in parts[1:]:
        if part.dtype != first.dtype or part.ndim != first.ndim or any(
            m != n for a, (m, n) in enumerate(zip(part.shape, first.shape, strict=True)) if a != axis
        ):
            raise UsageError(f"can't join {first!r} and {part!r} along axis {axis}")
    shape = tuple(sum(p.shape[a] for p in parts) if a == axis else n for a, n in enumerate(first.shape))
    return Tensor(first.dtype, shape, op=Concat(tuple(parts), axis))


def reshape(t: Tensor, shape: Shape) -> Tensor:
    """The same elements under another shape of as many elements."""
    if prod(shape) != t.size:
        raise UsageError(f"can't shape {t!r} as {list(shape)}")
    if shape == t.shape:
        return t
    if t.op is None and len(t.pieces) == 1 and t.dtype.block == 1:
        piece = t.pieces[0]  # stored in C order, it is stored so under any shape
        in_order = piece.strides is None and piece.box in (None, whole(t.shape))
        if in_order and not isinstance(piece.source, Foreign):
            return Tensor(t.dtype, shape, (Piece(piece.source),))
    return Tensor(t.dtype, shape, op=Reshape(t, shape))


def permute(t: Tensor, axes: Shape) -> Tensor:
    """Axes in another order, as numpy's transpose takes them."""
    if axes == tuple(range(t.ndim)):
        return t
    return Tensor(t.dtype, tuple(t.shape[a] for a in axes), op=Permute(t, axes))


def cast(t: Tensor, dtype: DType) -> Tensor:
    """Values in another dtype. Raises UsageError for types whose values numpy does not know."""
    if t.dtype == dtype:
        return t
    for d in (t.dtype, dtype):
        if not d.numpy or d.kind == "quantized":
            raise UsageError(f"values of dtype {d.name} can't be cast")
    return Tensor(dtype, t.shape, op=Cast(t, dtype))


def bitcast(t: Tensor, name: str) -> Tensor:
    """The same bytes under another dtype of the same item size."""
    return Tensor(DTYPES[name], t.shape, op=Bitcast(t, DTYPES[name]))


def index_tensor(t: Tensor, index: int | slice | tuple[int | slice, ...]) -> Tensor:
    """numpy's basic indexing, lazily. Raises UsageError for an index out of range or a step below 1."""
    items = list(index) if isinstance(index, tuple) else [index]
    if len(items) > t.ndim:
        raise UsageError(f"{len(items)} indices for a tensor of {t.ndim} axes")
    items += [slice(None)] * (t.ndim - len(items))
    start, step, shape, kept = [], [], [], []
    for item, n in zip(items, t.shape, strict=True):
        if isinstance(item, slice):
            a, b, k = item.indices(n)
            if k < 1:
                raise UsageError("a slice of a tensor needs a positive step")
            start.append(a)
            step.append(k)
            shape.append(max(0, -(-(b - a) // k)))
            kept.append(shape[-1])
        else:
            if not -n <= item < n:
                raise UsageError(f"index {item} is out of range for an axis of {n}")
            start.append(item % n)
            step.append(1)
            shape.append(1)
    if not prod(shape):
        return Tensor(t.dtype, tuple(kept))
    part = Tensor(t.dtype, tuple(shape), op=Slice(t, tuple(start), tuple(step)))
    return reshape(part, tuple(kept))
