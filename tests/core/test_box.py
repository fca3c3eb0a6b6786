"""Box arithmetic, against the plain definition: the set of indices a box holds."""

from __future__ import annotations

from itertools import pairwise, product
from math import prod

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from anyckpt.core.box import Box, boxes_of_range, c_strides, cover, intersect, runs, slabs, whole

shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@st.composite
def shape_and_box(draw: st.DrawFn, shape: tuple[int, ...] | None = None) -> tuple[tuple[int, ...], Box]:
    shape = draw(shapes) if shape is None else shape
    edges = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    return shape, Box(tuple(a for a, _ in edges), tuple(b for _, b in edges))


def indices(box: Box) -> set[tuple[int, ...]]:
    return set(product(*(range(a, b) for a, b in zip(box.start, box.stop))))


def flat(box: Box, shape: tuple[int, ...]) -> list[int]:
    return np.arange(prod(shape)).reshape(shape)[box.slices()].reshape(-1).tolist()


@given(shape_and_box())
def test_runs_hold_the_box_in_c_order(case: tuple[tuple[int, ...], Box]) -> None:
    shape, box = case
    found = [i for start, length in runs(box, shape) for i in range(start, start + length)]
    assert found == flat(box, shape)


@given(shape_and_box())
def test_runs_are_as_long_as_they_can_be(case: tuple[tuple[int, ...], Box]) -> None:
    shape, box = case
    found = list(runs(box, shape))
    lengths = {length for _, length in found}
    assert len(lengths) <= 1
    for (a, n), (b, _) in pairwise(found):
        assert a + n <= b


@given(shapes, st.data())
def test_a_range_is_cut_into_boxes_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    n = prod(shape)
    start = data.draw(st.integers(0, n))
    stop = data.draw(st.integers(start, n))
    boxes = boxes_of_range(shape, start, stop)
    assert [i for box in boxes for i in flat(box, shape)] == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@given(shapes, st.integers(1, 40))
def test_slabs_are_bounded_and_follow_each_other(shape: tuple[int, ...], limit: int) -> None:
    boxes = list(slabs(shape, limit))
    assert [i for box in boxes for i in flat(box, shape)] == list(range(prod(shape)))
    assert all(box.volume <= limit for box in boxes)


@given(st.data())
def test_intersection_holds_the_common_indices(data: st.DataObject) -> None:
    shape, a = data.draw(shape_and_box())
    _, b = data.draw(shape_and_box(shape))
    common = intersect(a, b)
    if not shape:
        return
    assert (indices(common) if common else set()) == indices(a) & indices(b)


@given(shapes.filter(bool), st.data())
def test_a_grid_covers_exactly_and_any_change_is_seen(shape: tuple[int, ...], data: st.DataObject) -> None:
    cuts = [sorted({0, n, *data.draw(st.lists(st.integers(0, n), max_size=2))}) for n in shape]
    grid = [
        Box(tuple(a for a, _ in cell), tuple(b for _, b in cell))
        for cell in product(*(list(pairwise(c)) for c in cuts))
    ]
    grid = data.draw(st.permutations(grid))
    assert cover(grid, shape).exact
    lost = cover(grid[1:], shape)
    assert lost.missing == grid[0].volume
    assert lost.overlap is None
    twice = cover([*grid, grid[0]], shape)
    assert twice.overlap is not None
    assert not twice.exact
    beyond = cover([*grid, Box(shape, tuple(n + 1 for n in shape))], shape)
    assert beyond.outside == len(grid)


@given(st.data())
def test_overlap_is_found_where_any_two_boxes_share_an_element(data: st.DataObject) -> None:
    shape = data.draw(shapes.filter(bool))
    boxes = [data.draw(shape_and_box(shape))[1] for _ in range(data.draw(st.integers(1, 5)))]
    pairs = [(i, j) for i in range(len(boxes)) for j in range(i) if indices(boxes[i]) & indices(boxes[j])]
    assert (cover(boxes, shape).overlap is not None) == bool(pairs)


def test_strides_of_a_scalar_and_a_matrix() -> None:
    assert c_strides(()) == ()
    assert c_strides((3, 4)) == (4, 1)
    assert whole(()).volume == 1
