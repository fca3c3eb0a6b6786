"""Qwen 3 with experts; layers of `mlp_only_layers` have a plain MLP."""

from __future__ import annotations

from anyckpt.names.arch import rows
from anyckpt.names.arch.table import Architecture

ARCHITECTURE = Architecture(
    "qwen3moe", ("qwen3_moe",), ("Qwen3MoeForCausalLM", "Qwen3MoeModel"),
    gguf=(
        *rows.ends(), *rows.NORMS, *rows.attention(), *rows.MLP,
        *(rows.row(f"{hf}.weight", f"{gguf}.weight") for hf, gguf in rows.QK_NORMS),
        rows.row("mlp.gate.weight", "ffn_gate_inp.weight"), *rows.QWEN_EXPERTS,
    ),
    ignored=rows.BUFFERS,
)  # fmt: skip
