"""Flat buffers: parameters laid end to end in one buffer that ranks share. Arithmetic in elements; no files.

Two ways of sharing are in use, and both are a list of fragments for every rank:

    packed     the parameters are concatenated, padded, and the whole is cut into equal partitions
               |p0 p0 p0 a|p1 p1 . .|p2 p2 p2 p2 -|     a: after a parameter   -: at the end
               |---- rank 0 ----|---- rank 1 ------|
               DeepSpeed ZeRO-1/2 and BF16_Optimizer, FSDP1's FlatParameter, Megatron's distributed optimizer (a bucket)
    striped    every parameter is cut into equal parts, rank r's buffer is the r-th part of each, padded
               rank 0 |p0 p0|p1|p2 p2|   rank 1 |p0 -|p1|p2 p2|
               DeepSpeed ZeRO-3 (and the frozen parameters beside it)

`Layout` answers both questions: what rank r's buffer holds (`of_rank`), and where a parameter is (`of_parameter`).
`joined` and `buffer` turn the answers into tensors, lazily: copies and fills, nothing is read.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from anyckpt.core import ops
from anyckpt.core.box import Box, Shape, flat_start, run_length, whole
from anyckpt.core.source import Absent, Fill, Inline, Source, Span
from anyckpt.core.tensor import Piece, Tensor

Kind = Literal["packed", "striped"]


@dataclass(frozen=True, slots=True)
class Fragment:
    """`length` elements of a parameter from its flat index `start`, at `offset` of rank `rank`'s buffer."""

    rank: int
    parameter: int
    start: int
    length: int
    offset: int


@dataclass(frozen=True, slots=True)
class Layout:
    """How parameters of `sizes` elements lie in the buffers of `n_ranks` ranks.

    `offsets`: of a packed layout, where each parameter begins in the whole buffer; of a striped one, where its part
    begins in every rank's. `partition`: elements of one rank's buffer, padding included.
    """

    kind: Kind
    sizes: tuple[int, ...]
    n_ranks: int
    offsets: tuple[int, ...]
    partition: int

    def of_parameter(self, index: int) -> list[Fragment]:
        """The fragments of one parameter in the order of its elements; padding and empty ones are left out."""
        size, offset = self.sizes[index], self.offsets[index]
        if self.kind == "striped":
            part = self.part(index)
            return [
                Fragment(rank, index, rank * part, min(part, size - rank * part), offset)
                for rank in range(-(-size // part) if part else 0)
            ]
        found = []
        at = offset
        while at < offset + size:
            rank, inside = divmod(at, self.partition)
            length = min(offset + size - at, self.partition - inside)
            found.append(Fragment(rank, index, at - offset, length, inside))
            at += length
        return found

    def of_rank(self, rank: int) -> list[Fragment]:
        """What one rank's buffer holds, in the order of the buffer; what lies between is padding."""
        if self.kind == "striped":
            found = []
            for index, (size, offset) in enumerate(zip(self.sizes, self.offsets, strict=True)):
                part = self.part(index)
                length = min(part, size - rank * part)
                if length > 0:
                    found.append(Fragment(rank, index, rank * part, length, offset))
            return found
        low, high = rank * self.partition, (rank + 1) * self.partition
        first = max(0, bisect_right(self.offsets, low) - 1)
        found = []
        for index in range(first, bisect_left(self.offsets, high)):
            start = max(self.offsets[index], low)
            stop = min(self.offsets[index] + self.sizes[index], high)
            if start < stop:
                found.append(Fragment(rank, index, start - self.offsets[index], stop - start, start - low))
        return found

    def part(self, index: int) -> int:
        """Elements of one parameter on each rank of a striped layout, padding included."""
        return -(-self.sizes[index] // self.n_ranks)

    @property
    def used(self) -> int:
        """Elements up to the end of the last parameter: of the whole buffer if packed, of each rank's if striped."""
        if not self.sizes:
            return 0
        last = self.sizes[-1] if self.kind == "packed" else self.part(len(self.sizes) - 1)
        return self.offsets[-1] + last

    def padding(self, rank: int) -> int:
        """Elements of padding at the end of one rank's partition of a packed layout."""
        return min(max((rank + 1) * self.partition - self.used, 0), self.partition)


def packed(
    sizes: Sequence[int], n_ranks: int, *, gaps: Sequence[int] | None = None, multiple: int = 1
) -> Layout:
    """Concatenate, pad the whole to a multiple of `multiple` (of `n_ranks` at least), cut into equal partitions.

    `gaps[k]` elements of padding follow parameter k (`aligned_gaps` computes them from an alignment); those after the
    last count only where its buffer has them. `multiple` must be a multiple of `n_ranks`, or is taken times it.
    """
    multiple = multiple if multiple % n_ranks == 0 else multiple * n_ranks
    widths = [size + gap for size, gap in zip(sizes, gaps or [0] * len(sizes), strict=True)]
    ends = list(accumulate(widths))
    total = -(-(ends[-1] if ends else 0) // multiple) * multiple
    return Layout("packed", tuple(sizes), n_ranks, tuple([0, *ends][: len(sizes)]), total // n_ranks)


def striped(sizes: Sequence[int], n_ranks: int) -> Layout:
    """Cut every parameter into `n_ranks` equal parts, the last padded, and concatenate each rank's parts."""
    ends = list(accumulate(-(-size // n_ranks) for size in sizes))
    return Layout("striped", tuple(sizes), n_ranks, tuple([0, *ends][: len(sizes)]), ends[-1] if ends else 0)


def aligned_gaps(sizes: Sequence[int], alignment: int, *, last: bool = False) -> list[int]:
    """Padding after each parameter so that the next begins at a multiple of `alignment`; after the last if `last`."""
    gaps = [-size % alignment for size in sizes]
    if gaps and not last:
        gaps[-1] = 0
    return gaps


def sub_groups(sizes: Sequence[int], n_ranks: int, limit: int) -> list[range]:
    """Consecutive parameters whose parts on one rank reach `limit` elements: the unit of ZeRO-3's buffers.

    A group is closed as soon as it has reached the limit (DeepSpeed `stage3.py`, `_create_fp16_sub_groups`).
    """
    found: list[range] = []
    first = held = 0
    for index, size in enumerate(sizes):
        held += -(-size // n_ranks)
        if held >= limit or index == len(sizes) - 1:
            found.append(range(first, index + 1))
            first, held = index + 1, 0
    return found


def round_robin(n: int, n_ranks: int) -> list[int]:
    """Indices 0, R, 2R …, 1, R + 1 …: the order of `round_robin_gradients` (DeepSpeed `stage_1_and_2.py`)."""
    return [index for rank in range(min(n, n_ranks)) for index in range(rank, n, n_ranks)]


# -- tensors -------------------------------------------------------------------------------------------------------


def joined(layout: Layout, index: int, buffers: Callable[[int], Tensor], shape: Shape) -> Tensor:
    """One parameter of `shape` from the ranks' buffers; `buffers(rank)` is a tensor of one axis.

    Raises UsageError where a buffer is too short.
    """
    fragments = layout.of_parameter(index)
    pieces = _stored(fragments, buffers)
    if pieces is not None:
        return ops.reshape(Tensor(buffers(0).dtype, (layout.sizes[index],), pieces), shape)
    parts = [run(buffers(f.rank), f.offset, f.length) for f in fragments]
    return ops.reshape(concatenated(parts, buffers(0)), shape)


def _stored(fragments: Sequence[Fragment], buffers: Callable[[int], Tensor]) -> tuple[Piece, ...] | None:
    """The fragments as pieces where every buffer is one span of a file, else None.

    Made without the steps between, for there are as many fragments as ranks times parameters.
    """
    pieces = []
    for f in fragments:
        held = buffers(f.rank)
        if held.op is not None or len(held.pieces) != 1:
            return None
        source, itemsize = held.pieces[0].source, held.dtype.itemsize
        if not isinstance(source, Span) or held.pieces[0].strides is not None:
            return None
        offset, n_bytes = f.offset * itemsize, f.length * itemsize
        if offset + n_bytes > source.length or held.dtype.block > 1:
            return None
        span = Span(source.file, source.offset + offset, n_bytes, source.swap)
        pieces.append(Piece(span, None if len(fragments) == 1 else Box((f.start,), (f.start + f.length,))))
    return tuple(pieces)


def buffer(layout: Layout, rank: int, tensors: Sequence[Tensor], *, length: int | None = None) -> Tensor:
    """Rank `rank`'s buffer of one axis from whole parameters of any shapes, zeros for padding.

    `length`: cut the padding at its end short at so many elements (default: the whole partition).
    """
    dtype = tensors[0].dtype
    parts: list[Tensor] = []
    at = 0

    def pad(until: int) -> None:
        if until > at:
            n_bytes = (until - at) * dtype.itemsize
            parts.append(Tensor(dtype, (until - at,), (Piece(Fill(bytes(dtype.itemsize), n_bytes)),)))

    for fragment in layout.of_rank(rank):
        pad(fragment.offset)
        parts.append(run(tensors[fragment.parameter], fragment.start, fragment.length))
        at = fragment.offset + fragment.length
    pad(layout.partition if length is None else length)
    return concatenated(parts, tensors[0])


def concatenated(parts: Sequence[Tensor], like: Tensor) -> Tensor:
    """Tensors of one axis end to end, as pieces where they are stored; an empty one of `like`'s type for no parts."""
    if not parts:
        return Tensor(like.dtype, (0,))
    if len(parts) == 1:
        return parts[0]
    if all(part.op is None for part in parts):
        pieces: list[Piece] = []
        at = 0
        for part in parts:
            for piece in part.pieces:
                box = piece.box or whole(part.shape)
                pieces.append(Piece(piece.source, box.shifted((at,)), piece.strides))
            at += part.size
        return Tensor(parts[0].dtype, (at,), tuple(pieces))
    return ops.concat(parts, 0)


def run(tensor: Tensor, start: int, length: int) -> Tensor:
    """`length` consecutive elements of a tensor in C order, as a tensor of one axis.

    Stored bytes are pointed at where they lie, so that a buffer cut out of buffers is as flat as the first.
    """
    while isinstance(tensor.op, ops.Reshape):
        tensor = tensor.op.input
    if tensor.op is None and tensor.dtype.block == 1:
        pieces = _cut(tensor, start, start + length)
        if pieces is not None:
            return Tensor(tensor.dtype, (length,), pieces)
    flat = ops.reshape(tensor, (tensor.size,))
    return ops.slice_tensor(flat, Box((start,), (start + length,)))


def _cut(tensor: Tensor, start: int, stop: int) -> tuple[Piece, ...] | None:
    """The pieces of the elements [start, stop), where each piece is one run of them; None where one is not."""
    itemsize = tensor.dtype.itemsize
    found: list[Piece] = []
    for piece in tensor.pieces:
        box = piece.box or whole(tensor.shape)
        if run_length(box, tensor.shape) != box.volume or piece.strides is not None:
            return None
        first = flat_start(box, tensor.shape)
        low, high = max(start, first), min(stop, first + box.volume)
        if low >= high:
            continue
        source = _part(piece.source, (low - first) * itemsize, (high - low) * itemsize)
        if source is None:
            return None
        found.append(Piece(source, None if high - low == stop - start else Box((low - start,), (high - start,))))
    return tuple(found)


def _part(source: Source, offset: int, n_bytes: int) -> Source | None:
    """Consecutive bytes of a source; None for what does not lie in bytes, or does not reach so far."""
    if isinstance(source, Span):
        fits = offset + n_bytes <= source.length
        return Span(source.file, source.offset + offset, n_bytes, source.swap) if fits else None
    if isinstance(source, Inline):
        return Inline(source.data[offset : offset + n_bytes])
    if isinstance(source, Fill):
        return Fill(source.element, n_bytes)
    return Absent(n_bytes, source.why) if isinstance(source, Absent) else None
