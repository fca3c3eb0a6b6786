"""The plan of a write: for every file to be, which bytes come from where. Made from headers only.

    FileLayout (what should stand where)  ──lower──>  FilePlan (literals, copies, fills, computes in tasks)

Tasks are what threads take: about `TASK_BYTES` of consecutive output each. The plan's digest names the job: a killed
one is taken up again only where it is the same.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from math import prod

from anyckpt.core.box import Box
from anyckpt.core.layout import Checksum, FileLayout, Part
from anyckpt.core.ops import Concat, Reshape
from anyckpt.core.source import File, Fill, Inline, Span
from anyckpt.core.tensor import Tensor
from anyckpt.plan.lower import compute_boxes, memory_needed, stored_runs, stored_whole

TASK_BYTES = 16 << 20
TASK_SEGMENTS = 2048
COMPUTE_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Literal:
    """Bytes known now: headers, indexes, configs."""

    offset: int
    data: bytes

    @property
    def length(self) -> int:
        return len(self.data)


@dataclass(frozen=True, slots=True)
class Copy:
    """Stored bytes taken as they lie."""

    offset: int
    source: Span

    @property
    def length(self) -> int:
        return self.source.length


@dataclass(frozen=True, slots=True)
class Repeat:
    """One element's bytes, over and over."""

    offset: int
    source: Fill

    @property
    def length(self) -> int:
        return self.source.length


@dataclass(frozen=True, slots=True)
class Compute:
    """A box of a tensor, contiguous in the output, that has to be put together or transformed in memory."""

    offset: int
    length: int
    tensor: Tensor
    box: Box


Segment = Literal | Copy | Repeat | Compute


@dataclass(frozen=True, slots=True)
class Task:
    """Consecutive segments of one file that one thread does in one go."""

    file: int
    segments: tuple[Segment, ...]
    n_bytes: int


@dataclass(frozen=True, slots=True)
class FilePlan:
    """One file to be. `checksums` are filled in once the bytes that they cover are known."""

    name: str
    size: int
    checksums: tuple[Checksum, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """All files, all tasks in order, and what they cost.

    `bytes_out` is the exact size of the result, `bytes_in` what is read for it; `peak_bytes` bounds the memory that
    tensors take while it runs, `jobs` threads at once.
    """

    files: tuple[FilePlan, ...]
    tasks: tuple[Task, ...]
    bytes_in: int
    bytes_out: int
    peak_bytes: int
    jobs: int
    digest: str


def make_plan(layouts: Sequence[FileLayout], *, max_memory: int, jobs: int) -> Plan:
    """Lower layouts to tasks within `max_memory` bytes shared by `jobs` threads.

    Raises Refused where one tensor cannot be computed within the budget, CheckpointError where bytes were never saved.
    """
    share = max_memory // jobs
    tasks: list[Task] = []
    digest = hashlib.sha256()
    bytes_in = peak = 0
    for i, layout in enumerate(layouts):
        digest.update(f"{layout.name}\0{layout.size}\0".encode("utf-8", "surrogateescape"))
        batch: list[Segment] = []
        n_bytes = 0
        for segment in _coalesced(_segments(layout, share)):
            _describe(digest, segment)
            if isinstance(segment, Copy):
                bytes_in += segment.length
            elif isinstance(segment, Compute):
                bytes_in += _bytes_read(segment.tensor, segment.box)
                peak = max(peak, memory_needed(segment.tensor, segment.box))
            for part in _split(segment):
                batch.append(part)
                n_bytes += part.length
                # smaller where there is work to do, so that no thread is left with the last long one
                enough = COMPUTE_BYTES // 2 if isinstance(part, Compute) else TASK_BYTES
                if n_bytes >= enough or len(batch) >= TASK_SEGMENTS:
                    tasks.append(Task(i, tuple(batch), n_bytes))
                    batch, n_bytes = [], 0
        if batch:
            tasks.append(Task(i, tuple(batch), n_bytes))
    files = tuple(FilePlan(layout.name, layout.size, layout.checksums) for layout in layouts)
    bytes_out = sum(layout.size for layout in layouts)
    return Plan(files, tuple(tasks), bytes_in, bytes_out, peak * jobs, jobs, digest.hexdigest())


def _segments(layout: FileLayout, share: int) -> Iterator[Segment]:
    at = 0
    for part in layout.parts:
        if part.offset < at or part.offset + part.length > layout.size:
            raise AssertionError(f"{layout.name}: a part at {part.offset} overlaps its neighbour or the end")
        at = part.offset + part.length
        content = part.content
        if isinstance(content, Tensor):
            source = stored_whole(content)
            if source is not None and source.length == part.length:
                yield Copy(part.offset, source)
            else:
                yield from _tensor_segments(part, content, share)
        elif isinstance(content, Span):
            yield Copy(part.offset, content)
        elif content:
            yield Literal(part.offset, content)


def _tensor_segments(part: Part, tensor: Tensor, share: int) -> Iterator[Segment]:
    if tensor.nbytes != part.length:
        raise AssertionError(f"{tensor!r} takes {tensor.nbytes} bytes, its part {part.length}")
    offset = part.offset
    stored = stored_runs(tensor)
    if stored is not None:
        for source in stored:
            if isinstance(source, Span):
                yield Copy(offset, source)
            elif isinstance(source, Inline):
                yield Literal(offset, source.data)
            else:
                yield Repeat(offset, source)
            offset += source.length
        return
    parts = list(_in_order(tensor))
    if len(parts) > 1:  # most of a flat buffer is stored runs, though some of it has to be put together
        for inner in parts:
            yield from _tensor_segments(Part(offset, inner.nbytes, inner), inner, share)
            offset += inner.nbytes
        return
    tensor = parts[0]
    for box in compute_boxes(tensor, share, COMPUTE_BYTES):
        length = _box_bytes(tensor, box)
        yield Compute(offset, length, tensor, box)
        offset += length


def _in_order(tensor: Tensor) -> Iterator[Tensor]:
    """Tensors whose bytes in C order, one after the other, are those of `tensor`."""
    while isinstance(tensor.op, Reshape) and tensor.dtype.block == 1:
        tensor = tensor.op.input
    op = tensor.op
    if isinstance(op, Concat) and tensor.dtype.block == 1 and prod(tensor.shape[: op.axis]) == 1:
        for part in op.parts:
            if part.size:
                yield from _in_order(part)
    else:
        yield tensor


def _box_bytes(tensor: Tensor, box: Box) -> int:
    return tensor.dtype.nbytes(box.volume)


def _coalesced(segments: Iterator[Segment]) -> Iterator[Segment]:
    """Join copies that are neighbours in the source and in the output."""
    file: File | None = None
    offset = begin = length = 0  # of the run so far: where it goes, where it comes from, how long it is
    for segment in segments:
        if isinstance(segment, Copy):
            source = segment.source
            if source.file is file and source.offset == begin + length and segment.offset == offset + length:
                length += source.length
                continue
            if file is not None:
                yield Copy(offset, Span(file, begin, length))
            file, offset, begin, length = source.file, segment.offset, source.offset, source.length
            continue
        if file is not None:
            yield Copy(offset, Span(file, begin, length))
            file = None
        yield segment
    if file is not None:
        yield Copy(offset, Span(file, begin, length))


def _split(segment: Segment) -> Iterator[Segment]:
    """Cut long copies and fills so that threads share them and progress moves."""
    if segment.length <= TASK_BYTES or isinstance(segment, Literal | Compute):
        yield segment
        return
    for at in range(0, segment.length, TASK_BYTES):
        n = min(TASK_BYTES, segment.length - at)
        if isinstance(segment, Copy):
            yield Copy(segment.offset + at, Span(segment.source.file, segment.source.offset + at, n))
        else:
            yield Repeat(segment.offset + at, Fill(segment.source.element, n))


def _bytes_read(tensor: Tensor, box: Box) -> int:
    if tensor.op is None:
        return _box_bytes(tensor, box)
    return sum(_bytes_read(t, b) for t, b in tensor.op.regions(box))


def _describe(digest: hashlib._Hash, segment: Segment) -> None:
    if isinstance(segment, Copy):
        source = segment.source
        digest.update(f"c{segment.offset},{source.offset},{source.length},".encode())
        digest.update(_identity(source))
    elif isinstance(segment, Literal):
        digest.update(f"l{segment.offset},{segment.length},".encode())
        digest.update(segment.data)
    elif isinstance(segment, Repeat):
        digest.update(f"r{segment.offset},{segment.length},".encode())
        digest.update(segment.source.element)
    else:
        digest.update(f"t{segment.offset},{segment.length},{segment.box},".encode())
        _describe_tensor(digest, segment.tensor)


def _describe_tensor(digest: hashlib._Hash, tensor: Tensor) -> None:
    digest.update(f"{tensor.dtype.name}{tensor.shape}".encode())
    for piece in tensor.pieces:
        digest.update(f"{piece.box}{piece.strides}".encode())
        if isinstance(piece.source, Span):
            digest.update(f"{piece.source.offset},{piece.source.length}".encode())
            digest.update(_identity(piece.source))
        elif isinstance(piece.source, Inline):
            digest.update(piece.source.data)
        elif isinstance(piece.source, Fill):
            digest.update(piece.source.element)
        else:  # Foreign: nothing tells whether it still gives the same values, so such a job starts afresh
            digest.update(os.urandom(16))
    if tensor.op is not None:
        digest.update(type(tensor.op).__name__.encode())
        for field in fields(tensor.op):  # type: ignore[arg-type]
            value = getattr(tensor.op, field.name)
            for item in value if isinstance(value, tuple) else (value,):
                if isinstance(item, Tensor):
                    _describe_tensor(digest, item)
                else:
                    digest.update(repr(item).encode())


def _identity(span: Span) -> bytes:
    """What tells this state of the source from another: the local file's fingerprint where there is one."""
    place = span.file.on_disk()
    file = place[0] if place else span.file
    fingerprint = getattr(file, "fingerprint", None)
    return f"{file.name}\0{file.size}\0{fingerprint}".encode("utf-8", "surrogateescape")
