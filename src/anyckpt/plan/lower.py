"""Turn a tensor into what the runner does for it: byte ranges to copy as they lie, or boxes to compute.

A tensor whose C-order bytes are long runs of stored bytes is copied by the kernel. One whose runs are short, or whose
values change, is computed slab by slab: read in large ranges, scattered or transformed in memory, written.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from anyckpt.core import ops
from anyckpt.core.box import Box, runs, slabs, whole
from anyckpt.core.source import Absent, Fill, Foreign, Inline, Span
from anyckpt.core.tensor import Piece, Tensor
from anyckpt.errors import Refused
from anyckpt.finding import fail

MIN_RUN = 64 << 10  # bytes; shorter runs cost more as system calls than as memory copies

Stored = Span | Inline | Fill


def stored_whole(tensor: Tensor) -> Span | None:
    """The one byte range that holds the tensor as it is to be, where that can be told at a glance: the usual case."""
    if tensor.op is not None or len(tensor.pieces) != 1:
        return None
    piece = tensor.pieces[0]
    source = piece.source
    if isinstance(source, Span) and source.swap <= 1 and piece.box is None and piece.strides is None:
        return source
    return None


def stored_runs(tensor: Tensor) -> list[Stored] | None:
    """The tensor's C-order bytes as stored byte ranges in order; None where they have to be computed.

    Raises CheckpointError [missing-record] for bytes that were never saved.
    """
    if tensor.dtype.block > 1:
        return _packed(tensor)
    out: list[Stored] = []
    return out if _lower(tensor, 0, tensor.size, out) else None


def _packed(tensor: Tensor) -> list[Stored] | None:
    """Packed types are copied only where one piece holds the whole tensor."""
    if tensor.op is None and len(tensor.pieces) == 1:
        source = tensor.pieces[0].source
        if isinstance(source, Span | Inline | Fill) and tensor.pieces[0].strides is None:
            return None if isinstance(source, Span) and source.swap > 1 else [source]
    return None


def _lower(tensor: Tensor, start: int, stop: int, out: list[Stored]) -> bool:
    """Append the stored ranges of elements [start, stop) to `out`; False where some have to be computed."""
    if start >= stop:
        return True
    itemsize = tensor.dtype.itemsize
    op = tensor.op
    if op is None:
        if len(tensor.pieces) == 1 and tensor.pieces[0].box in (None, whole(tensor.shape)):
            return _from_piece(tensor.pieces[0], tensor.shape, start, stop, itemsize, out)
        return _from_pieces(tensor, start, stop, out)
    if isinstance(op, ops.Reshape | ops.Bitcast):
        return _lower(op.input, start, stop, out)
    if isinstance(op, ops.Slice):
        box = op.regions(whole(tensor.shape))[0][1]
        if any(k != 1 for k in op.step):
            return False
        return _walk(runs(box, op.input.shape), op.input, start, stop, itemsize, out)
    if isinstance(op, ops.Concat):
        return _from_concat(op, tensor, start, stop, out)
    return False


def _walk(
    found: Iterator[tuple[int, int]], source: Tensor, start: int, stop: int, itemsize: int, out: list[Stored]
) -> bool:
    """Lower those runs of `source` that make up [start, stop) of their concatenation."""
    at = 0
    for first, length in found:
        a, b = max(start, at), min(stop, at + length)
        if a < b:
            if length * itemsize < MIN_RUN and b - a < stop - start:
                return False
            if not _lower(source, first + a - at, first + b - at, out):
                return False
        at += length
        if at >= stop:
            break
    return True


def _from_concat(op: ops.Concat, tensor: Tensor, start: int, stop: int, out: list[Stored]) -> bool:
    rows = prod(tensor.shape[: op.axis])
    widths = [prod(part.shape[op.axis :]) for part in op.parts]
    if rows > 1 and min(widths, default=0) * tensor.dtype.itemsize < MIN_RUN:
        return False
    at = 0
    for row in range(rows):
        for part, width in zip(op.parts, widths, strict=True):
            a, b = max(start, at), min(stop, at + width)
            if a < b and not _lower(part, row * width + a - at, row * width + b - at, out):
                return False
            at += width
    return True


def _from_piece(
    piece: Piece, shape: tuple[int, ...], start: int, stop: int, itemsize: int, out: list[Stored]
) -> bool:
    source = piece.source
    if isinstance(source, Absent):
        raise fail("missing-record", f"the values were never saved: {source.why}")
    if isinstance(source, Foreign) or (isinstance(source, Span) and source.swap > 1):
        return False
    if piece.strides is not None and not isinstance(source, Fill):
        expected = 1
        for n, stride in zip(reversed(shape), reversed(piece.strides), strict=True):
            if n != 1 and stride != expected:
                return False
            expected *= n
    offset, length = start * itemsize, (stop - start) * itemsize
    if isinstance(source, Span):
        if offset + length > source.length:
            raise fail(
                "offset-out-of-bounds",
                f"bytes {offset:,}-{offset + length:,} are wanted of a record of {source.length:,}",
                where=source.file.name,
            )
        out.append(Span(source.file, source.offset + offset, length))
    elif isinstance(source, Inline):
        out.append(Inline(source.data[offset : offset + length]))
    else:
        out.append(Fill(source.element, length))
    return True


def _from_pieces(tensor: Tensor, start: int, stop: int, out: list[Stored]) -> bool:
    """Pieces with boxes: their runs in C order, which must follow each other without a gap."""
    itemsize = tensor.dtype.itemsize
    found: list[tuple[int, int, int, int]] = []  # first element, length, piece, first element inside the piece
    for i, piece in enumerate(tensor.pieces):
        box = piece.box or whole(tensor.shape)
        inside = 0
        for first, length in runs(box, tensor.shape):
            if length * itemsize < MIN_RUN and length < box.volume:
                return False
            if first < stop and first + length > start:
                found.append((first, length, i, inside))
            inside += length
    found.sort()
    at = start
    for first, length, i, inside in found:
        if first > at:
            return False  # a hole: reading says so, with its size
        a, b = at, min(stop, first + length)
        if a < b:
            piece = tensor.pieces[i]
            shape = (piece.box or whole(tensor.shape)).shape
            if not _from_piece(piece, shape, inside + a - first, inside + b - first, itemsize, out):
                return False
            at = b
    return at >= stop


def memory_needed(tensor: Tensor, box: Box) -> int:
    """Bytes that computing `box` takes at its worst: the result, all inputs, and what the operations allocate."""
    own = box.volume * max(1, tensor.dtype.itemsize // tensor.dtype.block)
    if tensor.op is None:
        return 2 * own
    return own + tensor.op.scratch(box) + sum(memory_needed(t, b) for t, b in tensor.op.regions(box))


def compute_boxes(tensor: Tensor, budget: int, target_bytes: int) -> list[Box]:
    """Cut a tensor into boxes, each contiguous in C order and computable within `budget` bytes.

    Boxes aim at `target_bytes` of output. Raises Refused where even one row needs more than the budget.
    """
    if tensor.dtype.block > 1:
        return _block_boxes(tensor, budget, target_bytes)
    elements = max(1, min(target_bytes, budget // 2) // tensor.dtype.itemsize)
    while (first := next(slabs(tensor.shape, elements), None)) is not None:
        need = memory_needed(tensor, first)  # the first slab is the largest
        if need <= budget:
            return list(slabs(tensor.shape, elements))
        if first.volume == 1:
            raise _too_large(tensor, need, budget)
        elements = first.volume // 2
    return []


def _block_boxes(tensor: Tensor, budget: int, target_bytes: int) -> list[Box]:
    """Rows of whole blocks; a tensor whose rows are not whole blocks goes in one piece."""
    shape, block = tensor.shape, tensor.dtype.block
    if not shape or shape[-1] % block or len(shape) == 1:
        boxes = [whole(shape)]
    else:
        per_row = tensor.dtype.nbytes(shape[-1])
        rows = max(1, target_bytes // max(1, per_row))
        boxes = [Box((*b.start, 0), (*b.stop, shape[-1])) for b in slabs(shape[:-1], rows)]
    need = max((memory_needed(tensor, box) for box in boxes[:1]), default=0)
    if need > budget:
        if len(boxes) > 1 and target_bytes > 1:
            return _block_boxes(tensor, budget, target_bytes // 2)
        raise _too_large(tensor, need, budget)
    return boxes


def _too_large(tensor: Tensor, need: int, budget: int) -> Refused:
    return Refused(
        f"computing a tensor of shape {list(tensor.shape)} needs {need:,} bytes at once, the budget allows {budget:,}",
        hint="give more with --max-memory, or fewer jobs with -j 1",
    )
