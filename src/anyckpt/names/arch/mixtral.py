"""Mixtral: GGUF's `llama` with experts. transformers 5 saves them one by one, under the older names."""

from __future__ import annotations

from anyckpt.names import settings
from anyckpt.names.arch import megatron, rows
from anyckpt.names.arch.table import Architecture

ARCHITECTURE = Architecture(
    "mixtral", ("mixtral",), ("MixtralForCausalLM", "MixtralModel"),
    gguf=(
        *rows.ends(), *rows.NORMS, *rows.attention(rotary=True),
        rows.row("block_sparse_moe.gate.weight", "ffn_gate_inp.weight"),
        *rows.experts((("w1", "ffn_gate_exps"), ("w2", "ffn_down_exps"), ("w3", "ffn_up_exps")), "block_sparse_moe"),
        *rows.FUSED_EXPERTS,
    ),
    megatron=(
        *megatron.ENDS, *megatron.NORMS, *megatron.ATTENTION,
        megatron.row("block_sparse_moe.gate.weight", "mlp.router.weight"),
        *megatron.experts("block_sparse_moe", "w1", "w3", "w2"),
    ),
    settings=(*settings.DECODER, *settings.MIXTRAL), implied={**settings.GATED, **settings.EXPERTS},
    constants=settings.SILU,
    ignored=rows.BUFFERS,
)  # fmt: skip
