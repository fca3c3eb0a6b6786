"""Megatron's rows that many decoders share; an architecture's module puts its column together from them.

Names are core's with local layers (`input_layernorm` by itself, experts one by one): `formats.megatron` brings every
other spelling to it. Facts: megatron/core 0.16, compared with transformers' own logits.
"""

from __future__ import annotations

from anyckpt.names.arch.table import Rule
from anyckpt.names.ops import GATED, QKV, SAME, Bijection
from anyckpt.sharding.tp import Partition

HF = "model.layers.{layer}."
OURS = "decoder.layers.{layer}."
_EXPERT = OURS + "mlp.experts.local_experts.{expert}."


def row(hf: str, name: str, partition: Partition = "replicated", *, optional: bool = False) -> Rule:
    """One tensor of every layer."""
    return Rule((HF + hf,), OURS + name, SAME, partition, optional)


def with_bias(hf: str, name: str, partition: Partition) -> tuple[Rule, Rule]:
    """A projection, and its bias where the model has one; a bias behind split columns is whole on every rank."""
    bias: Partition = "replicated" if partition == "row" else partition
    return row(f"{hf}.weight", f"{name}.weight", partition), row(f"{hf}.bias", f"{name}.bias", bias, optional=True)


def several(hf: tuple[str, ...], name: str, op: Bijection, partition: Partition) -> tuple[Rule, Rule]:
    """Projections that are one in Megatron, and their biases."""
    return (
        Rule(tuple(f"{HF}{n}.weight" for n in hf), f"{OURS}{name}.weight", op, partition),
        Rule(tuple(f"{HF}{n}.bias" for n in hf), f"{OURS}{name}.bias", op, partition, True),
    )


ENDS = (
    Rule(("model.embed_tokens.weight",), "embedding.word_embeddings.weight", SAME, "vocab"),
    Rule(("model.norm.weight",), "decoder.final_layernorm.weight"),
    Rule(("lm_head.weight",), "output_layer.weight", SAME, "vocab", True),
)
ATTENTION = (
    *several(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "self_attention.linear_qkv", QKV, "qkv"),
    *with_bias("self_attn.o_proj", "self_attention.linear_proj", "row"),
)
QK_NORMS = (
    row("self_attn.q_norm.weight", "self_attention.q_layernorm.weight"),
    row("self_attn.k_norm.weight", "self_attention.k_layernorm.weight"),
)
NORMS = (
    row("input_layernorm.weight", "input_layernorm.weight"),
    row("post_attention_layernorm.weight", "pre_mlp_layernorm.weight"),
)
MLP = (
    *several(("mlp.gate_proj", "mlp.up_proj"), "mlp.linear_fc1", GATED, "gate_up"),
    *with_bias("mlp.down_proj", "mlp.linear_fc2", "row"),
)


def experts(hf: str, gate: str, up: str, down: str) -> tuple[Rule, ...]:
    """Experts one by one: `hf` is the module that holds them."""
    lead = f"{HF}{hf}.experts.{{expert}}."
    return (
        Rule(
            (f"{lead}{gate}.weight", f"{lead}{up}.weight"), _EXPERT + "linear_fc1.weight", GATED, "expert_gate_up", True
        ),
        Rule((f"{lead}{down}.weight",), _EXPERT + "linear_fc2.weight", SAME, "expert_row", True),
    )


DECODER = (*ENDS, *NORMS, *ATTENTION, *MLP)
"""Llama and its like."""
