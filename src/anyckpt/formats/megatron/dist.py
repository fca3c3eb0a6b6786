"""Megatron-LM's `torch_dist` checkpoints: a torch.distributed.checkpoint folder under Megatron's own names.

    metadata.json     {"sharded_backend": "torch_dist", …}; written last but .metadata
    common.pt         torch file: args, iteration, opt_param_scheduler, optimizer {param_groups, …}, content_metadata
    .metadata  __R_N.distcp         the tensors (see formats.dcp), stacked over layers (see `stacked`)

Optimizer state is one of (`param_state_sharding_type`):

    none              optimizer.state.{exp_avg, exp_avg_sq[, fp32_param]}.NAME           not the distributed optimizer
    fully_reshardable optimizer.state.{param, exp_avg, exp_avg_sq}.NAME
    dp_reshardable    optimizer.distributed.dp_group_idx_G.gbuf_idx_B.dtype_(…).bucket_idx_K.{param, …}  flat buckets
    dp_zero_gather_scatter          …dp_group_idx_G.param_state/shard_0_1: the dict of a distrib_optim.pt
    fully_sharded_model_space       optimizer.state.{fp32_param, …}.NAME, saved through flattened ranges

Covers core 0.10 to 0.16 (files of 0.16.1 compared bit for bit with the live model; dp_zero_gather_scatter and
fully_sharded_model_space by their source). G counts model-parallel ranks, tensor ranks fastest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from anyckpt.core import ops
from anyckpt.core.checkpoint import Checkpoint, Optimizer
from anyckpt.core.tensor import Tensor
from anyckpt.errors import UsageError
from anyckpt.finding import Report, fail
from anyckpt.formats import dcp
from anyckpt.formats.megatron import KINDS, buckets, folders, stacked
from anyckpt.formats.megatron.agree import check_masters
from anyckpt.formats.megatron.distwrite import fit, write
from anyckpt.formats.megatron.optimizer import entries_of, inner_of
from anyckpt.formats.megatron.parts import EXTRA_STATE, decays, is_expert
from anyckpt.formats.megatron.ranks import arguments, topology_of
from anyckpt.formats.torch.saved import saved_object
from anyckpt.formats.torch.state import as_count
from anyckpt.formats.yamled import read_yaml
from anyckpt.io.paths import printable
from anyckpt.io.place import Place

__all__ = ["fit", "matches", "read", "verify", "write"]

BACKENDS = {"torch_dist": 1}
"""Backends of metadata.json that are read here, and their newest version."""
BRIDGE = "run_config.yaml"
_TAKEN = ("args", "iteration", "optimizer", "opt_param_scheduler")


@dataclass(frozen=True, slots=True)
class Stored:
    """What the sharded part of a checkpoint holds, by stored name. `facts`: of the container."""

    tensors: Mapping[str, Tensor]
    objects: Mapping[str, Any]
    facts: Mapping[str, Any]


def matches(place: Place) -> bool:
    """Whether a distributed checkpoint with a common.pt lies here or one iteration down."""
    return folders.is_megatron(place, ("torch_dist",))


def read(place: Place, report: Report) -> Checkpoint:
    """Read one iteration. Raises CheckpointError where common.pt or the metadata can't be read at all."""
    found = folders.locate(place, report)
    check_backend(found.place, report)
    root, facts = dcp.read_object(found.place, report)
    tensors = {name: value for name, value in root.items() if isinstance(value, Tensor)}
    objects = {name: value for name, value in root.items() if not isinstance(value, Tensor)}
    facts = {**facts, "form": "torch_dist", "folder": found.name}
    return assemble(place, found, Stored(tensors, objects, facts), report, "megatron-dist")


def check_backend(place: Place, report: Report) -> None:
    """What metadata.json says must be what is read here."""
    if "metadata.json" not in place.names:
        report.add(
            "incomplete", "there is no metadata.json, which is written last: the save did not finish",
            where=printable(str(place.path)), hint="use the iteration before it",
        )
        return
    said = place.read_json("metadata.json", report, code="bad-header")
    backend = said.get("sharded_backend") if isinstance(said, dict) else None
    if backend not in BACKENDS:
        raise fail(
            "unsupported", f"names the backend {printable(str(backend), limit=40)!r}; read are {', '.join(BACKENDS)}",
            where="metadata.json",
        )
    version = said.get("sharded_backend_version")
    if isinstance(version, int) and version > BACKENDS[backend]:
        report.add("unsupported-version", f"says version {version} of {backend}", where="metadata.json")


def assemble(place: Place, found: folders.Found, stored: Stored, report: Report, format: str) -> Checkpoint:
    """The checkpoint of what is stored sharded and of common.pt."""
    saved = saved_object(found.place.open("common.pt"), report)
    common = {str(k): v for k, v in saved.value.items()} if isinstance(saved.value, dict) else {}
    args = arguments(common.get("args"))
    branch = "Megatron-LM"
    if not args and BRIDGE in found.place.names:
        args, branch = _bridge_options(found.place, report), "Megatron-Bridge"
    spelling = stacked.spelling_of(args)
    weights = stacked.live_names(
        {n: t for n, t in stored.tensors.items() if stacked.slot_of(n) is None and not buckets.is_flat(n)}, spelling
    )
    iteration = common.get("iteration")
    iteration = iteration if isinstance(iteration, int) and not isinstance(iteration, bool) else None
    if found.iteration is not None and iteration not in (None, 0, found.iteration):
        report.add(
            "inconsistent", f"the folder is called {found.name or found.place.path.name}, "
            f"and its common.pt is of iteration {iteration}", where="common.pt",
        )  # fmt: skip
    topology = topology_of(args) if args else None
    optimizer = _optimizer(stored, common, weights, args, spelling, report)
    extra = {n: v for n, v in stored.objects.items() if f"{EXTRA_STATE}/" in n or n.endswith(EXTRA_STATE)}
    rng = {n: v for n, v in stored.objects.items() if n.startswith("rng_state")}
    others = {
        n: v for n, v in stored.objects.items() if n not in extra and n not in rng and not n.startswith(_OPTIMIZER)
    }
    state = {k: v for k, v in common.items() if k not in _TAKEN} | others
    if args:
        state["args"] = common.get("args", args)
    if extra:
        state["extra_state"] = extra
    steps = {"common_step": True} if has_common_step(common.get("optimizer")) else {}
    imports = tuple(dict.fromkeys((*stored.facts.get("imports", ()), *saved.imports)))
    return Checkpoint(
        format, str(place.path), weights, optimizer=optimizer, step=iteration,
        scheduler=common.get("opt_param_scheduler"), rng=rng or None, state=state, config=args or None,
        topology=topology,
        facts={**stored.facts, **steps, "param_state": _param_state(common), "branch": branch, "imports": imports},
    )  # fmt: skip


def _bridge_options(place: Place, report: Report) -> dict[str, Any]:
    """The model's options as Megatron-Bridge saves them, in a YAML file instead of `args`."""
    said = read_yaml(place.open(BRIDGE), report, code="bad-yaml")
    model = said.get("model") if isinstance(said, dict) else None
    return {str(k): v for k, v in model.items()} if isinstance(model, dict) else {}


_OPTIMIZER = ("optimizer.", "chained_")


def _optimizer(
    stored: Stored, common: Mapping[str, Any], weights: Mapping[str, Tensor], args: Mapping[str, Any],
    spelling: stacked.Spelling, report: Report,
) -> Optimizer | None:
    by_slot: dict[str, dict[str, Tensor]] = {}
    for name, tensor in stored.tensors.items():
        if (found := stacked.slot_of(name)) is not None:
            by_slot.setdefault(found[0], {})[found[1]] = tensor
    slots = {slot: _shaped(stacked.live_names(ts, spelling), weights, report) for slot, ts in by_slot.items()}
    groups = groups_of(common.get("optimizer"), weights)
    if any(buckets.is_flat(name) for name in (*stored.tensors, *stored.objects)):
        try:
            flat, own = buckets.read(stored.tensors, stored.objects, weights, args, report)
        except UsageError as error:
            report.add("inconsistent", f"the flat optimizer state can't be cut: {error}", where=".metadata")
            flat, own = {}, []
        for slot, tensors in flat.items():
            slots.setdefault(slot, {}).update(tensors)
        groups = groups or own
    if not slots and not groups:
        return None
    return Optimizer(slots, tuple(groups), KINDS.get(str(args.get("optimizer", "adam")), ""))


def _shaped(tensors: dict[str, Tensor], weights: Mapping[str, Tensor], report: Report) -> dict[str, Tensor]:
    """Slots in the shape of their parameters: those that were saved flat have one axis."""
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        weight = weights.get(name)
        if weight is not None and tensor.shape != weight.shape and tensor.size == weight.size:
            tensor = ops.reshape(tensor, weight.shape)
        elif weight is not None and tensor.shape != weight.shape:
            report.add(
                "shape-mismatch", f"optimizer state of {list(tensor.shape)} for a weight of {list(weight.shape)}",
                where=f"tensor {printable(name)}",
            )
            continue
        out[name] = tensor
    return out


def _param_state(common: Mapping[str, Any]) -> str:
    """How the distributed optimizer's state is stored, "" without one."""
    content = common.get("content_metadata")
    if isinstance(content, dict) and isinstance(content.get("distrib_optim_sharding_type"), str):
        return str(content["distrib_optim_sharding_type"])
    found = [e.get("param_state_sharding_type") for e in entries_of(common.get("optimizer")) if isinstance(e, dict)]
    return next((kind for kind in found if isinstance(kind, str)), "")


def has_common_step(saved: Any) -> bool:
    """Whether the step stands beside the groups, as torch's own Adam has it, not in them."""
    inner = [inner_of(entry) for entry in entries_of(saved)]
    return any(i is not None and isinstance(i.get("state"), dict) and "common_step" in i["state"] for i in inner)


def groups_of(saved: Any, weights: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """The optimizer's groups with the parameters that each is for, told by weight decay and kind: none are listed."""
    found: list[dict[str, Any]] = []
    entries = entries_of(saved)
    for entry in entries:
        inner = inner_of(entry)
        shared = inner.get("state") if inner else None
        step = as_count(shared.get("common_step")) if isinstance(shared, dict) else None
        for group in inner["param_groups"] if inner else ():
            if not isinstance(group, dict):
                continue
            rest = group.get("wd_mult", 1.0 if group.get("weight_decay") else 0.0) == 0
            for_experts = bool(group.get("is_expert_parallel"))
            names = [
                n for n, t in weights.items()
                if decays(n, t.ndim) != rest and (len(entries) == 1 or is_expert(n) == for_experts)
            ]
            options = {str(k): v for k, v in group.items() if k != "params"}
            if step is not None:
                options.setdefault("step", float(step))
            found.append({**options, "params": names})
    return found


def verify(place: Place, checkpoint: Checkpoint, report: Report) -> None:
    """Deep: every stored item, and masters that round to their weights."""
    found = folders.locate(place, Report())
    dcp.verify(found.place, checkpoint, report)
    check_masters(checkpoint, report)

