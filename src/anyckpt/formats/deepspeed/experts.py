"""Mixture of experts: which expert a name means, and which ranks share an expert group's buffer.

In the live module and in `param_shapes` experts are numbered within a rank, in the expert files over all:
global = expert-parallel rank × experts a rank + local. Of W data-parallel ranks, expert-parallel rank x of EP is
held by the ranks x, x + EP, x + 2 EP …, in that order, so an expert group is cut over W / EP of them
(`partition_count`).
Facts: DeepSpeed 0.19.8 `engine.py` `_save_moe_checkpoint`, `stage_1_and_2.py`; EP 1 and 2 checked on real files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from anyckpt.core.box import Shape
from anyckpt.core.checkpoint import Optimizer
from anyckpt.core.tensor import Tensor
from anyckpt.finding import Report
from anyckpt.formats.deepspeed.files import Part
from anyckpt.formats.deepspeed.joined import Joined
from anyckpt.formats.deepspeed.load import count, mapping, sequence, tensor_of
from anyckpt.formats.torch.optimizer import is_optimizer, read_optimizer

EXPERT = re.compile(r"(?P<layer>.*\bdeepspeed_moe\.experts\.deepspeed_experts\.)(?P<id>\d+)(?P<rest>\..*)")


def copies(state: Mapping[str, Any], index: int, n_ranks: int) -> int:
    """Over how many sets of ranks a group is spread, each with parameters of its own: EP for experts, else 1."""
    parts = sequence(state.get("partition_count"))
    n = count(parts[index], n_ranks) if index < len(parts) else n_ranks
    return n_ranks // n if 0 < n <= n_ranks and n_ranks % n == 0 else 1


def parallel_size(states: Mapping[int, Mapping[str, Any]], n_ranks: int) -> int:
    """The largest expert-parallel size of any group."""
    first: Mapping[str, Any] = next(iter(states.values()), {})
    n_groups = len(sequence(first.get("partition_count")))
    return max((copies(first, index, n_ranks) for index in range(n_groups)), default=1)


def local_counts(named: Iterable[Mapping[str, Shape]]) -> dict[str, int]:
    """MoE layer (the name up to the expert's number) -> experts on one rank."""
    seen: dict[str, set[str]] = {}
    for one in named:
        for name in one:
            if match := EXPERT.fullmatch(name):
                seen.setdefault(match["layer"], set()).add(match["id"])
    return {layer: len(ids) for layer, ids in seen.items()}


def global_names(named: Mapping[str, Shape], rank: int, counts: Mapping[str, int]) -> dict[str, Shape]:
    """Parameters of one expert-parallel rank under the names that tell all experts apart."""
    return {global_name(name, rank, counts): shape for name, shape in named.items()}


def global_name(name: str, rank: int, counts: Mapping[str, int]) -> str:
    """One name; those that are no expert's stay as they are."""
    match = EXPERT.fullmatch(name)
    if match is None:
        return name
    return f"{match['layer']}{rank * counts.get(match['layer'], 0) + int(match['id'])}{match['rest']}"


def add_weights(model: Joined, files: Sequence[tuple[Part, Mapping[str, Any]]]) -> None:
    """Put the expert files' tensors behind the gate of their layer, where the module has them."""
    found: dict[str, dict[str, Tensor]] = {}
    for _, tensors in sorted(files, key=lambda f: (f[0].layer, f[0].expert)):
        for name, value in tensors.items():
            tensor = tensor_of(value)
            if tensor is not None:
                match = EXPERT.fullmatch(name)
                found.setdefault(match["layer"].partition("experts.")[0] if match else name, {})[name] = tensor
    weights: dict[str, Tensor] = {}
    gates = {prefix: name for name in model.weights for prefix in found if name.startswith(prefix)}  # the last of each
    for name, tensor in model.weights.items():
        weights[name] = tensor
        for prefix, gate in gates.items():
            if gate == name:
                weights.update(found[prefix])
    for tensors in found.values():
        weights.update(tensors)
    model.weights = weights


def read_optimizers(files: Mapping[int, Mapping[str, Any]], model: Joined, report: Report) -> Optimizer | None:
    """The optimizer without ZeRO: one state dict an expert-parallel rank, in which all but the experts are the same."""
    ids: dict[str, set[int]] = {}
    for name in model.weights:
        if match := EXPERT.fullmatch(name):
            ids.setdefault(match["layer"], set()).add(int(match["id"]))
    each = {layer: len(found) // len(files) for layer, found in ids.items()}
    slots: dict[str, dict[str, Tensor]] = {}
    groups: list[dict[str, Any]] = []
    last: Optimizer | None = None
    for rank, saved in sorted(files.items()):
        state = mapping(saved.get("optimizer"))
        state = mapping(state.get("optimizer_state_dict", state))
        if not is_optimizer(state):
            continue
        own = {
            name: tensor for name, tensor in model.weights.items()
            if (m := EXPERT.fullmatch(name)) is None or int(m["id"]) // max(1, each[m["layer"]]) == rank
        }
        last = read_optimizer([state], own, report, aliases=model.aliases)
        for slot, tensors in last.slots.items():
            known = slots.setdefault(slot, {})
            known.update((n, t) for n, t in tensors.items() if n not in known)
        for index, group in enumerate(last.groups):
            if index == len(groups):
                groups.append({**group, "params": []})
            groups[index]["params"] += [n for n in group["params"] if n not in groups[index]["params"]]
    return replace(last, slots=slots, groups=tuple(groups)) if last is not None else None
