"""Llama 1 to 3 and Mistral: GGUF's `llama`, with queries and keys in pairs."""

from __future__ import annotations

from anyckpt.names.arch import rows
from anyckpt.names.arch.table import Architecture

ARCHITECTURE = Architecture(
    "llama", ("llama", "mistral"), ("LlamaForCausalLM", "LLaMAForCausalLM", "MistralForCausalLM", "LlamaModel", "MistralModel"),
    gguf=(*rows.ends(), *rows.NORMS, *rows.attention(rotary=True), *rows.MLP), ignored=rows.BUFFERS,
)  # fmt: skip
