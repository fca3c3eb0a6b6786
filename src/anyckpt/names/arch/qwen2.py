"""Qwen 2 and 2.5: biases on queries, keys and values."""

from __future__ import annotations

from anyckpt.names import settings
from anyckpt.names.arch import megatron, rows
from anyckpt.names.arch.table import Architecture

ARCHITECTURE = Architecture(
    "qwen2", ("qwen2",), ("Qwen2ForCausalLM", "Qwen2Model"),
    gguf=(*rows.ends(), *rows.NORMS, *rows.attention(), *rows.MLP), megatron=megatron.DECODER,
    settings=settings.DECODER, implied={**settings.GATED, "add_qkv_bias": True}, constants=settings.SILU,
    ignored=rows.BUFFERS,
)  # fmt: skip
