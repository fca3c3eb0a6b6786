"""Megatron's optimizer without ZeRO, rank by rank: numbers to names, moments and masters.

    fp32        {state: {i: {step, exp_avg, exp_avg_sq}}, param_groups}
    bf16, fp16  {optimizer: {state, param_groups}, fp32_from_fp16_params: [[master …] a group], grad_scaler?}
    experts     a list of those: dense parameters, then those of experts

No file names parameters. Numbers run through the groups; a group holds, in the model's order, the parameters with
weight decay, another one those without (biases and vectors), and every shape is checked. Where that does not fit
(frozen parameters, groups of one's own), the only assignment that keeps order and shapes is taken, if there is one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from anyckpt.core import ops
from anyckpt.core.box import Shape
from anyckpt.core.checkpoint import Optimizer
from anyckpt.core.inert import TensorSubclass
from anyckpt.core.tensor import Tensor
from anyckpt.finding import Report
from anyckpt.formats.megatron import parts
from anyckpt.formats.megatron.join import Kind, Placements, join_all, modern_order
from anyckpt.formats.megatron.ranks import Grid, Rank, RankState
from anyckpt.formats.torch.assign import assign, candidates
from anyckpt.formats.torch.optimizer import is_optimizer
from anyckpt.sharding.flat import run

Local = tuple[int, str]
"""(virtual chunk, local name): a parameter within a rank."""


@dataclass(slots=True)
class RankSlots:
    """A rank's optimizer by parameter. `groups`: options, and the parameters of each.

    `flat`: what lies in flat buffers: the buffer, the first element in it, the shape.
    """

    slots: dict[str, dict[Local, Tensor]] = field(default_factory=dict)
    flat: dict[str, dict[Local, tuple[Tensor, int, Shape]]] = field(default_factory=dict)
    groups: list[tuple[dict[str, Any], list[Local]]] = field(default_factory=list)
    unnamed: int = 0

    def of(self, slot: str, local: Local) -> Tensor | None:
        """A parameter's tensor of a slot."""
        if (found := self.flat.get(slot, {}).get(local)) is not None:
            whole, start, shape = found
            return ops.reshape(run(whole, start, prod(shape)), shape)
        return self.slots.get(slot, {}).get(local)


    def kind(self, slot: str, local: Local) -> Kind | None:
        """Element type and shape of what `of` gives."""
        if (found := self.flat.get(slot, {}).get(local)) is not None:
            return found[0].dtype, found[2]
        tensor = self.slots.get(slot, {}).get(local)
        return None if tensor is None else (tensor.dtype, tensor.shape)


def entries_of(saved: Any) -> list[Any]:
    """The optimizers in what was saved: one, or the list of a chained one."""
    if isinstance(saved, list | tuple):
        return list(saved)
    if isinstance(saved, dict) and saved and all(isinstance(k, int) for k in saved):
        return [saved[k] for k in sorted(saved)]
    return [saved] if saved is not None else []


def inner_of(entry: Any) -> dict[Any, Any] | None:
    """The torch optimizer's own state dict in an entry; None for what is none."""
    if isinstance(entry, dict):
        inside = entry.get("optimizer", entry)
        if isinstance(inside, dict) and isinstance(inside.get("param_groups"), list | tuple):
            return inside
    return None


def parameters_of(state: RankState) -> list[Local]:
    """A rank's parameters in the order of registration, chunk by chunk; buffers left out."""
    return [
        (v, name) for v, chunk in enumerate(state.chunks) for name in chunk
        if not name.endswith((".expert_bias", ".local_tokens_per_expert", ".inv_freq"))
    ]


def shares(state: RankState, entries: Sequence[Any]) -> list[list[Local]]:
    """Which of a rank's parameters each chained optimizer has.

    Several dense ones mean the first virtual chunk apart from the others (overlap_param_gather_with_optimizer_step).
    """
    own = parameters_of(state)
    if len(entries) == 1:
        return [own]
    dense = [local for local in own if not parts.is_expert(local[1])]
    experts = [local for local in own if parts.is_expert(local[1])]
    flags = [_is_expert_entry(entry, i, len(entries), bool(experts)) for i, entry in enumerate(entries)]
    n_dense = flags.count(False)
    split = [[x for x in dense if x[0] == 0], [x for x in dense if x[0] > 0]] if n_dense == 2 else [dense]
    found: list[list[Local]] = []
    for flag in flags:
        found.append(experts if flag else split.pop(0) if split else [])
    return found


def _is_expert_entry(entry: Any, i: int, n: int, has_experts: bool) -> bool:
    inner = inner_of(entry)
    groups = inner["param_groups"] if inner else ()
    said = [g.get("is_expert_parallel") for g in groups if isinstance(g, dict) and "is_expert_parallel" in g]
    return any(said) if said else has_experts and i == n - 1


def read_rank(state: RankState, tp: int) -> RankSlots:
    """Name a rank's moments and masters. What can't be named is counted in `unnamed`."""
    found = RankSlots()
    entries = entries_of(state.root.get("optimizer"))
    for entry, own in zip(entries, shares(state, entries), strict=True):
        inner = inner_of(entry)
        if inner is None or not is_optimizer(inner):
            continue
        groups = [g for g in inner["param_groups"] if isinstance(g, dict)]
        saved = {_number(k): v for k, v in inner["state"].items() if isinstance(v, dict)}
        ids = [[_number(i) for i in g.get("params", ())] for g in groups]
        masters = _masters(entry, len(groups))
        named = _names(state, own, groups, ids, saved)
        for g, (group, numbers) in enumerate(zip(groups, ids, strict=True)):
            options = {str(k): v for k, v in group.items() if k != "params"}
            locals_: list[Local] = []
            half = iter(masters[g])
            for number, local in zip(numbers, named[g], strict=True):
                if local is None:
                    found.unnamed += 1
                    continue
                locals_.append(local)
                weight = state.chunks[local[0]][local[1]]
                for slot, value in saved.get(number, {}).items():
                    tensor = _plain(value)
                    if tensor is not None:
                        tensor = modern_order(tensor, local[1], state, tp)
                        found.slots.setdefault(str(slot), {})[local] = tensor
                if weight.dtype.name in ("bfloat16", "float16") and (master := next(half, None)) is not None:
                    if master.shape == weight.shape:
                        found.slots.setdefault("master", {})[local] = modern_order(master, local[1], state, tp)
                    else:
                        found.unnamed += 1
            found.groups.append((options, locals_))
    return found


def _masters(entry: Any, n_groups: int) -> list[list[Tensor]]:
    saved = entry.get("fp32_from_fp16_params", entry.get("fp32_from_fp16")) if isinstance(entry, dict) else None
    groups = [group for group in saved or () if isinstance(group, list | tuple)]
    lists = [[t for x in group if (t := _plain(x)) is not None] for group in groups]
    return [*lists, *([[]] * n_groups)][:n_groups]


def _names(
    state: RankState, own: Sequence[Local], groups: Sequence[Mapping[Any, Any]], ids: Sequence[Sequence[int]],
    saved: Mapping[int, Mapping[Any, Any]],
) -> list[list[Local | None]]:
    """The parameter of every number, group by group; None where nothing decides it."""
    shapes = [[_shape(saved.get(i, {})) for i in numbers] for numbers in ids]
    weights = {local: state.chunks[local[0]][local[1]] for local in own}
    by_rule: list[list[Local | None]] = []
    for group, numbers in zip(groups, ids, strict=True):
        rest = group.get("wd_mult", 1.0 if group.get("weight_decay") else 0.0) == 0
        wanted = [x for x in own if parts.decays(x[1], weights[x].ndim) != rest] if len(groups) > 1 else list(own)
        by_rule.append([*wanted] if len(wanted) == len(numbers) else [])
    if len(groups) == 1 and not by_rule[0]:
        rest = groups[0].get("wd_mult", 1.0) == 0
        wanted = [x for x in own if parts.decays(x[1], weights[x].ndim) != rest]
        by_rule = [[*wanted]]
    fits = all(
        len(names) == len(numbers)
        and all(n is None or s is None or weights[n].shape == s for n, s in zip(names, own_shapes, strict=True))
        for names, numbers, own_shapes in zip(by_rule, ids, shapes, strict=False)
        if numbers or names
    ) and len({n for names in by_rule for n in names}) == sum(map(len, by_rule))
    if fits:
        return by_rule
    texts = {f"{v}/{name}": (v, name) for v, name in own}
    guess = assign(shapes, candidates({text: weights[local] for text, local in texts.items()}, {}))
    return [[None if name is None else texts[name] for name in group] for group in guess.names]


def _shape(saved: Mapping[Any, Any]) -> Shape | None:
    tensors = [t for value in saved.values() if (t := _plain(value)) is not None and t.ndim]
    return tensors[0].shape if tensors else None


def _plain(value: Any) -> Tensor | None:
    if isinstance(value, TensorSubclass):
        return value.base
    return value if isinstance(value, Tensor) else None


def _number(key: Any) -> int:
    return key if isinstance(key, int) else int(key) if isinstance(key, str) and key.isdecimal() else -1


def merge(
    by_rank: Mapping[Rank, RankSlots], grid: Grid, placements: Placements, report: Report, kind: str
) -> Optimizer | None:
    """One optimizer by global name of what the ranks hold."""
    slots: dict[str, Mapping[str, Tensor]] = {}
    kinds = list(dict.fromkeys(slot for found in by_rank.values() for slot in (*found.flat, *found.slots)))
    for slot in kinds:
        def lookup(rank: Rank, v: int, local: str, slot: str = slot) -> Tensor | None:
            found = by_rank.get(rank)
            return found.of(slot, (v, local)) if found else None

        def kind_of(rank: Rank, v: int, local: str, slot: str = slot) -> Kind | None:
            found = by_rank.get(rank)
            return found.kind(slot, (v, local)) if found else None

        joined = join_all(placements, lookup, report, kind_of)
        if joined:
            slots[slot] = joined
    unnamed = sum(found.unnamed for found in by_rank.values())
    if unnamed:
        report.add(
            "ambiguous", f"the optimizer numbers its parameters, and {unnamed} numbers could be several of the weights",
            where=grid.first.file, hint="their state is left out",
        )
    groups = _groups(by_rank, placements)
    if not slots and not groups:
        return None
    return Optimizer(slots=slots, groups=tuple(groups), kind=kind, names_inferred=bool(slots))


def _groups(by_rank: Mapping[Rank, RankSlots], placements: Placements) -> list[dict[str, Any]]:
    """Groups of the same options made one, with the parameters' global names in the order of the model."""
    names: dict[tuple[Rank, Local], str] = {}
    for placement in placements.all:
        for rank in placement.ranks:
            if rank is not None and placement.name not in placements.copies:
                names[rank, (placement.chunk[1], placement.local)] = placement.name
    order = {placement.name: i for i, placement in enumerate(placements.all)}
    found: list[tuple[dict[str, Any], dict[str, None]]] = []
    for rank, own in sorted(by_rank.items()):
        for options, locals_ in own.groups:
            known = next((params for said, params in found if _same(said, options)), None)
            if known is None:
                known = {}
                found.append((options, known))
            known.update((names[rank, local], None) for local in locals_ if (rank, local) in names)
    return [{**options, "params": sorted(params, key=lambda n: order[n])} for options, params in found]


def _same(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    return a.keys() == b.keys() and all(repr(a[k]) == repr(b[k]) for k in a)
