"""Placements on meshes: every element is held, once a replica, where torch's own maths has it."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anyckpt.core.box import cover
from anyckpt.sharding.grid import Split, chunk, coordinate_of, local_boxes, shards

SIZES = st.integers(0, 40)


@given(size=SIZES, n_parts=st.integers(1, 9))
def test_chunks_follow_each_other_and_cover_all(size: int, n_parts: int) -> None:
    parts = [chunk(size, n_parts, i) for i in range(n_parts)]
    assert parts[0][0] == 0
    assert parts[-1][1] == size
    assert all(a[1] == b[0] for a, b in zip(parts, parts[1:]))


@given(shape=st.lists(SIZES, min_size=1, max_size=3).map(tuple), world=st.integers(1, 9), data=st.data())
def test_shards_tile_a_tensor(shape: tuple[int, ...], world: int, data: Any) -> None:
    axis = data.draw(st.integers(0, len(shape) - 1))
    boxes = shards(shape, world, axis)
    assert len(boxes) == world
    assert cover(boxes, shape).exact


LAYOUTS = st.lists(st.tuples(st.integers(0, 1), st.integers(1, 4), st.sampled_from([1, 1, 2, 3])), max_size=3)


@given(rows=SIZES, columns=st.integers(0, 9), layout=LAYOUTS)
def test_the_parts_of_all_coordinates_tile_the_tensor(
    rows: int, columns: int, layout: list[tuple[int, int, int]]
) -> None:
    held = []
    for coordinate in product(*(range(n) for _, n, _ in layout)):
        splits = [Split(axis, n, i, factor) for (axis, n, factor), i in zip(layout, coordinate)]
        pairs = local_boxes((rows, columns), splits)
        assert all(whole.shape == local.shape for whole, local in pairs)
        held += [whole for whole, _ in pairs]
    assert cover(held, (rows, columns)).exact


def test_fsdp_over_tensor_parallelism_cuts_for_tensor_parallelism_first() -> None:
    starts = []
    for dp, tp in product(range(2), range(2)):
        ((whole, local),) = local_boxes((64, 3), [Split(0, 2, dp, 2), Split(0, 2, tp)])
        assert local.start == (0, 0)
        starts.append((whole.start[0], whole.stop[0]))
    assert starts == [(0, 16), (32, 48), (16, 32), (48, 64)]


def test_an_uneven_strided_shard_has_several_runs() -> None:
    pairs = local_boxes((9,), [Split(0, 4, 0, 2)])  # torch's own example: rank 0 of 4 holds 0, 1 and 5
    assert [(w.start, w.stop) for w, _ in pairs] == [((0,), (2,)), ((5,), (6,))]
    assert [(p.start, p.stop) for _, p in pairs] == [((0,), (2,)), ((2,), (3,))]


def test_a_rank_stands_where_its_mesh_lists_it() -> None:
    assert coordinate_of(5, (2, 3), [0, 1, 2, 3, 4, 5]) == (1, 2)
    assert coordinate_of(3, (2, 2), [1, 3, 5, 7]) == (0, 1)
    assert coordinate_of(9, (2, 2), [1, 3, 5, 7]) is None


@pytest.mark.frameworks
@settings(max_examples=150, deadline=None)
@given(rows=st.integers(1, 40), layout=LAYOUTS, data=st.data())
def test_torch_has_the_same_elements(rows: int, layout: list[tuple[int, int, int]], data: Any) -> None:
    """The local tensor that torch's own splitting gives, element for element."""
    import torch
    from torch.distributed.tensor.placement_types import Shard, _StridedShard

    coordinate = [data.draw(st.integers(0, n - 1)) for _, n, _ in layout]
    whole = torch.arange(rows * 5).reshape(rows, 5)
    local = whole
    for (axis, n, factor), i in zip(layout, coordinate):
        placement = Shard(axis) if factor == 1 else _StridedShard(axis, split_factor=factor)
        local = placement._split_tensor(local, n, with_padding=False, contiguous=False)[0][i]
    ours = torch.full(local.shape, -1)
    splits = [Split(axis, n, i, factor) for (axis, n, factor), i in zip(layout, coordinate)]
    for box, inner in local_boxes((rows, 5), splits):
        ours[inner.slices()] = whole[box.slices()]
    assert torch.equal(ours, local)
