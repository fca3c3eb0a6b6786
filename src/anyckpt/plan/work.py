"""What one thread does with one task: move, repeat or compute bytes into an open file, or compare them with it.

Nothing here decides anything; the plan has. CRC-32s ride along where the file to be needs them.
"""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Iterator, Sequence

import numpy as np

from anyckpt.core.read import read_box
from anyckpt.core.source import File, Span
from anyckpt.finding import fail
from anyckpt.io import sink
from anyckpt.plan.plan import Compute, Copy, Literal, Repeat, Segment, Task

BUFFER = 1 << 20  # bytes a thread holds while it moves data through memory
GATHER = 256 << 10  # consecutive segments below this size are put together and written at once

_local = threading.local()


def _buffer() -> memoryview:
    """This thread's reusable buffer."""
    held: memoryview | None = getattr(_local, "buffer", None)
    if held is None:
        held = _local.buffer = memoryview(bytearray(BUFFER))
    return held


Crc = tuple[int, int, int]  # offset, CRC-32, length


def write_task(task: Task, fd: int, with_crc: bool) -> list[Crc]:
    """Write the task's segments to `fd`; returns the CRC-32 of each written range where `with_crc`, in order.

    Raises CheckpointError where a source is cut short, OSError where the destination fails.
    """
    crcs: list[Crc] = []
    for group in _groups(task.segments):
        if len(group) > 1:
            _write_gathered(group, fd, with_crc, crcs)
        else:
            _write_one(group[0], fd, with_crc, crcs)
    return crcs


def _groups(segments: tuple[Segment, ...]) -> Iterator[list[Segment]]:
    """Consecutive small segments together, large ones alone."""
    group: list[Segment] = []
    n_bytes = 0
    for segment in segments:
        small = segment.length < GATHER and not isinstance(segment, Compute)
        follows = group and group[-1].offset + group[-1].length == segment.offset
        if group and not (small and follows and n_bytes + segment.length <= BUFFER):
            yield group
            group, n_bytes = [], 0
        if not small:
            yield [segment]
            continue
        group.append(segment)
        n_bytes += segment.length
    if group:
        yield group


def _write_gathered(group: list[Segment], fd: int, with_crc: bool, crcs: list[Crc]) -> None:
    buffer = _buffer()
    start = group[0].offset
    for segment in group:
        at = segment.offset - start
        _fill_buffer(segment, buffer[at : at + segment.length])
        if with_crc:
            crcs.append((segment.offset, zlib.crc32(buffer[at : at + segment.length]), segment.length))
    sink.write_at(fd, start, buffer[: group[-1].offset + group[-1].length - start])


def _fill_buffer(segment: Segment, view: memoryview) -> None:
    if isinstance(segment, Copy):
        segment.source.file.readinto(segment.source.offset, view)
    elif isinstance(segment, Literal):
        view[:] = segment.data
    elif isinstance(segment, Repeat):
        view[:] = _repeated(segment.source.element, 0, len(view))
    else:
        raise TypeError(type(segment))


def _write_one(segment: Segment, fd: int, with_crc: bool, crcs: list[Crc]) -> None:
    if isinstance(segment, Copy) and not with_crc and _kernel_copy(segment.source, fd, segment.offset):
        return
    crc = 0
    offset = segment.offset
    for chunk in chunks(segment):
        sink.write_at(fd, offset, chunk)
        if with_crc:
            crc = zlib.crc32(chunk, crc)
        offset += len(chunk)
    if with_crc:
        crcs.append((segment.offset, crc, segment.length))


def _kernel_copy(span: Span, fd: int, offset: int) -> bool:
    """Copy without passing through memory, where the bytes lie in a local file as they are."""
    place = span.file.on_disk()
    if place is None:
        return False
    file, base = place
    source = file.fileno()
    if source is None:
        return False
    sink.copy_range(source, base + span.offset, fd, offset, span.length)
    return True


def chunks(segment: Segment) -> Iterator[memoryview]:
    """The segment's bytes in order, in pieces of bounded size. A piece is valid until the next is asked for."""
    if isinstance(segment, Literal):
        yield memoryview(segment.data)
    elif isinstance(segment, Compute):
        array = read_box(segment.tensor, segment.box)
        yield np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    elif isinstance(segment, Copy):
        yield from _read_chunks(segment.source.file, segment.source.offset, segment.length)
    else:
        for at in range(0, segment.length, BUFFER):
            yield memoryview(_repeated(segment.source.element, at, min(BUFFER, segment.length - at)))


def _read_chunks(file: File, offset: int, length: int) -> Iterator[memoryview]:
    buffer = _buffer()
    for at in range(0, length, BUFFER):
        view = buffer[: min(BUFFER, length - at)]
        file.readinto(offset + at, view)
        yield view


def _repeated(element: bytes, start: int, length: int) -> bytes:
    """`length` bytes of `element` repeated, from byte `start` of the repetition on."""
    shift = start % len(element)
    n = -(-(shift + length) // len(element))
    return (element * n)[shift : shift + length]


def prove_task(task: Task, fd: int, name: str, patched: Sequence[tuple[int, int]] = ()) -> None:
    """Compare every byte of the task with what its sources give. Raises CheckpointError [inconsistent].

    `patched`: ranges of the file that were filled in later (checksums) and are not compared, in order.
    """
    for segment in task.segments:
        offset = segment.offset
        for chunk in chunks(segment):
            written = _read_back(fd, offset, len(chunk))
            if written != chunk and _without(written, offset, patched) != _without(bytes(chunk), offset, patched):
                raise fail(
                    "inconsistent",
                    f"what was written near byte {offset:,} is not what the source holds",
                    where=name,
                    hint="the disk or the memory of this machine may be faulty: run the same command again",
                )
            offset += len(chunk)


def _read_back(fd: int, offset: int, length: int) -> bytes:
    data = os.pread(fd, length, offset)
    while len(data) < length:
        more = os.pread(fd, length - len(data), offset + len(data))
        if not more:
            break
        data += more
    return data


def _without(data: bytes, offset: int, ranges: Sequence[tuple[int, int]]) -> bytes:
    """`data`, which lies at `offset`, with the bytes of `ranges` made zero."""
    out = bytearray(data)
    for start, stop in ranges:
        a, b = max(start - offset, 0), min(stop - offset, len(out))
        if a < b:
            out[a:b] = bytes(b - a)
    return bytes(out)
