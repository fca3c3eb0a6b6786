"""Mixtral: GGUF's `llama` with experts. transformers 5 saves them one by one, under the older names."""

from __future__ import annotations

from anyckpt.names.arch import rows
from anyckpt.names.arch.table import Architecture

ARCHITECTURE = Architecture(
    "mixtral", ("mixtral",), ("MixtralForCausalLM", "MixtralModel"),
    gguf=(
        *rows.ends(), *rows.NORMS, *rows.attention(rotary=True),
        rows.row("block_sparse_moe.gate.weight", "ffn_gate_inp.weight"),
        *rows.experts((("w1", "ffn_gate_exps"), ("w2", "ffn_down_exps"), ("w3", "ffn_up_exps")), "block_sparse_moe"),
        *rows.FUSED_EXPERTS,
    ),
    ignored=rows.BUFFERS,
)  # fmt: skip
