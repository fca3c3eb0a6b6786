"""Flat groups of the optimizer, joined over the ranks: from each rank's state to tensors by parameter name.

Stages 1 and 2, BF16_Optimizer (one flat buffer a parameter group, cut in equal partitions; `sharding.flat.packed`):

    base_optimizer_state             {"state": {g: {"step", "exp_avg": [N/P], …}}, "param_groups": […]}   "rigid"
                                     [{"exp_avg": [N/P without padding], …}, …]                            "elastic"
    single_partition_of_fp32_groups  [master [N/P without padding]]; BF16_Optimizer keeps the padding
    partition_count                  [P]: fewer than the ranks for a group of experts
    param_alignment_paddings         [[elements after each parameter]], from 0.19.7

Stage 3 (one flat buffer a sub group of parameters, each cut for itself; `sharding.flat.striped`):

    optimizer_state_dict             {"state": {i: {…}}, "param_groups": [{"params": [i, …]}]}
    fp32_flat_groups                 [master [sum of ceil(n / W)]]
    partition_count                  W

`param_shapes` of the model file gives names in the order of the flat buffers, shuffled by round_robin_gradients as the
buffers are. `param_slice_mappings` are in another order then, so nothing here trusts them.
Facts: DeepSpeed 0.19.8 `stage_1_and_2.py`, `stage3.py`, `bf16_optimizer.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from anyckpt.core import ops
from anyckpt.core.box import Shape
from anyckpt.core.tensor import Tensor, from_array
from anyckpt.finding import Report
from anyckpt.formats.deepspeed.load import count, flat_absent, mapping, options_of, sequence, tensor_of
from anyckpt.formats.torch.optimizer import SLOTS
from anyckpt.sharding import flat

Named = Mapping[str, Shape]
Values = Mapping[int, Any]  # rank -> what it holds, for the ranks whose files are there


@dataclass(slots=True)
class Group:
    """One flat group: its parameters in the order of the buffer, and what every rank holds of it."""

    index: int
    names: tuple[str, ...]
    shapes: tuple[Shape, ...]
    layout: flat.Layout
    options: dict[str, Any]
    buffers: dict[str, list[Tensor]] = field(default_factory=dict)
    whole: dict[str, dict[str, Tensor]] = field(default_factory=dict)  # slots that ranks hold parameter by parameter
    scalars: dict[str, Tensor] = field(default_factory=dict)
    strange: dict[str, Any] = field(default_factory=dict)

    def slots(self) -> dict[str, dict[str, Tensor]]:
        """slot -> parameter -> tensor of the parameter's shape; scalars stand for each of the group."""
        out: dict[str, dict[str, Tensor]] = {}
        for slot, buffers in self.buffers.items():
            out[slot] = {
                name: flat.joined(self.layout, i, buffers.__getitem__, shape)
                for i, (name, shape) in enumerate(zip(self.names, self.shapes, strict=True))
            }
        for slot, tensors in self.whole.items():
            out[slot] = dict(tensors)
        for slot, scalar in self.scalars.items():
            out[slot] = dict.fromkeys(self.names, scalar)
        return out


def packed_group(
    index: int, ranks: Sequence[int], states: Mapping[int, Mapping[str, Any]], named: Named, report: Report, where: str
) -> Group:
    """One parameter group of stages 1 and 2, or of BF16_Optimizer, whose partitions `ranks` hold in this order."""
    held = {i: states[rank] for i, rank in enumerate(ranks) if rank in states}
    first: Mapping[str, Any] = next(iter(held.values()), {})
    sizes = [prod(shape) for shape in named.values()]
    gaps = _gaps(first, index, len(sizes))
    layout = flat.packed(sizes, len(ranks), gaps=gaps, multiple=2 * len(ranks))
    masters = {i: t for i, s in held.items() if (t := _at(s.get("single_partition_of_fp32_groups"), index)) is not None}
    saved = max((t.size + _padding(held[i], index) for i, t in masters.items()), default=0)
    if saved * len(ranks) >= layout.used:
        layout = replace(layout, partition=saved)  # other releases padded to other multiples
    options, states_of_group = _base_state(first, held, index)
    group = Group(index, tuple(named), tuple(named.values()), layout, options)
    if masters:
        _check_lengths(group, masters, report, where)
        group.buffers["master"] = _every_rank(masters, len(ranks))
    _sort_slots(group, states_of_group, report, where)
    return group


def striped_group(
    index: int, n_ranks: int, states: Mapping[int, Mapping[str, Any]], named: Named, report: Report, where: str
) -> Group:
    """One sub group of stage 3."""
    layout = flat.striped([prod(shape) for shape in named.values()], n_ranks)
    first: Mapping[str, Any] = next(iter(states.values()), {})
    masters = {r: t for r, s in states.items() if (t := _at(s.get("fp32_flat_groups"), index)) is not None}
    saved = mapping(first.get("optimizer_state_dict"))
    options: dict[str, Any] = {}
    for number, one in enumerate(sequence(saved.get("param_groups"))):
        if index in sequence(mapping(one).get("params")):
            options = {**options_of(one), "": number}
    group = Group(index, tuple(named), tuple(named.values()), layout, options)
    if masters:
        _check_lengths(group, masters, report, where)
        group.buffers["master"] = _every_rank(masters, n_ranks)
    by_slot: dict[str, dict[int, Any]] = {}
    for rank, state in states.items():
        own = mapping(mapping(mapping(state.get("optimizer_state_dict")).get("state")).get(index))
        for slot, value in own.items():
            by_slot.setdefault(str(slot), {})[rank] = value
    _sort_slots(group, by_slot, report, where)
    return group


def split_by_length(named: Sequence[Named], lengths: Sequence[int], width: Any) -> list[dict[str, Shape]]:
    """Parameters cut into groups by the lengths of their buffers, where the file lists them in one dict.

    `width(size)`: elements that a parameter takes in a buffer. The list is taken as it is where it has as many groups.
    """
    if len(named) == len(lengths):
        return [dict(one) for one in named]
    rows = [(name, shape) for one in named for name, shape in one.items()]
    out: list[dict[str, Shape]] = []
    at = 0
    for length in lengths:
        taken: dict[str, Shape] = {}
        held = 0
        while at < len(rows) and held + width(prod(rows[at][1])) <= length:
            name, shape = rows[at]
            taken[name] = shape
            held += width(prod(shape))
            at += 1
        out.append(taken)
    if at < len(rows) and out:
        out[-1].update(rows[at:])  # what does not fit is told by the check of lengths
    return out


def _base_state(
    first: Mapping[str, Any], held: Mapping[int, Mapping[str, Any]], index: int
) -> tuple[dict[str, Any], dict[str, dict[int, Any]]]:
    """A group's hyperparameters, and slot -> rank -> value, from either form of base_optimizer_state."""
    base = first.get("base_optimizer_state")
    options: dict[str, Any] = {}
    by_slot: dict[str, dict[int, Any]] = {}
    elastic = isinstance(base, list)
    key: Any = index
    if isinstance(base, dict):
        groups = sequence(base.get("param_groups"))
        saved = mapping(groups[index]) if index < len(groups) else {}
        options = options_of(saved)
        key = next(iter(sequence(saved.get("params"))), index)
    for rank, state in held.items():
        own = state.get("base_optimizer_state")
        if elastic:
            one = mapping(own[index]) if isinstance(own, list) and index < len(own) else {}
            if "base_optimizer_state_step" in state:
                one = {"step": state["base_optimizer_state_step"], **one}
        else:
            one = mapping(mapping(mapping(own).get("state")).get(key))
        for slot, value in one.items():
            by_slot.setdefault(str(slot), {})[rank] = value
    step = options.get("step")
    if "step" not in by_slot and isinstance(step, int | float) and not isinstance(step, bool):
        by_slot["step"] = dict.fromkeys(held, step)  # apex keeps it with the hyperparameters
    return options, by_slot


def _sort_slots(group: Group, by_slot: Mapping[str, Values], report: Report, where: str) -> None:
    """Tell slots apart by what they hold: a partition, whole parameters, one number, or something else."""
    for slot, values in by_slot.items():
        tensors = {rank: t for rank, value in values.items() if (t := tensor_of(value)) is not None}
        some = next(iter(tensors.values()), None)
        kind = SLOTS.get(slot, "like-weight")
        if some is None:
            number = next((v for v in values.values() if v is not None), None)
            if isinstance(number, int | float) and not isinstance(number, bool) and abs(number) < 2**63:
                group.scalars[slot] = _number(number)
            elif number is not None:
                group.strange[slot] = dict(values)
        elif some.ndim == 0 or (kind == "scalar" and some.size == 1):
            group.scalars[slot] = some
        elif kind == "opaque" or some.ndim != 1:
            group.strange[slot] = dict(values)
        elif _reaches(group.layout, tensors):
            group.buffers[slot] = _every_rank(tensors, group.layout.n_ranks)
        elif (whole := _whole_parameters(group, tensors)) is not None:
            group.whole[slot] = whole
        else:
            group.strange[slot] = dict(values)
    if group.strange:
        report.add(
            "unmapped-tensor",
            f"optimizer state {', '.join(sorted(group.strange))} of {len(group.names)} parameters is neither one value "
            " for each element nor one number: it is kept as it is, by rank",
            where=where, severity="warning", hint="it can be written only for the same ranks",
        )


def _reaches(layout: flat.Layout, tensors: Mapping[int, Tensor]) -> bool:
    """Whether every rank's tensor is its partition, with or without the padding at its end."""
    return all(_used(layout, rank) <= tensor.size <= layout.partition for rank, tensor in tensors.items())


def _used(layout: flat.Layout, rank: int) -> int:
    """Elements of a rank's buffer that must be there: up to its last parameter's, all of them where each is cut."""
    if layout.kind == "striped":
        return layout.partition
    last = layout.of_rank(rank)[-1:]
    return last[0].offset + last[0].length if last else 0


def _whole_parameters(group: Group, tensors: Mapping[int, Tensor]) -> dict[str, Tensor] | None:
    """Muon's momentum: every parameter that has an element in the rank's partition, whole, one after the other.

    One that lies across a boundary is stored by both ranks, with equal values; the first is taken.
    """
    if group.layout.kind != "packed":
        return None
    out: dict[str, Tensor] = {}
    for rank, tensor in tensors.items():
        at = 0
        for fragment in group.layout.of_rank(rank):
            size = group.layout.sizes[fragment.parameter]
            if at + size > tensor.size:
                return None
            name, shape = group.names[fragment.parameter], group.shapes[fragment.parameter]
            if name not in out:
                out[name] = ops.reshape(flat.run(tensor, at, size), shape)
            at += size
        if at != tensor.size:
            return None
    return out


def _every_rank(tensors: Mapping[int, Tensor], n_ranks: int) -> list[Tensor]:
    longest = max(tensors.values(), key=lambda t: t.size)
    return [tensors.get(rank) or flat_absent(longest, f"rank {rank}'s file is missing") for rank in range(n_ranks)]


def _check_lengths(group: Group, masters: Mapping[int, Tensor], report: Report, where: str) -> None:
    """Every rank's partition must hold what the parameters' shapes say that it does."""
    for rank, tensor in masters.items():
        if not _reaches(group.layout, {rank: tensor}):
            report.add(
                "size-mismatch",
                f"rank {rank}'s partition of group {group.index} has {tensor.size:,} elements; its parameters take "
                f"{_used(group.layout, rank):,}",
                where=where, hint="the file belongs to another run or another number of ranks",
            )
            return


def _padding(state: Mapping[str, Any], index: int) -> int:
    """What was cut off the end of a rank's master; BF16_Optimizer, which names no stage, cuts nothing off."""
    paddings = sequence(state.get("group_paddings"))
    return count(paddings[index]) if "zero_stage" in state and index < len(paddings) else 0


def _gaps(state: Mapping[str, Any], index: int, n: int) -> list[int] | None:
    saved = sequence(state.get("param_alignment_paddings"))
    own = sequence(saved[index]) if index < len(saved) else []
    return [count(gap) for gap in own] if len(own) == n and any(own) else None


def _at(value: Any, index: int) -> Tensor | None:
    items = sequence(value)
    return tensor_of(items[index]) if index < len(items) else None


def _number(value: int | float) -> Tensor:
    import numpy as np

    return from_array(np.array(value, np.int64 if isinstance(value, int) else np.float64))
