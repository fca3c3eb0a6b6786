"""NeMo folders: what NeMo 2 saves, and a `.nemo` that was unpacked.

    NeMo 2    weights/          torch_dist (older: zarr); names begin with "module."
              context/          model.yaml, io.json and pickles that build Python objects; nemo_tokenizer/
    NeMo 1    model_config.yaml, model_weights.ckpt or ranks of it: see `formats.nemo`

Nothing in context/ is imported: model.yaml is read as data, the pickles are judged. Source: NeMo 2.0 to 2.4.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from anyckpt.core.checkpoint import Asset, Checkpoint, Optimizer
from anyckpt.errors import CheckpointError
from anyckpt.finding import Report
from anyckpt.formats import of_file, read_file
from anyckpt.formats.megatron import dist, zarr
from anyckpt.formats.megatron.folders import form_of
from anyckpt.formats.megatron.ranks import topology_of
from anyckpt.formats.nemo.config import read_config
from anyckpt.formats.nemo.weights import CONFIG, is_weights, plain_names, read_weights
from anyckpt.io.place import Place

_WEIGHTS, _CONTEXT = "weights/", "context/"
_TOKENIZER = re.compile(r"context/nemo_tokenizer/([^/]+)")


def matches(place: Place) -> bool:
    """Whether weights/ and context/ lie here, or what a .nemo holds."""
    if any(name.startswith(_CONTEXT) for name in place.names) and form_of(place, _WEIGHTS) in ("torch_dist", "zarr"):
        return True
    return CONFIG in place.names and any(is_weights(name) for name in place.names)


def read(place: Place, report: Report) -> Checkpoint:
    """Read the folder. Raises CheckpointError where its weights can't be described."""
    if CONFIG in place.names:
        config = read_config(place, CONFIG, report)
        found = read_weights(place, config, report)
        return replace(found, format="nemo-folder", config=config, facts={**found.facts, "branch": "NeMo 1"})
    inner = place.subplace("weights")
    form = form_of(inner)
    checkpoint = dist.read(inner, report) if form == "torch_dist" else zarr.read(inner, report)
    model = read_config(place, "context/model.yaml", report)
    config = model.get("config") if isinstance(model, dict) and isinstance(model.get("config"), dict) else model
    config = {str(k): v for k, v in config.items()} if isinstance(config, dict) else None
    _judge_context(place, report)
    state = dict(checkpoint.state)
    step = state.pop("global_step", None)
    epoch = state.pop("epoch", None)
    assets = tuple(Asset(m[1], place.open(n)) for n in place.names if (m := _TOKENIZER.fullmatch(n)))
    return replace(
        checkpoint, format="nemo-folder", path=str(place.path), weights=plain_names(checkpoint.weights),
        optimizer=_plain_optimizer(checkpoint.optimizer), config=config or checkpoint.config,
        step=step if isinstance(step, int) else checkpoint.step, epoch=epoch if isinstance(epoch, int) else None,
        topology=topology_of(config) if config else checkpoint.topology, state=state, assets=assets,
        facts={**checkpoint.facts, "branch": "NeMo 2"},
    )  # fmt: skip


def _plain_optimizer(optimizer: Optimizer | None) -> Optimizer | None:
    if optimizer is None:
        return None
    groups: list[Mapping[str, Any]] = []
    for group in optimizer.groups:
        names = plain_names(dict.fromkeys(group["params"]))
        groups.append({**group, "params": list(names)})
    slots = {slot: plain_names(tensors) for slot, tensors in optimizer.slots.items()}
    return replace(optimizer, slots=slots, groups=tuple(groups))


def _judge_context(place: Place, report: Report) -> None:
    """What a loader of the context would have to import: its files are pickles, whatever they are called."""
    for name in place.names:
        if not name.startswith(_CONTEXT) or _TOKENIZER.fullmatch(name):
            continue
        try:
            file = place.open(name)
            row = of_file(file) if file.size else None
            if row is not None and row.name not in ("safetensors", "npy"):
                found = Report()
                read_file(file, found)
                report.worsen(found.verdict)
                report.extend(f for f in found.findings if f.code in ("dangerous-code", "unknown-code"))
        except CheckpointError as error:
            if error.finding.code != "not-a-checkpoint":
                report.extend([error.finding])


def verify(place: Place, checkpoint: Checkpoint, report: Report) -> None:
    """Deep: what the form of the weights checks."""
    if CONFIG not in place.names and form_of(place, _WEIGHTS) == "torch_dist":
        dist.verify(place.subplace("weights"), checkpoint, report)
