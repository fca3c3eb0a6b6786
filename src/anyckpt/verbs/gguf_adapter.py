"""LoRA adapters: PEFT's folder ↔ llama.cpp's adapter file.

    PEFT   base_model.model.MODULE.lora_A.weight [r, in], lora_B.weight [out, r]; scale lora_alpha / r
    GGUF   NAME.weight.lora_a, NAME.weight.lora_b, the same shapes; adapter.lora.alpha

Rows of B are in the order of the base weight's rows, so what llama.cpp does to those (the rotary order of queries and
keys) is done to B. Norms' + 1 and transposition are no matter of the factors. Facts: `convert_lora_to_gguf.py`, build
11434.
"""

from __future__ import annotations

import json
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


def adapter_as_gguf(checkpoint: Checkpoint, options: GgufOptions) -> Checkpoint:
    """A PEFT adapter as GGUF. The base model's config is needed: `options.base`, or the folder that the adapter names.

    Raises UsageError where there is none, or the adapter is none that llama.cpp has (DoRA, experts, other methods).
    """
    settings = checkpoint.config or {}
    if str(settings.get("peft_type", "LORA")).upper() != "LORA" or settings.get("use_dora"):
        raise UsageError("llama.cpp has plain LoRA adapters only", hint="merge it into its base: --merge-adapter")
    config = _base_config(checkpoint, options)
    table = find.of_config(config)
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
    fields["adapter.lora.alpha"] = kv.f32(float(settings.get("lora_alpha", 8)))
    fields["general.quantization_version"] = kv.u32(2)
    return replace(checkpoint, format="gguf", weights=tensors, aliases={}, config=None, assets=(),
                   facts={"gguf": Metadata(fields)})  # fmt: skip


def _base_config(checkpoint: Checkpoint, options: GgufOptions) -> Mapping[str, Any]:
    from anyckpt.verbs.open import open as open_checkpoint

    named = options.base
    if named is None:
        beside = (checkpoint.config or {}).get("base_model_name_or_path")
        folder = Path(checkpoint.path).resolve()
        near = folder.parent / Path(str(beside)).name if beside else None
        named = near if near is not None and near != folder and (near / "config.json").is_file() else None
    config = open_checkpoint(named).config if named is not None else None
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
        hint="llama.cpp's adapters hold nothing else: merge it into its base with --merge-adapter",
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


def adapter_to_hub(checkpoint: Checkpoint, metadata: Metadata) -> Checkpoint:
    """llama.cpp's adapter as PEFT has it. Head counts of queries and keys are those of the shapes, which the file
    lacks: raises UsageError for a rotary architecture, whose rows can't be put back without them."""
    table = find.named(configs.table_of(metadata))
    rules = {rule.name: rule for rule in table.gguf if len(rule.hf) == 1}
    weights: dict[str, Tensor] = {}
    modules: set[str] = set()
    rank = 0
    for name, tensor in checkpoint.weights.items():
        base, _, factor = name.rpartition(".")
        template, numbers = find.template_of(base)
        rule = rules.get(template)
        if rule is None or factor not in ("lora_a", "lora_b"):
            raise fail("unmapped-tensor", f"no rule knows {printable(name)}")
        if factor == "lora_b" and rule.op in MOVES_ROWS:
            raise UsageError(
                "rows of queries and keys are in llama.cpp's order, and the adapter says no number of heads",
                hint="merge the adapter in llama.cpp, or use the PEFT adapter that it was made from",
            )
        module = rule.hf[0].replace("{layer}", str(numbers[0] if numbers else "")).removesuffix(".weight")
        modules.add(module.rpartition(".")[2])
        theirs = "lora_A" if factor == "lora_a" else "lora_B"
        rank = tensor.shape[0] if factor == "lora_a" else rank
        weights[f"{PREFIX}{module}.{theirs}.weight"] = tensor
    settings = {
        "peft_type": "LORA", "r": rank, "lora_alpha": metadata.get("adapter.lora.alpha", rank), "lora_dropout": 0.0,
        "bias": "none", "target_modules": sorted(modules), "base_model_name_or_path": None,
    }  # fmt: skip
    data = (json.dumps(settings, indent=2) + "\n").encode()
    assets = (Asset("adapter_config.json", MemoryFile("adapter_config.json", data)),)
    return replace(checkpoint, format="peft", weights=weights, config=settings, assets=assets, facts={})
