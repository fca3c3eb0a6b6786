"""GGUF back to Hugging Face: names, rotary order and norms as they were, config and tokenizer from the keys.

Block-quantized tensors become float32: every value they stand for is one. What GGUF does not keep can't be restored:
the text of normalizers, flags of added tokens, Gemma 3's order of layers where it is not the usual one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from anyckpt.core.checkpoint import Asset, Checkpoint
from anyckpt.core.ggml.op import dequantize
from anyckpt.core.ggml.types import BLOCK_TYPES
from anyckpt.core.tensor import Tensor
from anyckpt.finding import Finding
from anyckpt.formats.gguf import config as configs
from anyckpt.formats.gguf.kv import Metadata
from anyckpt.formats.gguf.tokens import tokenizer_files
from anyckpt.io.paths import printable
from anyckpt.io.view import MemoryFile
from anyckpt.names.arch import find

COMPUTED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that stand for settings of the config."""


def to_hub(checkpoint: Checkpoint) -> Checkpoint:
    """A GGUF checkpoint, or an older GGML one, under Hugging Face's names.

    Raises UsageError for an architecture without a table, CheckpointError for a tensor that no rule knows.
    """
    metadata = checkpoint.facts.get("gguf")
    if not isinstance(metadata, Metadata):
        from anyckpt.formats.gguf.upgrade import upgraded

        checkpoint = upgraded(checkpoint, [])
        metadata = checkpoint.facts["gguf"]
    if metadata.get("general.type", "model") == "adapter":
        from anyckpt.verbs.gguf_adapter import adapter_to_hub

        return adapter_to_hub(checkpoint, metadata)
    rope = {name: checkpoint.weights[name].numpy().tolist() for name in COMPUTED if name in checkpoint.weights}
    held = {name: tensor for name, tensor in checkpoint.weights.items() if name not in COMPUTED}
    table = find.named(configs.table_of(metadata))
    settings = configs.config_of(metadata, {name: t.shape for name, t in held.items()}, rope)
    found = find.inverse({name: _plain(tensor) for name, tensor in held.items()}, table.gguf, settings)
    dtype = _main_dtype(checkpoint)
    settings["dtype"] = dtype
    files = tokenizer_files(metadata)
    assets = tuple(Asset(name, MemoryFile(name, data)) for name, data in files.items())
    findings = checkpoint.findings
    if not files and "tokenizer.ggml.tokens" in metadata:
        kind = "/".join(str(metadata.get(f"tokenizer.ggml.{key}", "default")) for key in ("model", "pre"))
        message = f"the tokenizer is left out: how one of the kind {printable(kind)} cuts text is not known here"
        findings = (*findings, Finding("lossy", "warning", message, hint="take it from the model's own folder"))
    aliases = _tied(found.tensors, settings)
    return replace(
        checkpoint, weights={**found.tensors, **{a: found.tensors[b] for a, b in aliases.items()}}, aliases=aliases,
        config=settings, assets=assets, format="hf", findings=findings,
    )  # fmt: skip


def _plain(tensor: Tensor) -> Tensor:
    """Values of blocks. A permutation of rows reads whole rows, so the values are worked out below it."""
    return dequantize(tensor)


def _tied(weights: dict[str, Tensor], config: dict[str, Any]) -> dict[str, str]:
    pairs = (("lm_head.weight", "model.embed_tokens.weight"), ("lm_head.weight", "transformer.wte.weight"))
    if not config.get("tie_word_embeddings") or config["model_type"] == "bert":
        return {}
    return {tied: kept for tied, kept in pairs if kept in weights and tied not in weights}


def _main_dtype(checkpoint: Checkpoint) -> str:
    """What most bytes will be of."""
    sizes: dict[str, int] = {}
    for tensor in checkpoint.weights.values():
        name = "float32" if tensor.dtype.name in BLOCK_TYPES else tensor.dtype.name
        sizes[name] = sizes.get(name, 0) + tensor.size
    return max(sizes, key=lambda name: sizes[name], default="float32")
