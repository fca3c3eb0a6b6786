"""Which byte ranges to read together: one large read and a scatter beat many small reads. Pure: no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Run:
    """One read: [offset, offset + length) serves the ranges with these indices, in order of their offsets."""

    offset: int
    length: int
    members: tuple[int, ...]


def coalesce(ranges: Sequence[tuple[int, int]], *, max_gap: int, max_length: int) -> list[Run]:
    """Group (offset, length) ranges of one file into runs, in order of offset; every range is whole in exactly one.

    Two neighbours are joined if at most `max_gap` unwanted bytes lie between them and the run stays within
    `max_length`. A single range beyond that is a run of its own: whoever reads it splits it.

    >>> coalesce([(100, 10), (0, 10), (12, 8)], max_gap=4, max_length=64)
    [Run(offset=0, length=20, members=(1, 2)), Run(offset=100, length=10, members=(0,))]
    """
    runs: list[Run] = []
    members: list[int] = []
    start = end = 0
    for index in sorted(range(len(ranges)), key=ranges.__getitem__):
        offset, length = ranges[index]
        if members and offset <= end + max_gap and max(end, offset + length) - start <= max_length:
            members.append(index)
            end = max(end, offset + length)
        else:
            if members:
                runs.append(Run(start, end - start, tuple(members)))
            members, start, end = [index], offset, offset + length
    if members:
        runs.append(Run(start, end - start, tuple(members)))
    return runs
