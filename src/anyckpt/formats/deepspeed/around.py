"""What stands around a step: scheduler and RNG files of the trainers that call DeepSpeed, config and tokenizer.

    HF Trainer     checkpoint-N/{latest, global_stepN/, config.json, scheduler.pt, rng_state[_R].pth, …}
    accelerate     DIR/{latest, pytorch_model/, scheduler.bin, random_states_R.pkl}
    tutorials      TAG/lr_scheduler.pt

The weights that such a folder may hold besides (model.safetensors) are copies of the step's. The other files travel
along when the step is written for other ranks (`facts["beside"]`), so that the trainer finds them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from anyckpt.core.checkpoint import Asset, Checkpoint
from anyckpt.finding import Report
from anyckpt.formats.deepspeed.files import LATEST, LATEST_UNIVERSAL
from anyckpt.formats.hf.beside import LEFTOVER, ROLES, look_beside, with_companions
from anyckpt.io.place import Place

_WEIGHTS = (".safetensors", ".bin")


def with_surroundings(place: Place, folder: Place, checkpoint: Checkpoint, report: Report) -> Checkpoint:
    """Add the training state beside the step, and judge every file there that a loader would unpickle."""
    loaded = set(folder.names) if folder is place else {
        name for name in place.names if place.kinds.get(name.partition("/")[0]) == "folder"
    }
    own = [name for name in place.names if "/" not in name and name.endswith(_WEIGHTS)]
    weights = {name for name in own if name.startswith(("model", "pytorch_model"))}
    beside = look_beside(place, loaded | weights, report)
    changes: dict[str, Any] = {}
    facts = dict(checkpoint.facts)
    scheduler = beside.of("scheduler")
    if checkpoint.scheduler is None and scheduler:
        changes["scheduler"] = next(iter(scheduler.values())) if len(scheduler) == 1 else scheduler
    rng = beside.of("rng")
    if rng:
        changes["rng"] = next(iter(rng.values())) if len(rng) == 1 else rng
    others = beside.of("other")
    if beside.trainer_state is not None:
        others["trainer_state.json"] = dict(beside.trainer_state)
    state = {**checkpoint.state, **others}
    if beside.imports:
        known = {item.path for item in checkpoint.facts.get("imports", ())}
        more = tuple(item for item in beside.imports if item.path not in known)
        facts["imports"] = (*checkpoint.facts.get("imports", ()), *more)
    checkpoint = with_companions(place, replace(checkpoint, state=state, **changes), report)
    taken = weights | {LATEST, LATEST_UNIVERSAL} | {asset.name for asset in checkpoint.assets}
    left = [name for name in place.names if "/" not in name and name not in taken] if folder is not place else []
    facts["beside"] = tuple(Asset(name, place.open(name)) for name in left if not LEFTOVER.fullmatch(name))
    return replace(checkpoint, facts=facts)


def is_rng(name: str) -> bool:
    """Whether a file beside a step holds the generators' states of one process."""
    return _has_role(name, "rng")


def is_scheduler(name: str) -> bool:
    """Whether a file beside a step holds a scheduler of the trainer's own, which DeepSpeed then has none of."""
    return _has_role(name, "scheduler")


def _has_role(name: str, wanted: str) -> bool:
    return any(role == wanted and pattern.fullmatch(name) for pattern, role in ROLES)
