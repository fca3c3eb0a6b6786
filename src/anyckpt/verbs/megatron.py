"""Megatron's and NeMo's checkpoints as Hugging Face's, and the other way: names, fused projections, vocabulary, config.

The tables do the work (`names.arch`, `names.settings`); the spelling is the format's (`formats.megatron.spelling`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from anyckpt.core.checkpoint import Asset, Checkpoint, Optimizer
from anyckpt.core.dtypes import DTYPES
from anyckpt.core.ops import AddConstant
from anyckpt.core.tensor import Tensor
from anyckpt.errors import CheckpointError, UsageError
from anyckpt.finding import DEFAULT_SEVERITY, Finding
from anyckpt.formats.hf.write import main_dtype
from anyckpt.formats.megatron.fit import true_vocabulary
from anyckpt.formats.megatron.parts import decays
from anyckpt.formats.megatron.spelling import to_local
from anyckpt.formats.megatron.spread import n_experts, n_layers
from anyckpt.io import json
from anyckpt.names import settings
from anyckpt.names.arch import find
from anyckpt.names.arch.table import Architecture, Rule
from anyckpt.names.ops import SAME, Bijection

FORMATS = ("megatron", "megatron-dist", "megatron-zarr", "nemo", "nemo-folder")
VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
_SCALARS = ("step",)
_NORMS = ("layernorm.weight", "_layernorm.weight")


def to_hub(checkpoint: Checkpoint) -> Checkpoint:
    """A checkpoint of this family under Hugging Face's names, without padding rows, with config.json.

    Raises UsageError where the run's options are not there or no architecture has them, CheckpointError
    [unmapped-tensor] for a tensor that no rule knows.
    """
    args = settings.plain_arguments(checkpoint.config or {})
    if "num_attention_heads" not in args:
        raise UsageError(
            f"{checkpoint.path} does not say what its model is: the run's options are not in it",
            hint="save it with its args, or give the original folder",
        )
    architecture = settings.of_arguments(args, find.architectures())
    weights = to_local(checkpoint.weights)
    n_rows = weights[VOCABULARY[0]].shape[0] if VOCABULARY[0] in weights else 0
    n_tokens = tokens_of(checkpoint.assets) or true_vocabulary(args, n_rows)
    n_tokens = min(n_tokens, n_rows) or n_rows
    findings = list(checkpoint.findings)
    if n_tokens < n_rows:
        findings.append(_padding(weights, n_tokens, n_rows))
    elif args.get("padded_vocab_size") == n_rows and true_vocabulary(args, 0) != n_rows:
        findings.append(_note(
            "inferred", f"nothing says how many of the vocabulary's {n_rows:,} rows are padding: all are kept"
        ))  # fmt: skip
    config = settings.hf_config(args, architecture, n_tokens=n_tokens, dtype=main_dtype(weights) or "float32")
    gamma = bool(args.get("layernorm_zero_centered_gamma"))

    def mapped(tensors: Mapping[str, Tensor], kind: str) -> dict[str, Tensor]:
        cut = {n: t[:n_tokens] if n in VOCABULARY and t.ndim and n_tokens else t for n, t in tensors.items()}
        if gamma and kind in ("weights", "master"):
            cut = {n: _plus_one(t) if n.endswith(_NORMS) else t for n, t in cut.items()}
        return find.inverse(cut, rules_for(architecture, kind), config).tensors

    optimizer = _mapped_optimizer(checkpoint.optimizer, lambda ts, slot: mapped(to_local(ts), slot))
    tied = _tie(config)
    hub_weights = mapped(weights, "weights")
    aliases = {tied[0]: tied[1]} if tied and tied[1] in hub_weights and tied[0] not in hub_weights else {}
    return replace(
        checkpoint, format="hf", weights=hub_weights | {a: hub_weights[b] for a, b in aliases.items()},
        aliases=aliases, optimizer=optimizer, config=config, findings=tuple(findings), topology=None,
    )  # fmt: skip


def from_hub(checkpoint: Checkpoint, options: Any, notes: list[Finding]) -> Checkpoint:
    """What the writers of Megatron's formats are given: core's names with local layers, the run's options as config.

    Checkpoints of this family stay as they are; those of NeMo get Megatron's own options. Raises UsageError for an
    architecture that Megatron has no column for, CheckpointError [unmapped-tensor, missing-tensor] as the table says.
    """
    if checkpoint.format in FORMATS:
        return replace(checkpoint, config=_run_options(settings.plain_arguments(checkpoint.config or {}), checkpoint))
    from anyckpt.verbs.hub import hub

    checkpoint = hub(checkpoint)
    config = checkpoint.config or {}
    if "model_type" not in config and "architectures" not in config:
        raise UsageError(
            "Megatron's options come from the model's config.json, which is not there",
            hint="put config.json beside the weights",
        )
    architecture = find.of_config(config)
    if not architecture.megatron:
        known = ", ".join(a.name for a in find.architectures() if a.megatron)
        raise UsageError(f"{architecture.name} has no names in Megatron yet", hint=f"there are: {known}")
    args, lost = settings.megatron_arguments(config, architecture)
    notes.extend(_note("lossy", f"Megatron's options can't say {what}", "warning") for what in lost)

    def mapped(tensors: Mapping[str, Tensor], kind: str) -> dict[str, Tensor]:
        own = {n: t for n, t in tensors.items() if n not in checkpoint.aliases}
        return find.forward(own, architecture, rules_for(architecture, kind), config).tensors

    weights = mapped(checkpoint.weights, "weights")
    if "output_layer.weight" not in weights:
        args["untie_embeddings_and_output_weights"] = False
    elif not args["untie_embeddings_and_output_weights"]:
        weights.pop("output_layer.weight")
    for said, counted in (("num_layers", n_layers(weights)), ("num_experts", n_experts(weights) or None)):
        if args.get(said) != counted:
            raise UsageError(f"config.json says {said} {args.get(said)}, the weights have {counted or 'none'}")
    args["vocab_size"] = weights[VOCABULARY[0]].shape[0]
    optimizer = _mapped_optimizer(checkpoint.optimizer, mapped)
    if optimizer is not None:
        optimizer = replace(optimizer, groups=_regrouped(optimizer, weights))
    return replace(
        checkpoint, weights=weights, aliases={}, optimizer=optimizer, config=_run_options(args, checkpoint),
        rng=None, scheduler=None, topology=None,
    )  # fmt: skip


def rules_for(architecture: Architecture, kind: str) -> tuple[Rule, ...]:
    """The Megatron column for weights or for a slot of the optimizer.

    What changes values is for weights and masters alone; a number is the same for all that its parameter is made of.
    """
    if kind in _SCALARS:
        return tuple(replace(rule, op=_copies(len(rule.hf))) for rule in architecture.megatron)
    if kind in ("weights", "master"):
        return architecture.megatron
    return tuple(rule if rule.op.moves_only else replace(rule, op=SAME) for rule in architecture.megatron)


def _copies(n: int) -> Bijection:
    return Bijection("one number for all", lambda ts, _: ts[0], lambda t, _: [t] * n)


def _mapped_optimizer(
    optimizer: Optimizer | None, mapped: Callable[[Mapping[str, Tensor], str], dict[str, Tensor]]
) -> Optimizer | None:
    """Every slot under the other names. Groups keep their options; which parameters they have is told only of one."""
    if optimizer is None:
        return None
    slots = {slot: mapped(tensors, slot) for slot, tensors in optimizer.slots.items()}
    names = list(dict.fromkeys(name for tensors in slots.values() for name in tensors))
    groups = tuple({**g, "params": names if len(optimizer.groups) == 1 else []} for g in optimizer.groups)
    return replace(optimizer, slots=slots, groups=groups)


def _regrouped(optimizer: Optimizer, weights: Mapping[str, Tensor]) -> tuple[Mapping[str, Any], ...]:
    """Groups with Megatron's names: those with weight decay, and the others."""
    first = next(iter(optimizer.groups), {})
    decay = max((g.get("weight_decay", 0.0) or 0.0 for g in optimizer.groups), default=0.0)
    groups = []
    for wd_mult in (1.0, 0.0):
        own = [n for n, t in weights.items() if decays(n, t.ndim) == bool(wd_mult)]
        groups.append({
            **first, "wd_mult": wd_mult, "lr_mult": 1.0, "weight_decay": decay * wd_mult, "is_expert_parallel": False,
            "is_decoupled_lr": False, "default_config": True, "max_lr": first.get("lr"), "min_lr": 0.0, "params": own,
        })  # fmt: skip
    return tuple(groups)


def _run_options(args: Mapping[str, Any], checkpoint: Checkpoint) -> dict[str, Any]:
    """Options that every run has, where a checkpoint of another kind does not say them."""
    dtype = main_dtype(checkpoint.weights) or "float32"
    usual = {
        "add_position_embedding": args.get("position_embedding_type") == "learned_absolute",
        "tokenizer_type": "HuggingFaceTokenizer", "consumed_train_samples": 0, "consumed_valid_samples": 0,
        "skipped_train_samples": 0, "optimizer": "adam", "use_distributed_optimizer": False,
        "params_dtype": DTYPES.get(dtype), "bf16": dtype == "bfloat16", "fp16": dtype == "float16",
        "data_parallel_random_init": False, "vocab_file": None, "encoder_num_layers": args.get("num_layers"),
    }  # fmt: skip
    return {**usual, **args}


def tokens_of(assets: Iterable[Asset]) -> int | None:
    """Tokens of a tokenizer.json that travels along: one more than the highest id; None without one."""
    for asset in assets:
        if asset.name.rpartition("/")[2] != "tokenizer.json":
            continue
        try:
            document = json.parse(asset.file.read(0, asset.file.size), where=asset.file.name, code="bad-header")
        except CheckpointError:
            return None
        model = document.get("model") if isinstance(document, dict) else None
        vocabulary = model.get("vocab") if isinstance(model, dict) else None
        ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else (
            list(range(len(vocabulary))) if isinstance(vocabulary, list) else []
        )
        ids += [t.get("id") for t in document.get("added_tokens") or () if isinstance(t, dict)]
        numbers = [i for i in ids if isinstance(i, int)]
        return max(numbers) + 1 if numbers else None
    return None


def _padding(weights: Mapping[str, Tensor], n_tokens: int, n_rows: int) -> Finding:
    """Padding rows that are left out, and what they hold: a trained one may have meant something."""
    rows = weights[VOCABULARY[0]][n_tokens:]
    values = np.asarray(rows.numpy(), np.float32)
    n_held = int(np.count_nonzero(np.abs(values).max(axis=1))) if values.size else 0
    what = "all of them zeros" if not n_held else f"{n_held} of them not zeros (Megatron starts them at random)"
    return _note("lossy", f"{n_rows - n_tokens} padding rows of the vocabulary are left out, {what}")


def _tie(config: Mapping[str, Any]) -> tuple[str, str] | None:
    if not config.get("tie_word_embeddings"):
        return None
    return "lm_head.weight", "transformer.wte.weight" if config["model_type"] == "gpt2" else "model.embed_tokens.weight"


def _plus_one(tensor: Tensor) -> Tensor:
    """A norm that is stored as its distance from 1 (apply_layernorm_1p)."""
    return Tensor(tensor.dtype, tensor.shape, op=AddConstant(tensor, 1.0))


def _note(code: str, message: str, severity: Any = None) -> Finding:
    usual = DEFAULT_SEVERITY[code]
    return Finding(code, severity or ("note" if usual == "warning" else usual), message)

