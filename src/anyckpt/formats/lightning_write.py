"""Write a Lightning `.ckpt`: one torch.save file that `load_from_checkpoint` and `Trainer.fit(ckpt_path=…)` take.

    epoch  global_step  pytorch-lightning_version  state_dict  optimizer_states [..]  lr_schedulers [..]
    loops {fit_loop: progress}  callbacks {}  hparams_name  hyper_parameters      and whatever else was saved

What a Lightning checkpoint held is written as it was. For another source, loops are made of its step and epoch: as if
training stopped at the start of that epoch, since where in its data it was is not known. Reading needs no row of its
own: such a file is an ordinary one of torch.save.
Source: lightning 2.6 `pytorch/trainer/connectors/checkpoint_connector.py` and `pytorch/loops/progress.py`.
"""

from __future__ import annotations

from typing import Any

from anyckpt.core.checkpoint import Checkpoint
from anyckpt.core.layout import FileLayout
from anyckpt.core.source import File
from anyckpt.formats.dcp.write import for_torch
from anyckpt.formats.table import WriteOptions
from anyckpt.formats.torch import zipwrite
from anyckpt.formats.torch.plain import Replacements

VERSION = "2.6.0"
_OURS = ("state_dict", "optimizer_states", "lr_schedulers", "epoch", "global_step")


def matches(file: File, head: bytes) -> bool:
    """Never: `formats.torch` reads these files."""
    return False


def write(checkpoint: Checkpoint, options: WriteOptions) -> list[FileLayout]:
    """The one file to be. Raises Refused for optimizer state that torch has no plain form for."""
    replaced = options.extra.get("replaced")
    replacements = Replacements(replaced if isinstance(replaced, list) else [])
    root = replacements.plain(saved_object(for_torch(checkpoint, options, 1), options))
    return [zipwrite.archive(root, zipwrite.top_folder(options.destination), share=options.tied != "clone")]


def saved_object(checkpoint: Checkpoint, options: WriteOptions) -> dict[str, Any]:
    """The dict that Trainer.save_checkpoint would hand to torch.save."""
    step, epoch = checkpoint.step or 0, checkpoint.epoch or 0
    state = checkpoint.state
    out: dict[str, Any] = {
        "epoch": epoch, "global_step": step,
        "pytorch-lightning_version": state.get("pytorch-lightning_version", VERSION),
        "state_dict": zipwrite.state_dict(checkpoint, options),
        "loops": state.get("loops", {"fit_loop": fit_loop(step, epoch)}),
        "callbacks": state.get("callbacks", {}),
    }  # fmt: skip
    if options.extra.get("training"):
        out["optimizer_states"] = _optimizers(checkpoint)
        out["lr_schedulers"] = _listed(checkpoint.scheduler)
    kept = {key: value for key, value in state.items() if key not in out and key not in _OURS}
    if checkpoint.rng is not None:
        kept.setdefault("rng", checkpoint.rng)
    return {**out, **kept}


def _optimizers(checkpoint: Checkpoint) -> list[Any]:
    """One state dict an optimizer, in the order in which configure_optimizers gives them."""
    if checkpoint.optimizer is None:
        return []
    places = checkpoint.facts.get("keys", {}).get("optimizers", ())
    entries = zipwrite.optimizer_entries(checkpoint.optimizer, places)
    return [one for value in entries.values() for one in _each(value)]


def _each(value: Any) -> list[Any]:
    if isinstance(value, list):
        return value
    return [value] if "param_groups" in value else list(value.values())


def _listed(scheduler: Any) -> list[Any]:
    if scheduler is None:
        return []
    return list(scheduler) if isinstance(scheduler, list | tuple) else [scheduler]


def fit_loop(step: int, epoch: int) -> dict[str, Any]:
    """The progress of a fit loop that took `step` optimizer steps and stands at the start of `epoch`."""

    def count(n: int, *names: str) -> dict[str, int]:
        return dict.fromkeys(names, n)

    def progress(total: int, current: int, *names: str) -> dict[str, Any]:
        return {"total": count(total, *names), "current": count(current, *names)}

    batch = ("ready", "completed", "started", "processed")
    return {
        "state_dict": {},
        "epoch_loop.state_dict": {"_batches_that_stepped": step},
        "epoch_loop.batch_progress": {**progress(step, 0, *batch), "is_last_batch": False},
        "epoch_loop.scheduler_progress": progress(step, 0, "ready", "completed"),
        "epoch_loop.automatic_optimization.state_dict": {},
        "epoch_loop.automatic_optimization.optim_progress": {
            "optimizer": {
                "step": progress(step, 0, "ready", "completed"),
                "zero_grad": progress(step, 0, "ready", "completed", "started"),
            }
        },
        "epoch_loop.manual_optimization.state_dict": {},
        "epoch_loop.manual_optimization.optim_step_progress": progress(0, 0, "ready", "completed"),
        "epoch_loop.val_loop.state_dict": {},
        "epoch_loop.val_loop.batch_progress": {**progress(0, 0, *batch), "is_last_batch": False},
        "epoch_progress": progress(epoch, epoch, *batch),
    }
