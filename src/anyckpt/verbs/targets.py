"""What a format's writer wants a checkpoint to speak, before it is asked to write: one table, format -> function.

A function takes the checkpoint, the options that belong to the format, and the list that notes go to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any

from anyckpt.core.checkpoint import Checkpoint
from anyckpt.finding import Finding
from anyckpt.formats.table import Format

Prepare = Callable[[Checkpoint, Any, "list[Finding]"], Checkpoint]

TARGETS: Mapping[str, str] = MappingProxyType(
    {
        "gguf": "anyckpt.verbs.gguf:as_gguf",
        "gguf-folder": "anyckpt.verbs.gguf:as_gguf",
        "hf": "anyckpt.verbs.hub:as_hub",
        "megatron": "anyckpt.verbs.megatron:from_hub",
        "megatron-dist": "anyckpt.verbs.megatron:from_hub",
    }
)


def prepared(checkpoint: Checkpoint, row: Format, options: Any, notes: list[Finding]) -> Checkpoint:
    """The checkpoint in the names and types that `row`'s writer wants; unchanged for formats that take any."""
    where = TARGETS.get(row.name)
    if where is None:
        return checkpoint
    module, _, function = where.partition(":")
    prepare: Prepare = getattr(import_module(module), function)
    return prepare(checkpoint, options, notes)
