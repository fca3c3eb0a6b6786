"""Tensor parallelism: how one tensor lies over ranks, both ways. Pure: descriptions in, descriptions out.

    replicated       every rank has all of it
    column, vocab    rank t has the t-th part of axis 0        (a vocabulary is padded so that it divides)
    qkv              as column, the unit being a whole query group: its query heads, one key head, one value head
    gate_up          rank t has [gate_t ; up_t]: the t-th parts of both halves of axis 0
    row              rank t has the t-th part of axis 1
    expert_*         as column, gate_up and row, over the expert-tensor ranks instead

A concatenation of `gate_up` shards is not the weight; that fault is silent, since the shapes fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from anyckpt.core import ops
from anyckpt.core.tensor import Tensor
from anyckpt.errors import UsageError
from anyckpt.sharding.flat import run

Partition = Literal[
    "replicated", "column", "row", "vocab", "qkv", "gate_up", "expert_column", "expert_gate_up", "expert_row"
]
_AXIS: dict[Partition, int] = {
    "column": 0, "vocab": 0, "qkv": 0, "gate_up": 0, "row": 1, "expert_column": 0, "expert_gate_up": 0, "expert_row": 1,
}


def is_gated(partition: Partition) -> bool:
    """Whether a shard holds parts of two halves."""
    return partition in ("gate_up", "expert_gate_up")


def is_expert(partition: Partition) -> bool:
    """Whether it is split over the expert-tensor ranks."""
    return partition.startswith("expert_")


def join(shards: Sequence[Tensor], partition: Partition) -> Tensor:
    """The whole tensor of the shards in rank order. Raises UsageError where their shapes don't go together."""
    if partition == "replicated" or len(shards) == 1:
        return shards[0]
    axis = _AXIS[partition]
    if is_gated(partition):
        halves = [halve(shard) for shard in shards]
        return ops.concat([gate for gate, _ in halves] + [up for _, up in halves], 0)
    return ops.concat(shards, axis)


def split(tensor: Tensor, partition: Partition, n_ranks: int) -> list[Tensor]:
    """The shards of a whole tensor in rank order. Raises UsageError where it does not divide."""
    if partition == "replicated" or n_ranks == 1:
        return [tensor] * n_ranks
    if is_gated(partition):
        gates, ups = (even_parts(half, 0, n_ranks) for half in halve(tensor))
        return [ops.concat((gate, up), 0) for gate, up in zip(gates, ups, strict=True)]
    return even_parts(tensor, _AXIS[partition], n_ranks)


def even_parts(tensor: Tensor, axis: int, n_parts: int) -> list[Tensor]:
    """Cut an axis into equal parts, in order."""
    size = tensor.shape[axis]
    if size % n_parts:
        raise UsageError(f"an axis of {size:,} can't be cut into {n_parts} equal parts")
    step = size // n_parts
    if axis == 0 and tensor.dtype.block == 1:  # consecutive elements: pointed at where they lie
        n, shape = tensor.size // n_parts, (step, *tensor.shape[1:])
        return [ops.reshape(run(tensor, i * n, n), shape) for i in range(n_parts)]
    lead = (slice(None),) * axis
    cuts = [(*lead, slice(i * step, (i + 1) * step)) for i in range(n_parts)]
    return [tensor[cut] for cut in cuts]


def halve(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """The two halves of axis 0."""
    first, second = even_parts(tensor, 0, 2)
    return first, second


def padded_vocab(n_tokens: int, divisor: int, n_ranks: int) -> int:
    """Rows of a vocabulary as Megatron pads it: up to a multiple of `divisor` times the tensor-parallel size.

    >>> padded_vocab(50257, 128, 4)
    50688
    """
    unit = divisor * n_ranks
    return -(-n_tokens // unit) * unit
