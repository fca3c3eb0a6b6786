"""Qwen 3: norms on queries and keys."""

from __future__ import annotations

from anyckpt.names import settings
from anyckpt.names.arch import megatron, rows
from anyckpt.names.arch.table import Architecture

ARCHITECTURE = Architecture(
    "qwen3", ("qwen3",), ("Qwen3ForCausalLM", "Qwen3Model"),
    gguf=(
        *rows.ends(), *rows.NORMS, *rows.attention(), *rows.MLP,
        *(rows.row(f"{hf}.weight", f"{gguf}.weight") for hf, gguf in rows.QK_NORMS),
    ),
    megatron=(*megatron.DECODER, *megatron.QK_NORMS),
    settings=settings.DECODER, implied={**settings.GATED, "qk_layernorm": True}, constants=settings.SILU,
    ignored=rows.BUFFERS,
)  # fmt: skip
