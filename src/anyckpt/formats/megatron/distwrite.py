"""The `torch_dist` folder to be: one sharded checkpoint that Megatron loads at any layout.

    iter_NNNNNNN/{metadata.json, common.pt, .metadata, __R_0.distcp}      see `dist`
    latest_checkpointed_iteration.txt

Tensors are whole under stacked names; a chunk is what one tensor rank has of one layer (and expert), in the file of the
rank that would have written it, so that a run of this layout reads no more than its own. The distributed optimizer is
written `fully_reshardable`. Objects `_extra_state`, which a loader asks for by name, are empty, as local layers and
Transformer Engine without fp8 save them; those that the source has are kept.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from anyckpt.core import ops
from anyckpt.core.box import Shape
from anyckpt.core.checkpoint import Checkpoint, Optimizer
from anyckpt.core.dtypes import DTYPES
from anyckpt.core.layout import FileLayout, Part
from anyckpt.core.tensor import Tensor, from_array
from anyckpt.core.topology import Topology
from anyckpt.formats.dcp.write import Chunked, folder
from anyckpt.formats.megatron import folders, parts, stacked
from anyckpt.formats.megatron.fit import fit as fit_layout
from anyckpt.formats.megatron.fit import note, refuse_unknown
from anyckpt.formats.megatron.ranks import topology_of
from anyckpt.formats.megatron.spread import n_experts, n_layers, registered
from anyckpt.formats.megatron.write import (
    complete_slots,
    namespace,
    options_of,
    step_of,
)
from anyckpt.formats.table import WriteOptions
from anyckpt.formats.torch.plain import Replacements
from anyckpt.formats.torch.zipwrite import archive
from anyckpt.sharding.pp import layer_counts
from anyckpt.sharding.tp import even_parts, halve, is_expert, is_gated

__all__ = ["fit", "write"]

BACKEND = {
    "sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch",
    "common_backend_version": 1,
}  # fmt: skip
_MODULES = ("self_attention.linear_proj", "self_attention.linear_qkv", "mlp.linear_fc1", "mlp.linear_fc2")
_EXPERT_MODULES = ("mlp.experts.experts.linear_fc1", "mlp.experts.experts.linear_fc2")
_ENGINE_MODULES = ("self_attention.core_attention", "self_attention.q_layernorm", "self_attention.k_layernorm")
"""Modules with a state of their own beside their parameters, the last ones with Transformer Engine only."""
_SLOT_NAMES = {True: {"master": "param"}, False: {"master": "fp32_param"}}


def fit(checkpoint: Checkpoint, options: WriteOptions) -> Checkpoint:
    """As `fit.fit`, under core's names: models from before core have no such checkpoints."""
    fitted = fit_layout(checkpoint, replace(options, extra={**options.extra, "core_names": True}))
    return replace(fitted, config={**(fitted.config or {}), "use_legacy_models": False})


def write(checkpoint: Checkpoint, options: WriteOptions) -> list[FileLayout]:
    """The files to be. `checkpoint` is fitted to the layout (`fit`).

    Raises UsageError where a dimension does not divide, Refused where the optimizer's state is not complete.
    """
    args = dict(checkpoint.config or {})
    refuse_unknown(args)
    topology = checkpoint.topology or topology_of(args)
    training = bool(options.extra.get("training")) and checkpoint.optimizer is not None
    is_release = checkpoint.step is None
    iteration = "release" if is_release else f"iter_{checkpoint.step:07d}"
    shape = _Shape(checkpoint.weights, args, topology)
    values: dict[str, Any] = dict(_tensors(checkpoint.weights, "", shape))
    if training:
        assert checkpoint.optimizer is not None
        flat = bool(args.get("use_distributed_optimizer"))
        for slot, tensors in _slots(checkpoint, flat).items():
            values.update(_tensors(tensors, f"optimizer.state.{_SLOT_NAMES[flat].get(slot, slot)}.", shape))
    values.update(_extra_state(checkpoint, shape))
    rng = _kept_rng(checkpoint, topology, options)
    values.update({name: Replacements([]).plain(value) for name, value in rng.items()})
    common = _common(checkpoint, args, topology, training, bool(rng))
    n_ranks = topology.tp * topology.cp * topology.dp * topology.pp
    files = folder(values, n_ranks)
    metadata = json.dumps(BACKEND).encode()
    tracker = ("release" if is_release else str(checkpoint.step)).encode()
    files = [
        archive(common, "common"), *files, FileLayout("", len(metadata), (Part(0, len(metadata), metadata),)),
    ]  # fmt: skip
    names = ["common.pt", *(f.name for f in files[1:-1]), "metadata.json"]
    placed = [
        FileLayout(f"{iteration}/{name}", f.size, f.parts, f.checksums) for name, f in zip(names, files, strict=True)
    ]
    return [*placed, FileLayout(folders.TRACKER, len(tracker), (Part(0, len(tracker), tracker),))]


class _Shape:
    """What the layout makes of this model: counted once. `per_layer`: layers differ, and so are stored one by one."""

    def __init__(self, weights: Mapping[str, Tensor], args: Mapping[str, Any], topology: Topology) -> None:
        self.weights, self.topology = weights, topology
        self.n_layers, self.n_experts = n_layers(weights), n_experts(weights)
        self.fuse = args.get("transformer_impl") == "local"
        self.engine = not self.fuse
        self.stage_of = _stages(self.n_layers, topology)
        places: dict[str, set[int]] = {}
        shapes: dict[str, set[Shape]] = {}
        for name, tensor in weights.items():
            key, layer, _ = stacked.stored_name(name, fuse=self.fuse)
            if layer is not None and parts.layer_of(name) is not None:
                places.setdefault(key, set()).add(layer)
                shapes.setdefault(key, set()).add(tensor.shape)
        self.per_layer = any(len(found) != self.n_layers for found in places.values()) or any(
            len(found) > 1 for found in shapes.values()
        )


def _stages(n: int, topology: Topology) -> list[int]:
    """The pipeline rank of each layer."""
    counts = layer_counts(n, topology.pp, topology.vpp)
    return [p for (p, _), size in counts.items() for _ in range(size)]


def _tensors(tensors: Mapping[str, Tensor], prefix: str, shape: _Shape) -> Iterator[tuple[str, Chunked]]:
    """Stored name -> its chunks."""
    found: dict[str, list[tuple[Shape, int, str, Tensor]]] = {}
    for name in registered(tensors):
        tensor = tensors[name]
        key, layer, expert = stacked.stored_name(name, fuse=shape.fuse)
        if layer is not None and shape.per_layer:
            key = key.replace("layers.", f"layers.{layer}.", 1)
        lead = () if layer is None or shape.per_layer else (layer,)
        lead = lead if expert is None else (*lead, expert)
        stage = shape.stage_of[layer] if layer is not None else 0 if "embedding" in name else shape.topology.pp - 1
        found.setdefault(prefix + key, []).append((lead, stage, name, tensor))
    for key, own in found.items():
        first = own[0][3]
        sizes = tuple(max(lead[a] for lead, *_ in own) + 1 for a in range(len(own[0][0])))
        chunks: list[tuple[int, Shape, Tensor]] = []
        for at, stage, name, tensor in own:
            for rank, start, part in _cut(name, tensor, stage, shape):
                whole = ops.reshape(part, (*(1 for _ in at), *part.shape))
                chunks.append((rank, (*at, *start), whole))
        yield key, Chunked(first.dtype, (*sizes, *first.shape), tuple(chunks))


def _cut(name: str, tensor: Tensor, stage: int, shape: _Shape) -> Iterator[tuple[int, Shape, Tensor]]:
    """A layer's tensor in the parts that tensor ranks have: (rank, start, part)."""
    topology = shape.topology
    first_rank = stage * topology.tp * topology.cp * topology.dp
    partition = parts.partition_of(name, shape.weights) or "replicated"
    expert = parts.expert_of(name)
    if expert is not None and shape.n_experts:
        first_rank += topology.etp * (expert[1] // max(1, shape.n_experts // topology.ep))
    n_ranks = topology.etp if is_expert(partition) else topology.tp
    axis = 1 if partition.endswith("row") else 0
    halves = halve(tensor) if is_gated(partition) else (tensor,)
    divides = tensor.ndim > axis and halves[0].shape[axis] % n_ranks == 0
    if partition == "replicated" or n_ranks == 1 or not divides:
        yield first_rank, (0,) * tensor.ndim, tensor
        return
    at = 0
    for half in halves:
        for rank, part in enumerate(even_parts(half, axis, n_ranks)):
            start = tuple(at if a == axis else 0 for a in range(tensor.ndim))
            yield first_rank + rank, start, part
            at += part.shape[axis]


def _slots(checkpoint: Checkpoint, flat: bool) -> dict[str, Mapping[str, Tensor]]:
    """Slots as they are stored; the distributed optimizer has a master of every parameter."""
    optimizer = checkpoint.optimizer
    assert optimizer is not None
    complete_slots(checkpoint)
    slots: dict[str, Mapping[str, Tensor]] = {s: t for s, t in optimizer.slots.items() if s != "step"}
    if flat:
        masters = slots.get("master", {})
        fp32 = DTYPES["float32"]
        slots["master"] = {n: masters.get(n) or ops.cast(t, fp32) for n, t in checkpoint.weights.items()}
    return slots


def _common(
    checkpoint: Checkpoint, args: dict[str, Any], topology: Topology, training: bool, has_rng: bool
) -> dict[str, Any]:
    """common.pt: everything that is not sharded."""
    flat = bool(args.get("use_distributed_optimizer")) and training
    content: dict[str, Any] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    if flat:
        content = {
            "distrib_optim_sharding_type": "fully_reshardable", "distrib_optim_fully_reshardable_mem_efficient": False,
        } | content  # fmt: skip
    saved = {
        **args, "ckpt_format": "torch_dist", "use_dist_ckpt": True, "no_save_rng": not has_rng or None,
        "no_save_optim": not training or None,
    }  # fmt: skip
    common: dict[str, Any] = {
        "args": namespace(saved), "checkpoint_version": 3.0, "iteration": checkpoint.step or 0,
        "num_floating_point_operations_so_far": checkpoint.state.get("num_floating_point_operations_so_far", 0),
        "content_metadata": content,
    }  # fmt: skip
    if training:
        assert checkpoint.optimizer is not None
        common["optimizer"] = _optimizer(checkpoint, checkpoint.optimizer, topology, flat)
        if checkpoint.scheduler is not None:
            common["opt_param_scheduler"] = Replacements([]).plain(checkpoint.scheduler)
    return common


def _optimizer(checkpoint: Checkpoint, optimizer: Optimizer, topology: Topology, flat: bool) -> Any:
    """The part of the optimizer that is not sharded: groups without parameters, and the step."""
    kinds = [False, True] if topology.ep > 1 and n_experts(checkpoint.weights) else [False]
    step = step_of(optimizer)
    scaler = checkpoint.state.get("grad_scaler")
    entries: list[dict[str, Any]] = []
    for for_experts in kinds:
        groups = []
        for decayed in (True, False):
            if any(
                parts.decays(n, t.ndim) == decayed and (len(kinds) == 1 or parts.is_expert(n) == for_experts)
                for n, t in checkpoint.weights.items()
            ):
                groups.append(options_of(optimizer, decayed, for_experts))
        if flat:
            entry: dict[str, Any] = {
                "optimizer": {"param_groups": [{**g, "step": step} for g in groups]},
                "param_state_sharding_type": "fully_reshardable",
            }
        else:
            by_step = "step" in optimizer.slots or "common_step" in checkpoint.facts
            state = {"common_step": from_array(np.array(step, np.float32))} if by_step else {}
            own = groups if by_step else [{**g, "step": step} for g in groups]
            inner = {"state": state, "param_groups": own}
            entry = {"optimizer": inner} if "master" in optimizer.slots else inner
        entries.append(entry | ({"grad_scaler": scaler} if scaler else {}))
    return entries[0] if len(entries) == 1 else dict(enumerate(entries))


def _extra_state(checkpoint: Checkpoint, shape: _Shape) -> dict[str, Any]:
    """The objects that a loader asks for by name."""
    saved = checkpoint.state.get("extra_state")
    kept = {
        n: Replacements([]).plain(v) for n, v in saved.items() if "/shard_" in n
    } if isinstance(saved, dict) and not shape.per_layer else {}
    found: dict[str, Any] = {}
    empty = from_array(np.zeros(0, np.uint8)) if shape.engine else None
    modules = (*_MODULES, *(_ENGINE_MODULES if shape.engine else ()))
    for layer in range(shape.n_layers):
        for module in modules:
            found[_object(module, shape, layer)] = [empty]
        for module in _EXPERT_MODULES if shape.n_experts else ():
            for expert in range(shape.n_experts):
                found[_object(module, shape, layer, expert)] = [empty]
    if shape.engine:
        found["decoder.final_layernorm._extra_state/shard_0_1"] = [empty]
    return found | kept


def _object(module: str, shape: _Shape, layer: int, expert: int | None = None) -> str:
    """The name of one module's object, with its place in the grid of layers and experts."""
    grid = [] if shape.per_layer else [(layer, shape.n_layers)]
    grid += [] if expert is None else [(expert, shape.n_experts)]
    grid = grid or [(0, 1)]
    stack = f"decoder.layers.{layer}" if shape.per_layer else "decoder.layers"
    index, size = (".".join(str(pair[i]) for pair in grid) for i in (0, 1))
    return f"{stack}.{module}.{parts.EXTRA_STATE}/shard_{index}_{size}"


def _kept_rng(checkpoint: Checkpoint, topology: Topology, options: WriteOptions) -> dict[str, Any]:
    """RNG states by their stored names, where they are of this very layout."""
    saved = checkpoint.rng if isinstance(checkpoint.rng, dict) else {}
    found = {n: v for n, v in saved.items() if (place := stacked.shard_of(str(n))) is not None
             and place[2][:2] == (topology.pp, topology.tp)}  # fmt: skip
    if found and len(found) == prod(stacked.shard_of(next(iter(found)))[2]):  # type: ignore[index]
        return found
    told = options.extra.get("findings")
    if isinstance(told, list) and checkpoint.step is not None and checkpoint.rng is not None:
        told.append(note("lossy", "RNG states belong to ranks of one layout and are left out"))
    return {}
