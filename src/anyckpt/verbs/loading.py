"""Answers to the questions people get wrong when they load a checkpoint: with what, on which device, by which torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from anyckpt.core.checkpoint import Checkpoint

PICKLED = ("torch", "torch-legacy", "torch-tar")  # what torch.load reads


@dataclass(frozen=True, slots=True)
class Loading:
    """How to load a checkpoint with its own framework.

    `snippet`: lines of Python. `oldest_torch`: a version, "" where torch is not what loads it, with `because`.
    `weights_only`: whether torch.load(weights_only=True) takes it, None where the question does not arise;
    `stands_in_the_way`: what it refuses, globals by name. `devices` as saved, and `device_note` what they mean here.
    """

    snippet: tuple[str, ...]
    oldest_torch: str = ""
    because: str = ""
    weights_only: bool | None = None
    stands_in_the_way: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    device_note: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The record as `--json` prints it."""
        return {
            "snippet": list(self.snippet),
            "oldest_torch": self.oldest_torch,
            "because": self.because,
            "weights_only": self.weights_only,
            "stands_in_the_way": list(self.stands_in_the_way),
            "devices": list(self.devices),
            "device_note": self.device_note,
        }


def loading(checkpoint: Checkpoint) -> Loading:
    """Answer for one checkpoint, from what its reader found."""
    facts = checkpoint.facts
    obstacles = tuple(facts.get("weights_only") or ())
    takes: bool | None = None
    if checkpoint.format in PICKLED:
        takes = not obstacles and checkpoint.format != "torch-tar"
    oldest, because = facts.get("torch_min") or ("", "")
    if any(i.path.startswith("numpy._core.") for i in facts.get("imports", ())):
        because += ", and numpy 2 for the arrays in it"
    devices = tuple(sorted(map(str, facts.get("devices", ())), key=_device_order))
    return Loading(
        snippet=snippet(checkpoint, takes),
        oldest_torch=oldest,
        because=because,
        weights_only=takes,
        stands_in_the_way=obstacles,
        devices=devices,
        device_note=device_note(devices),
    )


def snippet(checkpoint: Checkpoint, weights_only: bool | None) -> tuple[str, ...]:
    """The lines of Python that load it with its own framework."""
    path = repr(checkpoint.path)
    if checkpoint.format == "hf":
        name = _auto_class(checkpoint.config or {})
        return (f"from transformers import {name}", f"model = {name}.from_pretrained({path})")
    if checkpoint.format == "peft":
        base = repr((checkpoint.config or {}).get("base_model_name_or_path") or "BASE")
        return (
            "from peft import AutoPeftModel",
            f"model = AutoPeftModel.from_pretrained({path})  # base: {base}",
        )
    if checkpoint.format == "safetensors":
        return ("from safetensors.torch import load_file", f"model.load_state_dict(load_file({path}))")
    if checkpoint.format == "torchscript":
        return ("import torch", f"model = torch.jit.load({path}, map_location='cpu')  # runs the code inside")
    if checkpoint.format == "torch-export":
        return ("import torch", f"program = torch.export.load({path})")
    if checkpoint.format in PICKLED and weights_only:
        root = checkpoint.facts.get("root") or ""
        index = f"[{root!r}]" if root else ""
        return (
            "import torch",
            f"saved = torch.load({path}, map_location='cpu', weights_only=True)",
            f"model.load_state_dict(saved{index})",
        )
    return ("import anyckpt", f"anyckpt.load_into(model, {path})")


def _auto_class(config: Mapping[str, Any]) -> str:
    architectures = config.get("architectures")
    name = architectures[0] if isinstance(architectures, list | tuple) and architectures else ""
    endings = {
        "ForCausalLM": "AutoModelForCausalLM",
        "LMHeadModel": "AutoModelForCausalLM",
        "ForMaskedLM": "AutoModelForMaskedLM",
        "ForConditionalGeneration": "AutoModelForSeq2SeqLM",
        "ForSequenceClassification": "AutoModelForSequenceClassification",
        "ForTokenClassification": "AutoModelForTokenClassification",
        "ForQuestionAnswering": "AutoModelForQuestionAnswering",
        "ForImageClassification": "AutoModelForImageClassification",
    }
    return next((auto for ending, auto in endings.items() if str(name).endswith(ending)), "AutoModel")


def device_note(devices: Iterable[str]) -> str:
    """What the devices a file was saved from mean for loading it elsewhere; empty where nothing."""
    away = [d for d in devices if d not in ("cpu", "meta", "")]
    if not away:
        return ""
    kinds = sorted({d.partition(":")[0] for d in away})
    highest = max((int(d.partition(":")[2]) for d in away if d.partition(":")[2].isdecimal()), default=0)
    needs = f"{highest + 1} {kinds[0]} devices" if highest else f"a {kinds[0]} device"
    return f"without map_location torch wants {needs}; map_location='cpu' loads it anywhere"


def _device_order(device: str) -> tuple[str, int]:
    kind, _, index = device.partition(":")
    return kind, int(index) if index.isdecimal() and index.isascii() else -1
