"""Qwen 3 with experts; layers of `mlp_only_layers` have a plain MLP."""

from __future__ import annotations

from anyckpt.names import settings
from anyckpt.names.arch import megatron, rows
from anyckpt.names.arch.table import Architecture

ARCHITECTURE = Architecture(
    "qwen3moe", ("qwen3_moe",), ("Qwen3MoeForCausalLM", "Qwen3MoeModel"),
    gguf=(
        *rows.ends(), *rows.NORMS, *rows.attention(), *rows.MLP,
        *(rows.row(f"{hf}.weight", f"{gguf}.weight") for hf, gguf in rows.QK_NORMS),
        rows.row("mlp.gate.weight", "ffn_gate_inp.weight"), *rows.QWEN_EXPERTS,
    ),
    megatron=(
        *megatron.DECODER, *megatron.QK_NORMS, megatron.row("mlp.gate.weight", "mlp.router.weight"),
        *megatron.experts("mlp", "gate_proj", "up_proj", "down_proj"),
    ),
    settings=(*settings.DECODER, *settings.QWEN_EXPERTS),
    implied={**settings.GATED, **settings.EXPERTS, "qk_layernorm": True}, constants=settings.SILU,
    ignored=rows.BUFFERS,
)  # fmt: skip
