"""Fill arrays from tensor descriptions: the only code that turns sources into elements.

Reads are large and sequential where the layout allows it: a box is cut along its largest stride until what lies
between its first and last element is worth reading in one go, then scattered in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from anyckpt.core.box import Box, Shape, c_strides, intersect, whole
from anyckpt.core.dtypes import DTYPES
from anyckpt.core.source import Absent, Fill, Foreign, Inline, Source, Span
from anyckpt.core.tensor import Piece, Tensor, stored_shape
from anyckpt.finding import fail

if TYPE_CHECKING:
    from anyckpt.core.tensor import Array

BLOCK = 8 << 20  # bytes read at once when elements are scattered
SMALL = 256 << 10  # a gap this small costs less to read over than another system call
SPARSE = 8  # read over gaps while at least one element in so many is wanted

_RAW: dict[int, np.dtype[Any]] = {np.dtype(kind).itemsize: np.dtype(kind) for kind in ("u1", "u2", "u4", "u8", "c16")}


def read_box(tensor: Tensor, box: Box) -> Array:
    """The elements of `box` as an array of its shape, C order.

    The array has the tensor's numpy dtype; packed types give their bytes (`stored_shape`). Raises CheckpointError where
    bytes are missing, cut short or were never saved.
    """
    if tensor.op is not None and tensor.dtype.block == 1 and not box.volume:
        return np.empty(box.shape, tensor.dtype.numpy_dtype())  # no input has a region to ask for
    if tensor.op is not None:
        arrays = [read_box(source, region) for source, region in tensor.op.regions(box)]
        return tensor.op.compute(box, arrays)
    if tensor.dtype.block > 1:
        tensor, box = as_bytes(tensor, box)
    dtype = tensor.dtype
    raw = _RAW.get(dtype.itemsize, np.dtype(f"V{dtype.itemsize}"))
    out = np.empty(box.shape, raw)
    if out.size:
        held = 0
        for piece in tensor.pieces:
            held += _read_piece(piece, tensor.shape, box, out, dtype.itemsize)
        if held < out.size:
            missing = out.size - held
            raise fail("offset-hole", f"{missing:,} elements of a tensor of shape {list(tensor.shape)} are in no piece")
    array: Array = out.view(dtype.numpy_dtype())
    return array


def as_bytes(tensor: Tensor, box: Box) -> tuple[Tensor, Box]:
    """A packed tensor made of pieces as the uint8 tensor of its blocks, with `box` in bytes.

    Where rows are not whole blocks only the whole tensor can be read, as one flat run of bytes.
    """
    dtype, last = tensor.dtype, tensor.shape[-1] if tensor.shape else 1
    u8 = DTYPES["uint8"]

    def scaled(b: Box) -> Box:
        if any(edge % dtype.block for edge in (b.start[-1], b.stop[-1])):
            raise fail("offset-unaligned", f"a box of a {dtype.name} tensor begins inside a block of {dtype.block}")
        lead = dtype.itemsize
        return Box(
            (*b.start[:-1], b.start[-1] // dtype.block * lead), (*b.stop[:-1], b.stop[-1] // dtype.block * lead)
        )

    if tensor.shape and last % dtype.block == 0:
        pieces = tuple(Piece(p.source, None if p.box is None else scaled(p.box)) for p in tensor.pieces)
        return Tensor(u8, stored_shape(dtype, tensor.shape), pieces), scaled(box)
    if box != whole(tensor.shape) or any(p.box is not None for p in tensor.pieces):
        raise fail("unsupported", f"part of a {dtype.name} tensor whose rows are not whole blocks")
    shape = (dtype.nbytes(tensor.size),)
    return Tensor(u8, shape, tensor.pieces), whole(shape)


def _read_piece(piece: Piece, shape: Shape, box: Box, out: Array, itemsize: int) -> int:
    """Copy what `piece` holds of `box` into `out`; returns how many elements that was."""
    held = piece.box or whole(shape)
    common = intersect(held, box) if shape else box
    if common is None:
        return 0
    target = out[common.shifted(box.start, -1).slices()] if shape else out
    local = common.shifted(held.start, -1)
    source = piece.source
    if isinstance(source, Foreign):
        target[...] = np.ascontiguousarray(source.read(local)).view(out.dtype)
    elif isinstance(source, Fill):
        target[...] = np.frombuffer(source.element, out.dtype)[0]
    else:
        strides = piece.strides or c_strides(held.shape)
        base = sum(i * s for i, s in zip(local.start, strides, strict=True))
        _gather(_reader(source), base, strides, target, itemsize)
    return common.volume


ReadInto = Callable[[int, "memoryview"], None]


def _reader(source: Source) -> ReadInto:
    """A function that fills a buffer from a byte offset of `source`."""
    if isinstance(source, Span):
        span = source

        def from_file(offset: int, buffer: memoryview) -> None:
            if offset + len(buffer) > span.length:
                raise fail(
                    "offset-out-of-bounds",
                    f"bytes {offset:,}-{offset + len(buffer):,} are wanted of a record of {span.length:,}",
                    where=span.file.name,
                )
            span.file.readinto(span.offset + offset, buffer)
            if span.swap > 1:
                np.frombuffer(buffer, f"u{span.swap}").byteswap(inplace=True)

        return from_file
    if isinstance(source, Inline):
        data = memoryview(source.data)

        def from_memory(offset: int, buffer: memoryview) -> None:
            buffer[:] = data[offset : offset + len(buffer)]

        return from_memory
    if isinstance(source, Absent):
        raise fail("missing-record", f"the values were never saved: {source.why}")
    raise TypeError(type(source))


def _gather(read: ReadInto, base: int, strides: Shape, out: Array, itemsize: int) -> None:
    """Fill `out` with the elements at `base + dot(index, strides)`; `base` and strides count elements."""
    extent, wanted = 1, 1
    for n, stride in zip(out.shape, strides, strict=True):
        extent += (n - 1) * stride
        wanted *= n if stride else 1
    if out.flags.c_contiguous and extent == wanted == out.size and _is_c_order(out.shape, strides):
        read(base * itemsize, out.reshape(-1).view(np.uint8).data)
        return
    n_bytes = extent * itemsize
    if n_bytes <= SMALL or (n_bytes <= BLOCK and extent <= SPARSE * wanted):
        buffer = np.empty(n_bytes, np.uint8)
        read(base * itemsize, buffer.data)
        view = buffer.view(out.dtype)
        steps = tuple(s * itemsize for s in strides)
        out[...] = np.lib.stride_tricks.as_strided(view, out.shape, steps)
        return
    axis = max((a for a in range(out.ndim) if out.shape[a] > 1 and strides[a]), key=lambda a: strides[a])
    stride = strides[axis]
    inner = extent - (out.shape[axis] - 1) * stride
    dense = stride <= SPARSE * prod(n for a, n in enumerate(out.shape) if a != axis and strides[a])
    step = max(1, (BLOCK // itemsize - inner) // stride) if dense else 1
    if step >= out.shape[axis]:
        step = max(1, out.shape[axis] // 2)
    index: list[Any] = [slice(None)] * out.ndim
    for i in range(0, out.shape[axis], step):
        index[axis] = slice(i, i + step)
        _gather(read, base + i * stride, strides, out[tuple(index)], itemsize)


def _is_c_order(shape: Shape, strides: Shape) -> bool:
    expected = 1
    for n, stride in zip(reversed(shape), reversed(strides), strict=True):
        if n != 1 and stride != expected:
            return False
        expected *= n
    return True
