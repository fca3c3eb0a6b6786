"""Accelerate and Trainer folders with FSDP inside: the model and each optimizer in a folder, or in a file a rank.

    pytorch_model_fsdp_0/  optimizer_0/                        DCP each, under the root keys `model` and `optimizer`
    pytorch_model_fsdp_0_rank0.bin  optimizer_0_rank0.bin      use_dcp=False: `formats.ranks` reads those
    scheduler.bin  random_states_R.pkl  scaler.pt …            save_state
    scheduler.pt   rng_state_R.pth  trainer_state.json …       transformers' Trainer

FULL_STATE_DICT saves are ordinary files (`formats.hf`). Source: accelerate 1.15 `utils/fsdp_utils.py`.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from anyckpt.core.checkpoint import Checkpoint
from anyckpt.core.topology import Topology
from anyckpt.errors import CheckpointError
from anyckpt.finding import Report
from anyckpt.formats import dcp, manifests
from anyckpt.formats.hf import beside as others
from anyckpt.formats.torch.optimizer import is_optimizer
from anyckpt.formats.torch.state import read_state
from anyckpt.io.paths import printable
from anyckpt.io.place import Place

_MODEL = re.compile(r"pytorch_model_fsdp_(\d+)")
_OPTIMIZER = re.compile(r"optimizer_(\d+)")


def matches(place: Place) -> bool:
    """A folder for the model that DCP wrote."""
    return any(_MODEL.fullmatch(name) for name in _folders(place))


def _folders(place: Place) -> list[str]:
    return sorted(name for name, kind in place.kinds.items() if kind == "folder" and "/" not in name)


def read(place: Place, report: Report) -> Checkpoint:
    """Read model, optimizers and what lies beside as one. Raises CheckpointError where the model can't be read."""
    manifests.check_names(place, report)
    models = [name for name in _folders(place) if _MODEL.fullmatch(name)]
    optimizers = [name for name in _folders(place) if _OPTIMIZER.fullmatch(name)]
    inner, facts = dcp.read_object(place.subplace(models[0]), report)
    root: dict[str, Any] = {"model": inner["model"] if isinstance(inner.get("model"), dict) else inner}
    parts = {models[0]: facts["elements"]}
    for other in models[1:]:
        message = f"a second model; {printable(models[0])} is read"
        report.add("ambiguous", message, where=printable(other), hint=f"name it: {place.path / other}")
    for name in optimizers:
        try:
            saved, more = dcp.read_object(place.subplace(name), report)
        except CheckpointError as error:
            report.extend([error.finding])
            continue
        parts[name] = more["elements"]
        facts["imports"] = (*facts["imports"], *more["imports"])
        value = saved.get("optimizer", saved)
        root["optimizer" if len(optimizers) == 1 else name] = value if is_optimizer(value) else saved
    facts["parts"] = parts
    checkpoint = read_state(root, format="accelerate", path=str(place.path), report=report, facts=facts)
    inside = {n for n in place.names if n.split("/", 1)[0] in (*models, *optimizers)}
    beside = others.look_beside(place, inside, report)
    step, epoch = others.step_of(beside, checkpoint.optimizer, report)
    state: dict[str, Any] = {**checkpoint.state, **beside.of("other")}
    if beside.trainer_state is not None:
        state["trainer_state.json"] = beside.trainer_state
    ranks = facts["ranks"]
    checkpoint = replace(
        checkpoint, step=checkpoint.step if step is None else step, epoch=checkpoint.epoch if epoch is None else epoch,
        scheduler=_one(beside.of("scheduler")), rng=_one(beside.of("rng")), state=state,
        topology=Topology(world=ranks) if ranks > 1 else None,
    )
    return others.with_companions(place, checkpoint, report)


def _one(objects: dict[str, Any]) -> Any:
    """A single object, or several by file name, or None."""
    return next(iter(objects.values())) if len(objects) == 1 else dict(objects) or None


def verify(place: Place, checkpoint: Checkpoint, report: Report) -> None:
    """Deep: every item of every folder."""
    for name, elements in checkpoint.facts.get("parts", {}).items():
        one = replace(checkpoint, facts={**checkpoint.facts, "elements": elements})
        dcp.verify(place.subplace(name), one, report)
    manifests.verify(place, report)
