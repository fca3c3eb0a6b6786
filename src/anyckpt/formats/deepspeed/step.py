"""One saved step, put together: from its files to a Checkpoint of whole tensors by name.

Every model-parallel rank (`mp_rank_TT`) is read for itself: its weights, and its optimizer joined over the
data-parallel ranks. Then tensor-parallel ranks are merged by the patterns that the run saved, and pipeline stages are
laid side by side. What `weights` holds is the live model's own copy:

    stages 0-2   the model file's
    stage 3      the master rounded to the element type of the placeholder, as training does
    pipeline     the layer files', named by the number of the layer
    experts      the expert files'; names in the optimizer's groups are local to a rank and get their global number
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from anyckpt.core import ops
from anyckpt.core.box import Shape
from anyckpt.core.checkpoint import Checkpoint, Optimizer
from anyckpt.core.topology import Topology
from anyckpt.finding import Report
from anyckpt.formats.deepspeed import experts, pipeline, tensor_parallel
from anyckpt.formats.deepspeed.contents import (
    Step,
    check_ranks,
    compute_dtype,
    degrees,
    load,
    n_ranks_of,
    named_of,
    patterns_of,
    stage_of,
)
from anyckpt.formats.deepspeed.files import parts_in
from anyckpt.formats.deepspeed.joined import Joined, add_groups, frozen_weights, joined_optimizer, merged_stages
from anyckpt.formats.deepspeed.load import Loader, mapping, sequence, tensor_of
from anyckpt.formats.deepspeed.partitions import packed_group, split_by_length, striped_group
from anyckpt.formats.deepspeed.unpartitioned import read_unpartitioned
from anyckpt.formats.torch.sharing import ties, weights_only_obstacles
from anyckpt.formats.torch.state import as_count
from anyckpt.io.paths import printable
from anyckpt.io.place import Place

OWN_KEYS = frozenset(
    """
    module buffer_names optimizer param_shapes frozen_param_shapes shared_params frozen_param_fragments lr_scheduler
    data_sampler random_ltd sparse_tensor_module_names skipped_steps global_steps global_samples dp_world_size
    mp_world_size checkpoint_parallel_dimensions ds_config ds_version num_experts ds_autoep_layers
    universal_checkpoint_info
    """.split()
)
"""Keys of a model file that are DeepSpeed's; all others are the client's (`engine.py`, `_save_checkpoint`)."""

KEPT_KEYS = (
    "skipped_steps", "global_samples", "data_sampler", "random_ltd", "ds_config", "ds_version", "num_experts",
    "universal_checkpoint_info", "sparse_tensor_module_names",
)
OPTIMIZER_KEYS = ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad")


def read_step(place: Place, report: Report) -> Checkpoint:
    """Describe the step in this folder. Raises CheckpointError only where the folder can't be listed."""
    loader = Loader(place, report)
    step = load(loader, parts_in(place.names), report)
    stage = stage_of(step)
    n_ranks = n_ranks_of(step, stage)
    check_ranks(step, stage, n_ranks, report)
    tp, pp = degrees(step)
    every = [_of_rank(step, mp, stage, n_ranks, report) for mp in range(tp * pp)]
    rules = tensor_parallel.Rules.of(step.first.get("universal_checkpoint_info") or patterns_of(step))
    stages = [tensor_parallel.merged(every[i * tp : (i + 1) * tp], rules, report) for i in range(pp)]
    model = merged_stages(stages)
    if step.layers:
        pipeline.add_layers(model, step.layers, [named_of(step.model(i * tp)) for i in range(pp)], tp, rules, report)
    if step.experts:
        experts.add_weights(model, step.experts)
    optimizer = _optimizer(step, model, tp, pp, report)
    first = next(iter(step.optims.values()), {})
    ep = experts.parallel_size(first, n_ranks) if first else max(1, len(step.expert_optims))
    kept = {key: value for one in list(first.values())[:1] for key, value in one.items() if key in OPTIMIZER_KEYS}
    topology = Topology(tp=tp, pp=pp, dp=n_ranks, ep=ep, zero=max(stage, 0))
    found = assemble(place, step, loader, report, topology, {**kept, **model.kept})
    aliases = {a: b for a, b in model.aliases.items() if a in model.weights and b in model.weights}
    for alias, name in aliases.items():
        report.add("tied", f"{printable(alias)} is {printable(name)}", where=step.names.get(("model", 0, 0), ""))
    facts = {
        "container": "BF16_Optimizer" if stage < 0 else f"ZeRO-{stage}" if stage else "no ZeRO",
        "zero_stage": stage, "stages": model.stages if step.layers else (), "layers": model.layers,
    }
    return replace(
        found, weights=model.weights, aliases=aliases, optimizer=optimizer, facts={**found.facts, **facts},
        findings=tuple(report.findings),
    )


def _of_rank(step: Step, mp: int, stage: int, n_ranks: int, report: Report) -> Joined:
    """One model-parallel rank: weights as far as model files hold them, and its optimizer joined."""
    model, states = step.model(mp), step.optims.get(mp, {})
    out = Joined()
    named = named_of(model) or named_of(next(iter(states.values()), {}))  # very old files have them with the optimizer
    where = step.names.get(("optim", mp, min(states, default=0)), "")
    if states and stage == 3:
        first = next(iter(states.values()))
        lengths = [t.size for value in sequence(first.get("fp32_flat_groups")) if (t := tensor_of(value)) is not None]
        named = split_by_length(named, lengths, lambda size: -(-size // n_ranks))
        for index, one in enumerate(named):
            add_groups(out, [striped_group(index, n_ranks, states, one, report, where)])
    elif states:
        named = split_by_length(named, _unpadded(states, n_ranks), int)
        sizes = experts.local_counts(named)
        for index, one in enumerate(named):
            n_copies = experts.copies(next(iter(states.values())), index, n_ranks)
            shares = [experts.global_names(one, x, sizes) if n_copies > 1 else one for x in range(n_copies)]
            add_groups(
                out,
                [
                    packed_group(index, range(x, n_ranks, n_copies), states, share, report, where)
                    for x, share in enumerate(shares)
                ],
                shuffled=stage > 0 and _is_round_robin(step),
            )
    _weights(step, mp, out, stage, n_ranks, report)
    return out


def _is_round_robin(step: Step) -> bool:
    config = mapping(mapping(step.first.get("ds_config")).get("zero_optimization"))
    return bool(config.get("round_robin_gradients"))


def _unpadded(states: Mapping[int, Mapping[str, Any]], n_ranks: int) -> list[int]:
    """Elements of each group without padding, as far as the masters tell."""
    out: list[int] = []
    for state in states.values():
        for i, value in enumerate(sequence(state.get("single_partition_of_fp32_groups"))):
            tensor = tensor_of(value)
            if i == len(out):
                out.append(0)
            out[i] += tensor.size if tensor is not None else 0
    return out


def _weights(step: Step, mp: int, out: Joined, stage: int, n_ranks: int, report: Report) -> None:
    """The model file's weights; in stage 3 what the placeholders stand for."""
    model = step.model(mp)
    where = step.names.get(("model", mp, 0), "")
    shared = {str(a): str(b) for a, b in mapping(model.get("shared_params")).items()}
    module = {str(k): t for k, v in mapping(model.get("module")).items() if (t := tensor_of(v)) is not None}
    if stage != 3:
        out.weights = module
        out.aliases = {a: b for a, b in shared.items() if a in module and b in module}
        found = ties(module)
        taken = set(out.aliases) | set(out.aliases.values())
        out.aliases |= {a: b for a, b in found.items() if a not in taken}
        return
    masters = out.slots.get("master", {})
    frozen = frozen_weights(step.models.get(mp, {}), n_ranks)
    buffers = {str(name) for name in sequence(model.get("buffer_names"))}
    usual = compute_dtype(step)
    lost: list[str] = []
    for name, placeholder in {**module, **{n: None for n in (*masters, *frozen) if n not in module}}.items():
        dtype = placeholder.dtype if placeholder is not None else usual
        if name in masters:
            out.weights[name] = ops.cast(masters[name], dtype)
        elif name in frozen:
            out.weights[name] = frozen[name]
        elif name in shared:
            out.aliases[name] = shared[name]
            out.weights[name] = placeholder  # type: ignore[assignment]  # its place in the order
        elif placeholder is not None and (placeholder.size or name in buffers):
            out.weights[name] = placeholder
        else:
            lost.append(name)
    for alias in [a for a in (*out.aliases, *shared) if a in out.weights or a in module]:
        source = out.weights.get(shared[alias])
        if source is None:
            lost.append(alias)
            out.weights.pop(alias, None)
            out.aliases.pop(alias, None)
        else:
            out.weights[alias] = source
            out.aliases[alias] = shared[alias]
    if lost and masters:
        more = f", and {len(lost) - 1} more" if len(lost) > 1 else ""
        report.add(
            "missing-tensor", f"{printable(lost[0])}{more}: the model file holds an empty placeholder, and no other "
            "file has the values", where=where, hint="a frozen parameter that was left out of the save is in no file",
        )


def _optimizer(step: Step, model: Joined, tp: int, pp: int, report: Report) -> Optimizer | None:
    if step.optims:
        return joined_optimizer(model)
    if step.expert_optims:
        return experts.read_optimizers(step.expert_optims, model, report)
    saved = [step.model(i * tp).get("optimizer") for i in range(pp)]
    if not any(isinstance(one, dict) for one in saved) or tp > 1:
        return None
    buffers = {str(name) for mp in step.models for name in sequence(step.model(mp).get("buffer_names"))}
    where = step.names.get(("model", 0, 0), "")
    optimizer, kept = read_unpartitioned([mapping(one) for one in saved], model, buffers, report, where)
    model.kept.update(kept)
    return optimizer


def assemble(
    place: Place, step: Step, loader: Loader, report: Report, topology: Topology, kept: Mapping[str, Any]
) -> Checkpoint:
    """What the model file holds beside the weights; `kept` is DeepSpeed's own state from elsewhere."""
    first = step.first
    state: dict[str, Any] = {key: value for key, value in first.items() if key not in OWN_KEYS}
    state["deepspeed"] = {**kept, **{key: first[key] for key in KEPT_KEYS if first.get(key) is not None}}
    stages = [sequence(files[min(files)].get("buffer_names")) for files in step.models.values() if files]
    state["deepspeed"]["buffer_names"] = list(dict.fromkeys(str(name) for names in stages for name in names))
    imports = tuple(loader.imports)
    return Checkpoint(
        format="deepspeed", path=str(place.path), weights={}, step=as_count(first.get("global_steps")),
        epoch=as_count(state.get("epoch")), scheduler=first.get("lr_scheduler"), state=state, topology=topology,
        findings=tuple(report.findings), verdict=report.verdict,
        facts={
            "imports": imports, "weights_only": weights_only_obstacles(imports, ()),
            "framework": f"DeepSpeed {first.get('ds_version', '')}".strip(),
        },
    )


def model_shapes(step: Step) -> list[dict[str, Shape]]:
    """`param_shapes` of all pipeline stages, one dict a flat group."""
    _, pp = degrees(step)
    tp = max(1, len(step.models) // pp)
    return [one for i in range(pp) for one in named_of(step.model(i * tp))]
