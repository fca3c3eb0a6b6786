"""Coalescing: every range is whole in one run, runs are ordered and as few as the rules allow."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from anyckpt.io.ranges import coalesce

RANGES = st.lists(st.tuples(st.integers(0, 500), st.integers(0, 60)), max_size=30)


@given(RANGES, st.integers(0, 40), st.integers(0, 200))
def test_runs_serve_every_range_once(ranges: list[tuple[int, int]], max_gap: int, max_length: int) -> None:
    runs = coalesce(ranges, max_gap=max_gap, max_length=max_length)
    assert sorted(index for run in runs for index in run.members) == list(range(len(ranges)))
    for run in runs:
        members = [ranges[index] for index in run.members]
        assert run.offset == min(offset for offset, _ in members)
        assert run.offset + run.length == max(offset + length for offset, length in members)
        assert run.length <= max_length or len(members) == 1 or run.length == max(length for _, length in members)
        wanted = {byte for offset, length in members for byte in range(offset, offset + length)}
        assert run.length - len(wanted) <= max_gap * (len(members) - 1)
    for left, right in zip(runs, runs[1:], strict=False):
        first = ranges[right.members[0]]
        joined = max(left.offset + left.length, sum(first)) - left.offset
        assert first[0] > left.offset + left.length + max_gap or joined > max_length
