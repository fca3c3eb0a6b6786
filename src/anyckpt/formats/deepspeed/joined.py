"""What joining gives: weights and optimizer of one model-parallel rank, then of all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from anyckpt.core.checkpoint import Optimizer
from anyckpt.core.tensor import Tensor
from anyckpt.formats.deepspeed.load import flat_absent, mapping, shapes_of, tensor_of
from anyckpt.formats.deepspeed.partitions import Group
from anyckpt.formats.torch.optimizer import kind_of
from anyckpt.sharding import flat


@dataclass(slots=True)
class Joined:
    """Whole tensors by name. `groups`: hyperparameters, each with `params` in the client's order."""

    weights: dict[str, Tensor] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    slots: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    strange: dict[str, Any] = field(default_factory=dict)
    kept: dict[str, Any] = field(default_factory=dict)
    stages: list[list[str]] = field(default_factory=list)  # parameters of each pipeline stage
    layers: dict[int, str] = field(default_factory=dict)  # pipeline layer -> what its names begin with


def add_groups(into: Joined, groups: Sequence[Group], *, shuffled: bool = False) -> None:
    """Add one parameter group, which several sets of ranks may hold a share of (experts), or one sub group.

    Sub groups of stage 3 name their parameter group by the entry "" of their options; they become one group again.
    `shuffled`: the buffer is in the order of round_robin_gradients, which is undone.
    """
    for group in groups:
        for slot, tensors in group.slots().items():
            into.slots.setdefault(slot, {}).update(tensors)
        if group.strange:
            into.strange[f"group {group.index}"] = group.strange
    options = dict(groups[0].options)
    number = options.pop("", None)
    names = [name for group in groups for name in (_unshuffled(group) if shuffled else group.names)]
    same = number is not None and into.groups and into.groups[-1].get("") == number
    if same:
        into.groups[-1]["params"] += names
        return
    into.groups.append({**options, "params": names, **({} if number is None else {"": number})})


def _unshuffled(group: Group) -> list[str]:
    names = [""] * len(group.names)
    for name, index in zip(group.names, flat.round_robin(len(names), group.layout.n_ranks), strict=True):
        names[index] = name
    return names


def merged_stages(stages: Sequence[Joined]) -> Joined:
    """Pipeline stages side by side; a tied parameter is in several, with equal values: the first is taken."""
    out = Joined(stages=[[n for group in one.groups for n in group["params"]] for one in stages])
    for number, one in enumerate(stages):
        for name, tensor in one.weights.items():
            out.weights.setdefault(name, tensor)
        out.aliases.update(one.aliases)
        for slot, tensors in one.slots.items():
            known = out.slots.setdefault(slot, {})
            known.update((n, t) for n, t in tensors.items() if n not in known)
        for index, group in enumerate(one.groups):
            if index < len(out.groups):
                have = set(out.groups[index]["params"])
                out.groups[index]["params"] += [n for n in group["params"] if n not in have]
            else:
                out.groups.append({**group, "params": list(group["params"])})
        out.strange |= {f"stage {number}, {k}" if len(stages) > 1 else k: v for k, v in one.strange.items()}
    return out


def joined_optimizer(model: Joined) -> Optimizer:
    """The optimizer of all ranks."""
    groups = [{k: v for k, v in group.items() if k != ""} for group in model.groups]
    kind = kind_of(model.slots, groups)
    return Optimizer(slots=model.slots, groups=tuple(groups), kind=kind, unmatched=model.strange)


def frozen_weights(models: Mapping[int, Mapping[str, Any]], n_ranks: int) -> dict[str, Tensor]:
    """The frozen parameters of stage 3: each rank's model file holds its part, cut as trainable ones are."""
    first = next(iter(models.values()), {})
    out: dict[str, Tensor] = {}
    for name, shape in shapes_of(first.get("frozen_param_shapes")).items():
        held = {
            rank: tensor
            for rank, model in models.items()
            if (tensor := tensor_of(mapping(model.get("frozen_param_fragments")).get(name))) is not None
        }
        if not held:
            continue
        layout = flat.striped([prod(shape)], n_ranks)
        like = next(iter(held.values()))
        parts = [held.get(rank) or flat_absent(like, f"rank {rank}'s model file is missing") for rank in range(n_ranks)]
        out[name] = flat.joined(layout, 0, parts.__getitem__, shape)
    return out
