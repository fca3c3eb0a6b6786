"""LoRA adapters: PEFT's folder ↔ llama.cpp's adapter file.

    PEFT   base_model.model.MODULE.lora_A.weight [r, in], lora_B.weight [out, r]; scale lora_alpha / r
    GGUF   NAME.weight.lora_a, NAME.weight.lora_b, the same shapes; adapter.lora.alpha

Rows of B are in the order of the base weight's rows, so what llama.cpp does to those (the rotary order of queries and
keys) is done to B. Norms' + 1 and transposition are no matter of the factors. Facts: `convert_lora_to_gguf.py`, build
11434.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anyckpt.core import ops
from anyckpt.core.checkpoint import Asset, Checkpoint
from anyckpt.core.dtypes import DTYPES
from anyckpt.core.ggml.op import narrow
from anyckpt.core.tensor import Tensor
from anyckpt.errors import UsageError
from anyckpt.finding import fail
from anyckpt.formats.gguf import config as configs
from anyckpt.formats.gguf import hparams, kv, mixture, naming
from anyckpt.formats.gguf.files import Files
from anyckpt.formats.gguf.kv import Metadata
from anyckpt.io.paths import printable
from anyckpt.io.view import MemoryFile
from anyckpt.names.arch import find
from anyckpt.names.arch.table import Architecture, Rule
from anyckpt.names.ops import PLUS_ONE, ROTARY_K, ROTARY_Q, SAME, TRANSPOSE

if TYPE_CHECKING:
    from anyckpt.verbs.gguf import GgufOptions

PREFIX = "base_model.model."
FACTORS = (("lora_A", "lora_a"), ("lora_B", "lora_b"))
MOVES_ROWS = (ROTARY_Q, ROTARY_K)
MERGE_HINT = "llama.cpp has plain LoRA only: merge the adapter into its base with --merge-adapter"


def adapter_as_gguf(checkpoint: Checkpoint, options: GgufOptions) -> Checkpoint:
    """A PEFT adapter as GGUF. The base model's config is needed: `options.base`, or the folder that the adapter names.

    Raises UsageError where there is none, or the adapter is none that llama.cpp has (DoRA, experts, other methods).
    """
    settings = checkpoint.config or {}
    if str(settings.get("peft_type", "LORA")).upper() != "LORA" or settings.get("use_dora"):
        raise UsageError("llama.cpp has plain LoRA adapters only", hint=MERGE_HINT)
    config = base_config(checkpoint, options.base)
    table = find.of_config(config)
    alpha = _alpha(settings, checkpoint.weights)
    full = hparams.normalised(config)
    kind = mixture.FLOATS.get((options.quant or "f32").lower())
    if kind is None:
        raise UsageError("an adapter is written as f32, f16 or bf16", hint="leave --quant out")
    tensors: dict[str, Tensor] = {}
    pending: dict[str, dict[str, Tensor]] = {}
    for name, tensor in checkpoint.weights.items():
        base, factor = _taken_apart(name)
        pending.setdefault(base, {})[factor] = tensor
    for base, factors in pending.items():
        if set(factors) != {"lora_a", "lora_b"}:
            raise fail("missing-tensor", f"the adapter has one factor of {printable(base)} only")
        name, rule = _target(base, table)
        b = factors["lora_b"]
        if rule.op in MOVES_ROWS:
            b = rule.op.forward([b], full)
        tensors[f"{name}.lora_a"] = _as(factors["lora_a"], kind)
        tensors[f"{name}.lora_b"] = _as(b, kind)
    fields = {"general.architecture": kv.text(hparams.WRITERS[table.name][0]), "general.type": kv.text("adapter")}
    fields["adapter.type"] = kv.text("lora")
    folder = Path(checkpoint.path).resolve().name
    shapes = [(n, t.shape) for n, t in tensors.items()]
    general = naming.general_keys(Files.of(checkpoint.assets), folder, shapes, options.model_name)
    general.pop("general.size_label", None)
    fields |= general
    fields["adapter.lora.alpha"] = kv.f32(alpha)
    fields["general.quantization_version"] = kv.u32(2)
    return replace(checkpoint, format="gguf", weights=tensors, aliases={}, config=None, assets=(),
                   facts={"gguf": Metadata(fields)})  # fmt: skip


def _alpha(settings: Mapping[str, Any], weights: Mapping[str, Tensor]) -> float:
    """llama.cpp scales by alpha / rank of each tensor. Raises UsageError where no one alpha says what PEFT does."""
    alpha = float(settings.get("lora_alpha", 8))
    if settings.get("alpha_pattern"):
        raise UsageError("the adapter scales its modules differently, which llama.cpp's can't", hint=MERGE_HINT)
    if not settings.get("use_rslora"):
        return alpha
    ranks = {tensor.shape[0] for name, tensor in weights.items() if ".lora_A" in name}
    if len(ranks) > 1:
        raise UsageError("an adapter by rsLoRA of several ranks has no one scale in llama.cpp", hint=MERGE_HINT)
    return float(alpha * max(ranks) ** 0.5)


def base_config(checkpoint: Checkpoint, base: str | os.PathLike[str] | None) -> Mapping[str, Any]:
    """The config of the model at `base`, else of the folder beside the adapter that it names.

    Raises UsageError where there is none.
    """
    from anyckpt.verbs.open import open as open_checkpoint

    named = base
    if named is None:
        beside = (checkpoint.config or {}).get("base_model_name_or_path")
        folder = Path(checkpoint.path).resolve()
        near = folder.parent / Path(str(beside)).name if beside else None
        named = near if near is not None and near != folder and (near / "config.json").is_file() else None
    config = open_checkpoint(named).view("hf").config if named is not None else None
    if not config or "model_type" not in config:
        raise UsageError(
            "an adapter's names and rows depend on its base model, whose config is not here",
            hint="name the base model's folder: --base FOLDER",
        )
    return config


def _taken_apart(name: str) -> tuple[str, str]:
    """(the weight that an adapter's tensor belongs to, which factor it is)."""
    for theirs, ours in FACTORS:
        module, found, rest = name.partition(f".{theirs}")
        if found and rest in (".weight", ".default.weight"):
            return module.removeprefix(PREFIX) + ".weight", ours
    raise fail(
        "unmapped-tensor",
        f"{printable(name)} is no factor of a LoRA adapter",
        hint=MERGE_HINT,
    )


def _target(base: str, table: Architecture) -> tuple[str, Rule]:
    """The weight's name in GGUF, and its rule."""
    for spelled in (base, table.prefix + base):
        template, numbers = find.template_of(spelled)
        rule = next((r for r in table.gguf if r.hf == (template,) and not r.parting), None)
        if rule is not None and (rule.op in (*MOVES_ROWS, SAME, TRANSPOSE, PLUS_ONE)):
            return rule.name.replace("{layer}", str(numbers[0] if numbers else "")), rule
    raise fail("unmapped-tensor", f"no rule knows {printable(base)} as a weight that an adapter can change")


def _as(tensor: Tensor, kind: str) -> Tensor:
    return narrow(tensor) if kind == "float16" else ops.cast(tensor, DTYPES[kind])


def adapter_to_hub(
    checkpoint: Checkpoint, metadata: Metadata, base: str | os.PathLike[str] | None = None
) -> Checkpoint:
    """llama.cpp's adapter as PEFT has it.

    Raises UsageError for factors of rotary queries and keys without `base`, the model that they change: their rows go
    by its heads, whose number the file lacks.
    """
    table = find.named(configs.table_of(metadata))
    rules = {rule.name: rule for rule in table.gguf if len(rule.hf) == 1}
    weights: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    config = hparams.normalised(base_config(checkpoint, base)) if base is not None else None
    for name, tensor in checkpoint.weights.items():
        base, _, factor = name.rpartition(".")
        template, numbers = find.template_of(base)
        rule = rules.get(template)
        if rule is None or factor not in ("lora_a", "lora_b"):
            raise fail("unmapped-tensor", f"no rule knows {printable(name)}")
        if factor == "lora_b" and rule.op in MOVES_ROWS:
            if config is None:
                raise UsageError(
                    "rows of queries and keys are in llama.cpp's order, and the adapter says no number of heads",
                    hint="name the base model's folder or GGUF file: --base PATH",
                )
            tensor = rule.op.inverse(tensor, config)[0]
        module = rule.hf[0].replace("{layer}", str(numbers[0] if numbers else "")).removesuffix(".weight")
        theirs = "lora_A" if factor == "lora_a" else "lora_B"
        if factor == "lora_a":
            ranks[module] = tensor.shape[0]
        weights[f"{PREFIX}{module}.{theirs}.weight"] = tensor
    rank = max(ranks.values(), default=0)
    settings = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank,
        "lora_alpha": metadata.get("adapter.lora.alpha", rank), "lora_dropout": 0.0, "bias": "none",
        "target_modules": sorted({module.rpartition(".")[2] for module in ranks}),
        "rank_pattern": {module: r for module, r in ranks.items() if r != rank}, "base_model_name_or_path": None,
    }  # fmt: skip
    data = (json.dumps(settings, indent=2) + "\n").encode()
    assets = (Asset("adapter_config.json", MemoryFile("adapter_config.json", data)),)
    return replace(checkpoint, format="peft", weights=weights, config=settings, assets=assets, facts={})
