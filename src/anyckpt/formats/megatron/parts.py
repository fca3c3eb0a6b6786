"""What Megatron's parameter names say: how tensor parallelism splits each, which layer and expert it belongs to.

Three generations of names (0.x to core 0.16, run; HEAD of 2026, read):

    language_model.encoder.layers.N.self_attention.query_key_value.weight       before core ("legacy models")
    decoder.layers.N.self_attention.linear_qkv.weight                           core, local layers
    decoder.layers.N.self_attention.linear_qkv.layer_norm_weight                core, Transformer Engine: norms fused in

and experts as `mlp.experts.local_experts.J.linear_fc1.weight` (sequential) or `mlp.experts.linear_fc1.weightJ`
(Transformer Engine's grouped ones). N and J count within a rank; the whole model's numbers are given to them here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache

from anyckpt.core.tensor import Tensor
from anyckpt.sharding.tp import Partition

EXTRA_STATE = "_extra_state"
"""Transformer Engine's scales and amax history, opaque; None for local layers."""

_LAYER = re.compile(r"(^|.*?\.)layers\.(\d+)\.(.*)")
_EXPERT = re.compile(r"(.*\.experts\.)(?:(local_experts\.)(\d+)(\..*)|(linear_fc[12]\.(?:weight|bias))(\d+))")

# The module that a parameter belongs to, by its own name -> how its weight and its bias are split.
_MODULES: dict[str, tuple[Partition, Partition]] = {
    **dict.fromkeys(("linear_qkv", "query_key_value"), ("qkv", "qkv")),
    **dict.fromkeys(
        ("linear_q", "linear_kv", "linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "query", "key_value"),
        ("column", "column"),
    ),
    **dict.fromkeys(("linear_fc1", "dense_h_to_4h"), ("column", "column")),  # gate_up where the shapes say so
    **dict.fromkeys(("linear_fc2", "dense_4h_to_h", "linear_proj", "dense"), ("row", "replicated")),
    **dict.fromkeys(("word_embeddings", "word_embeddings_for_head", "output_layer"), ("vocab", "vocab")),
}
_REPLICATED = re.compile(
    r"(^|\.)(position_embeddings|tokentype_embeddings|router|pooler\.dense|binary_head|lm_head\.dense|rotary_pos_emb|"
    r"linear_kv_down_proj|linear_q_down_proj|eh_proj)\.|norm\d?\.(weight|bias)$|layer_?norm\.|_norm\.|"
    r"\.layer_norm_(weight|bias)$|\.gate_weight$|\.expert_bias$|\.local_tokens_per_expert$|\.inv_freq$|"
    r"^input_layernorm"
)
_FC1 = ("linear_fc1", "dense_h_to_4h")
_FC2 = {"linear_fc1": "linear_fc2", "dense_h_to_4h": "dense_4h_to_h"}


@lru_cache(maxsize=100_000)
def module_of(name: str) -> tuple[str, str]:
    """The innermost module's name and the parameter's kind (weight, bias) without an expert's number.

    >>> module_of("decoder.layers.0.mlp.experts.linear_fc1.weight3")
    ('linear_fc1', 'weight')
    """
    path, _, leaf = name.rpartition(".")
    return path.rpartition(".")[2], leaf.rstrip("0123456789")


def partition_of(name: str, shards: Mapping[str, Tensor] | None = None) -> Partition | None:
    """How a parameter is split, None where no rule knows its name.

    `shards`: the tensors of the same rank by name; they tell a gated first layer from a plain one: it has twice the
    rows that the second layer has columns.
    """
    module, kind = module_of(name)
    if kind in ("layer_norm_weight", "layer_norm_bias"):
        return "replicated"
    found = _MODULES.get(module)
    if module == "dense" and not re.search(r"attention\.dense\.", name):
        found = None
    if found is None:
        if name == "lm_head.bias" or name.endswith(".lm_head.bias"):
            return "vocab"
        return "replicated" if _REPLICATED.search(name) else None
    partition = found[0] if kind == "weight" else found[1]
    if module in _FC1 and shards is not None and _is_gated(name, module, shards):
        partition = "gate_up"
    if ".experts." in name and partition in ("column", "row", "gate_up"):
        partition = {"column": "expert_column", "row": "expert_row", "gate_up": "expert_gate_up"}[partition]  # type: ignore[assignment]
    return partition


def _is_gated(name: str, module: str, shards: Mapping[str, Tensor]) -> bool:
    head, _, tail = name.rpartition(module)
    second = shards.get(f"{head}{_FC2[module]}{tail.replace('bias', 'weight')}")
    own = shards.get(name)
    return own is not None and second is not None and second.ndim == 2 and own.shape[0] == 2 * second.shape[1]


@lru_cache(maxsize=100_000)
def layer_of(name: str) -> tuple[str, int, str] | None:
    """(stack, layer, rest) of a layer's parameter: `("decoder.", 3, "mlp.linear_fc1.weight")`; None for the others."""
    match = _LAYER.fullmatch(name)
    return (match[1], int(match[2]), match[3]) if match else None


@lru_cache(maxsize=100_000)
def expert_of(name: str) -> tuple[str, int, str] | None:
    """(before, expert, after) of an expert's parameter, in either spelling; None for the others."""
    match = _EXPERT.fullmatch(name)
    if match is None:
        return None
    if match[2]:
        return match[1] + match[2], int(match[3]), match[4]
    return match[1] + match[5], int(match[6]), ""


def with_layer(name: str, layer: int) -> str:
    """The same name with another layer number."""
    found = layer_of(name)
    return name if found is None else f"{found[0]}layers.{layer}.{found[2]}"


def with_expert(name: str, expert: int) -> str:
    """The same name with another expert number."""
    found = expert_of(name)
    return name if found is None else f"{found[0]}{expert}{found[2]}"


def is_expert(name: str) -> bool:
    """Whether Megatron's optimizer counts it among the expert parameters (shared experts are not)."""
    return ".experts." in name


def decays(name: str, ndim: int) -> bool:
    """Whether weight decay applies: not to biases and vectors (megatron/core/optimizer: `_get_param_groups`)."""
    return not (name.endswith(".bias") or ndim == 1)
