"""GPT-2: weights stored [in, out], a fused query-key-value, learned positions."""

from __future__ import annotations

from anyckpt.names.arch.table import Architecture, Rule
from anyckpt.names.ops import SAME, TRANSPOSE, Bijection


def _pair(hf: str, gguf: str, op: Bijection = SAME) -> tuple[Rule, Rule]:
    return Rule((f"{hf}.weight",), f"{gguf}.weight", op), Rule((f"{hf}.bias",), f"{gguf}.bias")


LAYER, BLOCK = "transformer.h.{layer}.", "blk.{layer}."
ARCHITECTURE = Architecture(
    "gpt2", ("gpt2",), ("GPT2LMHeadModel", "GPT2Model"),
    gguf=(
        Rule(("transformer.wte.weight",), "token_embd.weight"),
        Rule(("transformer.wpe.weight",), "position_embd.weight"),
        *_pair("transformer.ln_f", "output_norm"),
        Rule(("lm_head.weight",), "output.weight", optional=True),
        *_pair(LAYER + "ln_1", BLOCK + "attn_norm"), *_pair(LAYER + "ln_2", BLOCK + "ffn_norm"),
        *_pair(LAYER + "attn.c_attn", BLOCK + "attn_qkv", TRANSPOSE),
        *_pair(LAYER + "attn.c_proj", BLOCK + "attn_output", TRANSPOSE),
        *_pair(LAYER + "mlp.c_fc", BLOCK + "ffn_up", TRANSPOSE), *_pair(LAYER + "mlp.c_proj", BLOCK + "ffn_down", TRANSPOSE),
    ),
    prefix="transformer.", ignored=("*.attn.bias", "*.attn.masked_bias"),
)  # fmt: skip
