"""The view `hf`: any checkpoint of a known architecture under Hugging Face's names, with config and tokenizer.

One table, format -> function; a family that has its own names for a model's tensors adds a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any

from anyckpt.core.checkpoint import Checkpoint
from anyckpt.errors import UsageError
from anyckpt.finding import Finding

TO_HUB: Mapping[str, str] = MappingProxyType(
    {
        "gguf": "anyckpt.verbs.gguf_back:to_hub",
        "gguf-folder": "anyckpt.verbs.gguf_back:to_hub",
        "ggml": "anyckpt.verbs.gguf_back:to_hub",
        **dict.fromkeys(
            ("megatron", "megatron-dist", "megatron-zarr", "nemo", "nemo-folder"), "anyckpt.verbs.megatron:to_hub"
        ),
    }
)


def hub(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint under Hugging Face's names; unchanged where it has them already.

    Raises UsageError for an architecture without a table, CheckpointError for a tensor that no rule knows.
    """
    where = TO_HUB.get(checkpoint.format)
    if where is None:
        return checkpoint
    module, _, function = where.partition(":")
    view: Callable[[Checkpoint], Checkpoint] = getattr(import_module(module), function)
    return view(checkpoint)


def as_hub(checkpoint: Checkpoint, options: Any, notes: list[Finding]) -> Checkpoint:
    """What the writer of Hugging Face folders is given. `options.base`: the model that an adapter changes."""
    base = getattr(options, "base", None)
    if base is None:
        return hub(checkpoint)
    metadata = checkpoint.facts.get("gguf")
    if metadata is None or metadata.get("general.type") != "adapter":
        raise UsageError("--base names the model that an adapter changes, and this is no adapter in GGUF")
    from anyckpt.verbs.gguf_adapter import adapter_to_hub

    return adapter_to_hub(checkpoint, metadata, base)
