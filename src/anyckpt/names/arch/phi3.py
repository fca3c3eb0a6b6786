"""Phi-3 and 4: fused query-key-value, and gate and up in one."""

from __future__ import annotations

from anyckpt.names.arch import rows
from anyckpt.names.arch.table import Architecture

ARCHITECTURE = Architecture(
    "phi3", ("phi3",), ("Phi3ForCausalLM", "Phi3Model"),
    gguf=(
        *rows.ends(), *rows.NORMS, *rows.with_bias("self_attn.qkv_proj", "attn_qkv"),
        *rows.with_bias("self_attn.o_proj", "attn_output"), *rows.with_bias("mlp.gate_up_proj", "ffn_up"),
        *rows.with_bias("mlp.down_proj", "ffn_down"),
    ),
    ignored=rows.BUFFERS,
)  # fmt: skip
