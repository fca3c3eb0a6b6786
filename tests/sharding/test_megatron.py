"""The arithmetic of Megatron's parallelism: splits that join again, layers that are all somewhere, flat layouts."""

from __future__ import annotations

from math import lcm

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anyckpt.core.tensor import from_array
from anyckpt.errors import UsageError
from anyckpt.sharding.buckets import PARAMETER_ALIGNMENT, bucket_sizes, lay_out
from anyckpt.sharding.pp import chunk_order, first_layers, layer_counts, local_experts
from anyckpt.sharding.tp import Partition, join, padded_vocab, split

SPLIT: list[Partition] = [
    "replicated", "column", "row", "vocab", "qkv", "gate_up", "expert_column", "expert_gate_up", "expert_row",
]  # fmt: skip


@pytest.mark.parametrize("partition", SPLIT)
@given(n_ranks=st.integers(1, 6), rows=st.integers(1, 4), columns=st.integers(1, 4))
@settings(max_examples=15, deadline=None)
def test_shards_join_to_the_tensor_they_were_split_from(
    partition: Partition, n_ranks: int, rows: int, columns: int
) -> None:
    array = np.arange(2 * rows * columns * n_ranks * n_ranks, dtype=np.int32)
    array = array.reshape(2 * rows * n_ranks, columns * n_ranks)
    shards = split(from_array(array), partition, n_ranks)
    assert len(shards) == n_ranks
    assert np.array_equal(join(shards, partition).numpy(), array)


def test_a_gated_shard_has_its_gate_rows_first() -> None:
    array = np.array([[1], [2], [3], [4]])  # gates 1 2, ups 3 4
    assert [s.numpy()[:, 0].tolist() for s in split(from_array(array), "gate_up", 2)] == [[1, 3], [2, 4]]


def test_what_does_not_divide_is_refused() -> None:
    with pytest.raises(UsageError, match="can't be cut into 3"):
        split(from_array(np.zeros((4, 2))), "column", 3)
    with pytest.raises(UsageError) as caught:
        layer_counts(6, 4)
    assert "1, 2, 3, 6" in caught.value.hint
    with pytest.raises(UsageError):
        local_experts(6, 4)


@given(pp=st.integers(1, 5), vpp=st.integers(1, 4), sizes=st.data())
@settings(max_examples=30, deadline=None)
def test_every_layer_is_in_one_chunk_in_order(pp: int, vpp: int, sizes: st.DataObject) -> None:
    counts = {chunk: sizes.draw(st.integers(0, 3)) for chunk in chunk_order(pp, vpp)}
    first = first_layers(counts, pp, vpp)
    layers = [first[chunk] + i for chunk in chunk_order(pp, vpp) for i in range(counts[chunk])]
    assert layers == list(range(sum(counts.values())))


@given(
    sizes=st.lists(st.integers(1, 500), min_size=1, max_size=12), dp=st.integers(1, 9),
    bucket=st.one_of(st.none(), st.integers(1, 800)), own=st.sets(st.integers(0, 11)), busbw=st.booleans(),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_flat_layouts_hold_every_parameter_once(
    sizes: list[int], dp: int, bucket: int | None, own: set[int], busbw: bool
) -> None:
    parameters = [(f"p{i}", n) for i, n in enumerate(sizes)]
    layout = lay_out(parameters, dp=dp, bucket_size=bucket, own_bucket={f"p{i}" for i in own}, high_busbw=busbw)
    for offsets, end in ((layout.file_offsets(), layout.n_elements), (layout.memory_offsets(), layout.n_padded)):
        assert offsets.keys() == dict(parameters).keys()
        spans = sorted((offsets[name], offsets[name] + n) for name, n in parameters)
        assert all(a[1] <= b[0] for a, b in zip(spans, spans[1:])) and spans[-1][1] <= end
    assert all(at % PARAMETER_ALIGNMENT == 0 for b in layout.buckets for at in b.offsets.values())
    assert layout.n_padded % lcm(dp, 128) == 0
    for name in (f"p{i}" for i in own if i < len(sizes)):
        assert next(list(b.offsets) for b in layout.buckets if name in b.offsets) == [name]


def test_one_bucket_leaves_no_trace_of_the_ranks() -> None:
    parameters = [("a", 100), ("b", 7), ("c", 300)]
    assert lay_out(parameters, dp=2).file_offsets() == lay_out(parameters, dp=7).file_offsets()


def test_overlap_cuts_buckets_on_the_first_stage_alone() -> None:
    args = {"overlap_grad_reduce": True}
    assert next(bucket_sizes(args, 10, 64, first_chunk=True)) == 64_000_000
    assert next(bucket_sizes(args, 10, 64, first_chunk=False)) is None


def test_a_vocabulary_is_padded_once_for_all_ranks() -> None:
    assert padded_vocab(50257, 128, 1) == 50304
    assert padded_vocab(50, 8, 2) == 64
