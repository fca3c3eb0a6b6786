"""Flat buffers: what every rank holds and where every parameter is are two readings of one layout."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anyckpt.core.source import Fill
from anyckpt.core.tensor import from_array
from anyckpt.plan.lower import stored_runs
from anyckpt.sharding import flat

SIZES = st.lists(st.integers(0, 40), min_size=1, max_size=12)
RANKS = st.integers(1, 9)


@st.composite
def layouts(draw: st.DrawFn) -> flat.Layout:
    sizes, n_ranks = draw(SIZES), draw(RANKS)
    if draw(st.booleans()):
        return flat.striped(sizes, n_ranks)
    gaps = draw(st.one_of(st.none(), st.integers(1, 8).map(lambda a: flat.aligned_gaps(sizes, a))))
    return flat.packed(sizes, n_ranks, gaps=gaps, multiple=draw(st.integers(1, 16)))


@given(layouts())
def test_both_readings_give_the_same_fragments(layout: flat.Layout) -> None:
    by_rank = [f for rank in range(layout.n_ranks) for f in layout.of_rank(rank)]
    by_parameter = [f for index in range(len(layout.sizes)) for f in layout.of_parameter(index)]
    assert sorted(by_rank, key=repr) == sorted(by_parameter, key=repr)


@given(layouts())
def test_every_element_lies_in_exactly_one_place(layout: flat.Layout) -> None:
    places = set()
    for index, size in enumerate(layout.sizes):
        at = 0
        for fragment in layout.of_parameter(index):
            assert fragment.start == at and fragment.length > 0
            assert fragment.offset >= 0 and fragment.offset + fragment.length <= layout.partition
            at += fragment.length
            new = {(fragment.rank, fragment.offset + i) for i in range(fragment.length)}
            assert not places & new
            places |= new
        assert at == size


@settings(deadline=None)
@given(layouts(), st.data())
def test_what_was_cut_into_buffers_is_joined_to_the_same(layout: flat.Layout, data: st.DataObject) -> None:
    arrays = [np.arange(i * 100, i * 100 + n, dtype=np.float32) for i, n in enumerate(layout.sizes)]
    tensors = [from_array(a) for a in arrays]
    buffers = [flat.buffer(layout, rank, tensors) for rank in range(layout.n_ranks)]
    for made in buffers:
        assert made.shape == (layout.partition,)
    again = [from_array(b.numpy()) for b in buffers]
    for source in (buffers, again):
        for index, array in enumerate(arrays):
            got = flat.joined(layout, index, source.__getitem__, array.shape)
            np.testing.assert_array_equal(got.numpy(), array)
            if array.size:
                assert stored_runs(got) is not None, "a joined parameter is copied, not computed"


@given(SIZES, RANKS)
def test_a_packed_buffer_is_the_concatenation(sizes: list[int], n_ranks: int) -> None:
    layout = flat.packed(sizes, n_ranks, multiple=2 * n_ranks)
    tensors = [from_array(np.full(n, i + 1, np.int32)) for i, n in enumerate(sizes)]
    whole = np.concatenate([flat.buffer(layout, r, tensors).numpy() for r in range(n_ranks)])
    expected = np.concatenate([np.full(n, i + 1, np.int32) for i, n in enumerate(sizes)])
    assert whole.size % (2 * n_ranks) == 0 and whole.size - expected.size < 2 * n_ranks
    np.testing.assert_array_equal(whole[: expected.size], expected)
    assert not whole[expected.size :].any()
    assert sum(layout.padding(r) for r in range(n_ranks)) == whole.size - expected.size


@given(SIZES, RANKS)
def test_a_striped_buffer_is_every_parameter_s_part(sizes: list[int], n_ranks: int) -> None:
    layout = flat.striped(sizes, n_ranks)
    tensors = [from_array(np.arange(1, n + 1, dtype=np.int32)) for n in sizes]
    for rank in range(n_ranks):
        expected = []
        for n in sizes:
            part = -(-n // n_ranks)
            padded = np.zeros(part * n_ranks, np.int32)
            padded[:n] = np.arange(1, n + 1)
            expected.append(padded[rank * part : (rank + 1) * part])
        np.testing.assert_array_equal(flat.buffer(layout, rank, tensors).numpy(), np.concatenate(expected))


@given(SIZES, RANKS, st.integers(1, 60))
def test_sub_groups_are_closed_once_they_reach_the_limit(sizes: list[int], n_ranks: int, limit: int) -> None:
    groups = flat.sub_groups(sizes, n_ranks, limit)
    assert [i for group in groups for i in group] == list(range(len(sizes)))
    for group in groups:
        parts = [-(-sizes[i] // n_ranks) for i in group]
        assert sum(parts[:-1]) < limit or len(parts) == 1
        assert group is groups[-1] or sum(parts) >= limit


@given(st.integers(0, 50), RANKS)
def test_round_robin_is_a_permutation(n: int, n_ranks: int) -> None:
    order = flat.round_robin(n, n_ranks)
    assert sorted(order) == list(range(n))
    assert order[: -(-n // n_ranks)] == list(range(0, n, n_ranks))


@given(SIZES, st.integers(1, 16))
def test_aligned_parameters_begin_at_multiples(sizes: list[int], alignment: int) -> None:
    layout = flat.packed(sizes, 2, gaps=flat.aligned_gaps(sizes, alignment))
    assert all(offset % alignment == 0 for offset in layout.offsets)


def test_padding_is_a_fill_not_bytes() -> None:
    layout = flat.packed([3], 4, multiple=8)
    last = flat.buffer(layout, 3, [from_array(np.ones(3, np.float32))])
    assert isinstance(last.pieces[0].source, Fill)


def test_several_ranks_can_be_padding_alone() -> None:
    layout = flat.packed([3], 4, multiple=8)
    assert layout.partition == 2
    assert [layout.padding(r) for r in range(4)] == [0, 1, 2, 2]


@pytest.mark.parametrize("kind", ["packed", "striped"])
def test_no_parameters_make_empty_buffers(kind: str) -> None:
    layout = flat.packed([], 3) if kind == "packed" else flat.striped([], 3)
    assert layout.partition == 0
    assert layout.of_rank(1) == []
