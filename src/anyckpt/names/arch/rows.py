"""GGUF rows that many decoders share; an architecture's module puts its column together from them."""

from __future__ import annotations

from anyckpt.names.arch.table import Rule
from anyckpt.names.ops import GATE_UP, ROTARY_K, ROTARY_Q, SAME, STACK, Bijection

LAYER = "model.layers.{layer}."
BLOCK = "blk.{layer}."


def row(hf: str, gguf: str, op: Bijection = SAME, *, optional: bool = False) -> Rule:
    """One tensor of every layer."""
    return Rule((LAYER + hf,), BLOCK + gguf, op, optional=optional)


def with_bias(hf: str, gguf: str, op: Bijection = SAME) -> tuple[Rule, Rule]:
    """A projection, and its bias where the model has one."""
    return row(f"{hf}.weight", f"{gguf}.weight", op), row(f"{hf}.bias", f"{gguf}.bias", op, optional=True)


def ends(norm: Bijection = SAME) -> tuple[Rule, ...]:
    """Embedding, last norm and head."""
    return (
        Rule(("model.embed_tokens.weight",), "token_embd.weight"),
        Rule(("model.norm.weight",), "output_norm.weight", norm),
        Rule(("lm_head.weight",), "output.weight", optional=True),
    )


def attention(*, rotary: bool = False) -> tuple[Rule, ...]:
    """Separate projections; `rotary`: llama.cpp keeps this model's queries and keys in pairs."""
    return (
        *with_bias("self_attn.q_proj", "attn_q", ROTARY_Q if rotary else SAME),
        *with_bias("self_attn.k_proj", "attn_k", ROTARY_K if rotary else SAME),
        *with_bias("self_attn.v_proj", "attn_v"),
        *with_bias("self_attn.o_proj", "attn_output"),
    )


MLP = (
    *with_bias("mlp.gate_proj", "ffn_gate"), *with_bias("mlp.up_proj", "ffn_up"), *with_bias("mlp.down_proj",
    "ffn_down"),
)  # fmt: skip
NORMS = (row("input_layernorm.weight", "attn_norm.weight"), row("post_attention_layernorm.weight", "ffn_norm.weight"))
GEMMA_NORMS = (
    ("input_layernorm", "attn_norm"), ("post_attention_layernorm", "post_attention_norm"),
    ("pre_feedforward_layernorm", "ffn_norm"), ("post_feedforward_layernorm", "post_ffw_norm"),
)  # fmt: skip
QK_NORMS = (("self_attn.q_norm", "attn_q_norm"), ("self_attn.k_norm", "attn_k_norm"))
BUFFERS = ("*.rotary_emb.inv_freq", "*.attention.masked_bias", "*.attention.bias")
"""Saved by older transformers; computed by every runtime."""


def experts(names: tuple[tuple[str, str], ...], hf: str) -> tuple[Rule, ...]:
    """Experts saved one by one, stacked by llama.cpp; written in this order once a layer is complete."""
    return tuple(
        Rule((f"{LAYER}{hf}.experts.{{expert}}.{name}.weight",), f"{BLOCK}{gguf}.weight", STACK, together="experts")
        for name, gguf in names
    )


FUSED_EXPERTS = (
    Rule(
        (LAYER + "mlp.experts.gate_up_proj",), BLOCK + "ffn_gate_exps.weight", also=(BLOCK + "ffn_up_exps.weight",),
        parting=GATE_UP, optional=True,
    ),
    Rule((LAYER + "mlp.experts.down_proj",), BLOCK + "ffn_down_exps.weight", optional=True),
)  # fmt: skip
"""Experts in one tensor, as transformers 5 has them in memory and some trainers save them."""
QWEN_EXPERTS = (
    *experts((("down_proj", "ffn_down_exps"), ("gate_proj", "ffn_gate_exps"), ("up_proj", "ffn_up_exps")), "mlp"),
    *FUSED_EXPERTS,
)
