"""What people open a GGUF file for: the model in a few lines, from its keys and tensor types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anyckpt.core.checkpoint import Checkpoint
from anyckpt.core.ggml.types import spelling
from anyckpt.formats.gguf.kv import Metadata
from anyckpt.formats.gguf.mixture import FILE_TYPES, Model
from anyckpt.io.bounds import byte_count
from anyckpt.io.paths import printable

HALF = 2  # bytes of a number in the cache of keys and values


def describe(checkpoint: Checkpoint) -> list[tuple[str, str]]:
    """(label, text) rows; those that the file says nothing about are left out."""
    metadata = checkpoint.facts.get("gguf")
    if not isinstance(metadata, Metadata):
        return []
    rows = (
        ("model", _model(metadata)),
        ("shape", _shape(metadata)),
        ("types", _types(checkpoint, metadata)),
        ("tokens", _tokens(metadata)),
        ("template", _template(metadata)),
        ("memory", _memory(checkpoint, metadata)),
    )
    return [(label, text) for label, text in rows if text]


def _model(metadata: Metadata) -> str:
    kind = metadata.get("general.type", "model")
    parts = [metadata.architecture or "no architecture", *([str(kind)] if kind != "model" else [])]
    parts += [str(metadata[k]) for k in ("general.name", "general.size_label") if metadata.get(k)]
    return printable(", ".join(parts))


def _shape(metadata: Metadata) -> str:
    model = Model.of(metadata)
    if not model.n_layers:
        return ""
    width, context = metadata.of_model("embedding_length"), metadata.of_model("context_length")
    words = [f"{model.n_layers} layers", *([f"width {width:,}"] if isinstance(width, int) else [])]
    if model.n_heads:
        shared = f" ({model.n_heads_kv} of keys and values)" if model.n_heads_kv != model.n_heads else ""
        words.append(f"{model.n_heads} heads{shared}")
    if model.n_experts:
        words.append(f"{metadata.of_model('expert_used_count', '?')} of {model.n_experts} experts")
    if isinstance(context, int):
        words.append(f"context {context:,}")
    return ", ".join(words)


def sizes_by_type(checkpoint: Checkpoint) -> Mapping[str, int]:
    """Bytes by type, the largest first."""
    sizes: dict[str, int] = {}
    for tensor in checkpoint.weights.values():
        sizes[tensor.dtype.name] = sizes.get(tensor.dtype.name, 0) + tensor.nbytes
    return dict(sorted(sizes.items(), key=lambda row: -row[1]))


def _types(checkpoint: Checkpoint, metadata: Metadata) -> str:
    n_values = sum(t.size for t in checkpoint.weights.values())
    if not n_values:
        return ""
    sizes = sizes_by_type(checkpoint)
    total = sum(sizes.values())
    number = metadata.number("general.file_type", -1)
    name = next((n.upper() for n, (i, _) in FILE_TYPES.items() if i == number), "")
    mix = " · ".join(f"{spelling(kind)} {100 * n / total:.0f} %" for kind, n in list(sizes.items())[:5])
    return f"{name + ', ' if name else ''}{8 * total / n_values:.2f} bits per weight: {mix}"


def _tokens(metadata: Metadata) -> str:
    tokens = metadata.fields.get("tokenizer.ggml.tokens")
    if tokens is None:
        return ""
    special = [
        f"{name} {metadata[key]}"
        for name in ("bos", "eos", "padding")
        if (key := f"tokenizer.ggml.{name}_token_id") in metadata
    ]
    kind = ", ".join(str(metadata[k]) for k in ("tokenizer.ggml.model", "tokenizer.ggml.pre") if k in metadata)
    return printable(f"{tokens.count:,} ({kind}); " + ", ".join(special))


def _template(metadata: Metadata) -> str:
    template: Any = metadata.get("tokenizer.chat_template")
    if not isinstance(template, str):
        return ""
    more = sum(key.startswith("tokenizer.chat_template.") for key in metadata)
    return f"{len(template):,} characters" + (f", and {more} more" if more else "")


def _memory(checkpoint: Checkpoint, metadata: Metadata) -> str:
    """Weights, and keys and values of a full context in 16 bits: what llama.cpp takes at least."""
    model = Model.of(metadata)
    context, width = metadata.of_model("context_length"), metadata.of_model("embedding_length")
    if not (model.n_layers and model.n_heads and isinstance(context, int) and isinstance(width, int)):
        return ""
    head = width // model.n_heads
    per_token = model.n_heads_kv * (
        int(metadata.of_model("attention.key_length", head)) + int(metadata.of_model("attention.value_length", head))
    )
    cache = model.n_layers * context * per_token * HALF
    return f"{byte_count(checkpoint.nbytes)} of weights + {byte_count(cache)} of cache for the whole context"
