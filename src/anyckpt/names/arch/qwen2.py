"""Qwen 2 and 2.5: biases on queries, keys and values."""

from __future__ import annotations

from anyckpt.names.arch import rows
from anyckpt.names.arch.table import Architecture

ARCHITECTURE = Architecture(
    "qwen2", ("qwen2",), ("Qwen2ForCausalLM", "Qwen2Model"),
    gguf=(*rows.ends(), *rows.NORMS, *rows.attention(), *rows.MLP), ignored=rows.BUFFERS,
)  # fmt: skip
