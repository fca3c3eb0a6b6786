"""Gemma 2: four norms a layer, each stored as its distance from 1; the head is always tied."""

from __future__ import annotations

from anyckpt.names.arch import rows
from anyckpt.names.arch.table import Architecture
from anyckpt.names.ops import PLUS_ONE

ARCHITECTURE = Architecture(
    "gemma2", ("gemma2",), ("Gemma2ForCausalLM", "Gemma2Model"),
    gguf=(
        *rows.ends(PLUS_ONE)[:2], *rows.attention(), *rows.MLP,
        *(rows.row(f"{hf}.weight", f"{gguf}.weight", PLUS_ONE) for hf, gguf in rows.GEMMA_NORMS),
    ),
    ignored=("lm_head.weight", *rows.BUFFERS),
)  # fmt: skip
