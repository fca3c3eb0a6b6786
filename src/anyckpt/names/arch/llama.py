"""Llama 1 to 3 and Mistral: GGUF's `llama`, with queries and keys in pairs."""

from __future__ import annotations

from anyckpt.names import settings
from anyckpt.names.arch import megatron, rows
from anyckpt.names.arch.table import Architecture

ARCHITECTURE = Architecture(
    "llama", ("llama", "mistral"),
    ("LlamaForCausalLM", "LLaMAForCausalLM", "MistralForCausalLM", "LlamaModel", "MistralModel"),
    gguf=(*rows.ends(), *rows.NORMS, *rows.attention(rotary=True), *rows.MLP), megatron=megatron.DECODER,
    settings=settings.DECODER, implied=settings.GATED, constants=settings.SILU,
    ignored=rows.BUFFERS,
)  # fmt: skip
