"""Write a Universal checkpoint: one file a parameter and slot, which DeepSpeed loads at any number of ranks and stage.

The folder map is in `universal`. Both kinds of model file are written, so that engines of every stage find theirs;
parameters have their shapes, which stage 3 flattens for itself. What DeepSpeed's loader leaves out or gets wrong is
told as a note: up to 0.19.8 it restores neither buffers nor frozen parameters, and in stage 3 it gives every parameter
group the hyperparameters of the first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from anyckpt.core.checkpoint import Checkpoint
from anyckpt.core.layout import FileLayout
from anyckpt.core.tensor import Tensor
from anyckpt.errors import UsageError
from anyckpt.finding import Finding
from anyckpt.formats.deepspeed import pickled
from anyckpt.formats.deepspeed.prepared import Prepared, prepare
from anyckpt.formats.deepspeed.tensor_parallel import without_padding
from anyckpt.formats.deepspeed.write_model import Universe, model_state, version
from anyckpt.formats.deepspeed.write_zero import clip_grad, companions, literal, options_for
from anyckpt.formats.table import WriteOptions
from anyckpt.pickle.reduce import Call, Name

UNIVERSAL_VERSION = 0.4


def write(checkpoint: Checkpoint, options: WriteOptions) -> list[FileLayout]:
    """The files to be. Raises UsageError and Refused where the checkpoint can't be written as such (`prepare`)."""
    prepared = prepare(checkpoint, options)
    if prepared.topology.ep > 1:
        raise UsageError(
            "a universal checkpoint can't tell the experts of several expert-parallel ranks apart",
            hint="write ZeRO for the ranks that are wanted: anyckpt reshard SRC DST --dp N",
        )
    if any(group.is_muon for group in prepared.groups):
        raise UsageError("DeepSpeed can't load Muon's momentum from a universal checkpoint", hint="use anyckpt reshard")
    notes = options.extra.get("findings")
    if isinstance(notes, list):
        notes += _notes(prepared)
    tag = f"global_step{prepared.step}_universal"
    files = [*_models(prepared), pickled.saved("zero/optimizer_state.pt", _global_state(prepared)), *_slots(prepared)]
    inside = [FileLayout(f"{tag}/{file.name}", file.size, file.parts, file.checksums) for file in files]
    return [literal("latest_universal", tag.encode()), *inside, *companions(checkpoint, prepared.topology, options)]


def _notes(prepared: Prepared) -> list[Finding]:
    notes = []
    if prepared.buffers or prepared.frozen:
        n = len(prepared.buffers) + len(prepared.frozen)
        message = f"DeepSpeed's universal loader leaves {n} buffers and frozen parameters as the fresh model has them"
        notes.append(Finding("lossy", "note", message, hint="anyckpt reshard writes folders that restore them"))
    options = [{k: v for k, v in group.options.items() if k != "name"} for group in prepared.groups]
    if any(one != options[0] for one in options[1:]):
        message = "loaded into ZeRO stage 3, DeepSpeed gives all parameter groups the hyperparameters of the first"
        notes.append(Finding("lossy", "note", message, hint="for stage 3 use: anyckpt reshard SRC DST --zero 3 --dp N"))
    return notes


def _models(prepared: Prepared) -> Iterator[FileLayout]:
    """mp_rank_TT_… with the module for stages 0-2, zero_pp_rank_0_… with placeholders for stage 3."""
    shapes = [dict.fromkeys(group.names) for group in prepared.groups]
    for zero, name in ((2, "mp_rank_{:02d}_model_states.pt"), (3, "zero_pp_rank_0_mp_rank_{:02d}_model_states.pt")):
        topology = replace(prepared.topology, zero=zero, dp=1, pp=1)
        own = {"universal_checkpoint_info": {"universal_checkpoint_version": UNIVERSAL_VERSION}, **prepared.own}
        ready = replace(prepared, topology=topology, own=own, layers={})
        for rank in range(topology.tp):
            universe = Universe(rank, rank, None, ready)
            local = [{n: universe.cut(n, prepared.weights[n]).shape for n in one} for one in shapes]
            yield pickled.saved(name.format(rank), model_state(universe, local, 0))


def _global_state(prepared: Prepared) -> dict[str, Any]:
    own = prepared.own
    groups = [{**options_for(g, prepared), "params": [i]} for i, g in enumerate(prepared.groups)]
    return {
        "loss_scaler": pickled.loss_scaler(own),
        "dynamic_loss_scale": bool(own.get("dynamic_loss_scale")),
        "overflow": bool(own.get("overflow")),
        "clip_grad": clip_grad(prepared),
        "zero_stage": pickled.stage(prepared.topology.zero),
        "ds_version": version(prepared),
        "param_groups": groups,
        # Stage 3 looks for the step and the hyperparameters here (stage3.py).
        "optimizer_state_dict": {
            "state": {i: dict(g.scalars) for i, g in enumerate(prepared.groups) if g.scalars}, "param_groups": groups,
        },
    }


def _slots(prepared: Prepared) -> Iterator[FileLayout]:
    for group in prepared.groups:
        for name in group.names:
            for slot, tensors in group.tensors.items():
                file = "fp32" if slot == "master" else slot
                yield pickled.saved(f"zero/{name}/{file}.pt", _described(name, tensors[name], prepared))
            for slot, tensor in group.scalars.items():
                yield pickled.saved(f"zero/{name}/{slot}.pt", tensor)


def _described(name: str, tensor: Tensor, prepared: Prepared) -> dict[str, Any]:
    """A parameter's tensor and how it is cut over tensor-parallel ranks."""
    rule = prepared.rules.rule(name)
    axis = min(rule.axis, max(tensor.ndim - 1, 0)) if rule.how != "unknown" else 0
    out: dict[str, Any] = {"cat_dim": axis}
    if rule.how == "vocabulary":
        tensor = without_padding(tensor, prepared.rules)
        out["vocab_tensor"] = True
    elif rule.how == "parts" and not rule.parts:
        out["param_n_sub_params"] = 2
    elif rule.how == "parts":
        shape = tuple(rule.parts if a == axis else n for a, n in enumerate(tensor.shape))
        state = {"patterns": [name], "shape": shape, "partition_dim": axis}
        cls = Name("deepspeed.checkpoint.universal_checkpoint", "SubparamShape")
        out["sub_param_shape"] = Call(cls, (), state=state, new=True)
    return {**out, "param": tensor}
