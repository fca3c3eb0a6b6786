"""Gemma 3, the text part: as Gemma 2, with norms on queries and keys."""

from __future__ import annotations

from anyckpt.names.arch import rows
from anyckpt.names.arch.table import Architecture
from anyckpt.names.ops import PLUS_ONE

ARCHITECTURE = Architecture(
    "gemma3", ("gemma3_text", "gemma3"), ("Gemma3ForCausalLM", "Gemma3TextModel", "Gemma3ForConditionalGeneration"),
    gguf=(
        *rows.ends(PLUS_ONE), *rows.attention(), *rows.MLP,
        *(rows.row(f"{hf}.weight", f"{gguf}.weight", PLUS_ONE) for hf, gguf in (*rows.GEMMA_NORMS, *rows.QK_NORMS)),
    ),
    ignored=("*vision_tower.*", "*multi_modal_projector.*", *rows.BUFFERS),
)  # fmt: skip
