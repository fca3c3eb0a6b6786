"""GPT-2: weights stored [in, out], a fused query-key-value, learned positions."""

from __future__ import annotations

from anyckpt.names import settings
from anyckpt.names.arch.table import Architecture, Rule
from anyckpt.names.ops import QKV_TRANSPOSED, SAME, TRANSPOSE, Bijection
from anyckpt.sharding.tp import Partition


def _pair(hf: str, gguf: str, op: Bijection = SAME) -> tuple[Rule, Rule]:
    return Rule((f"{hf}.weight",), f"{gguf}.weight", op), Rule((f"{hf}.bias",), f"{gguf}.bias")


def _both(
    hf: str, name: str, op: Bijection = SAME, partition: Partition = "replicated", bias: Bijection = SAME
) -> tuple[Rule, Rule]:
    """Weight and bias in Megatron; the bias behind split columns is whole on every rank."""
    whole: Partition = "replicated" if partition == "row" else partition
    return (
        Rule((f"{hf}.weight",), f"{name}.weight", op, partition), Rule((f"{hf}.bias",), f"{name}.bias", bias, whole),
    )  # fmt: skip


OURS = "decoder.layers.{layer}."
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
        *_pair(LAYER + "mlp.c_fc", BLOCK + "ffn_up", TRANSPOSE),
        *_pair(LAYER + "mlp.c_proj", BLOCK + "ffn_down", TRANSPOSE),
    ),
    megatron=(
        Rule(("transformer.wte.weight",), "embedding.word_embeddings.weight", SAME, "vocab"),
        Rule(("transformer.wpe.weight",), "embedding.position_embeddings.weight"),
        *_both("transformer.ln_f", "decoder.final_layernorm"),
        Rule(("lm_head.weight",), "output_layer.weight", SAME, "vocab", True),
        *_both(LAYER + "ln_1", OURS + "input_layernorm"), *_both(LAYER + "ln_2", OURS + "pre_mlp_layernorm"),
        *_both(LAYER + "attn.c_attn", OURS + "self_attention.linear_qkv", QKV_TRANSPOSED, "qkv", QKV_TRANSPOSED),
        *_both(LAYER + "attn.c_proj", OURS + "self_attention.linear_proj", TRANSPOSE, "row"),
        *_both(LAYER + "mlp.c_fc", OURS + "mlp.linear_fc1", TRANSPOSE, "column"),
        *_both(LAYER + "mlp.c_proj", OURS + "mlp.linear_fc2", TRANSPOSE, "row"),
    ),
    settings=settings.GPT2, implied=settings.GPT2_IMPLIED,
    prefix="transformer.", ignored=("*.attn.bias", "*.attn.masked_bias"),
)  # fmt: skip
