"""One spelling into another: names before core, core's with local layers, core's with Transformer Engine's.

    language_model.encoder.layers.0.self_attention.query_key_value.weight     before core; NeMo's too
    decoder.layers.0.input_layernorm.weight                                   core, local layers: all are brought to it
    decoder.layers.0.self_attention.linear_qkv.layer_norm_weight              core, Transformer Engine

A norm is fused into the projection behind it only where there is one: before experts it stays `pre_mlp_layernorm`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TypeVar

from anyckpt.formats.megatron.stacked import FUSED

T = TypeVar("T")

_OLD: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), name)
    for pattern, name in (
        (r"^language_model\.embedding\.", "embedding."),
        (r"^language_model\.output_layer\.", "output_layer."),
        (r"^(?:language_model\.)?word_embeddings_for_head\.", "output_layer."),
        (r"^language_model\.(?:encoder|transformer)\.final_(?:layer)?norm\.", "decoder.final_layernorm."),
        (r"^language_model\.(?:encoder|transformer)\.layers\.", "decoder.layers."),
    )
)
_OLD_LAYER: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(rf"^(decoder\.layers\.\d+\.){pattern}"), rf"\1{name}")
    for pattern, name in (
        (r"input_norm\.", "input_layernorm."),
        (r"post_attention_(?:layer)?norm\.", "pre_mlp_layernorm."),
        (r"(?:self_)?attention\.query_key_value\.", "self_attention.linear_qkv."),
        (r"(?:self_)?attention\.dense\.", "self_attention.linear_proj."),
        (r"mlp\.dense_h_to_4h\.", "mlp.linear_fc1."),
        (r"mlp\.dense_4h_to_h\.", "mlp.linear_fc2."),
    )
)
_GROUPED = re.compile(r"(\.experts\.)(linear_fc[12])\.(weight|bias)(\d+)$")
_SEQUENTIAL = re.compile(r"(\.experts\.)local_experts\.(\d+)\.(linear_fc[12])\.(weight|bias)$")


def local_name(name: str) -> str:
    """A name of any generation in core's spelling with local layers and sequential experts."""
    for pattern, new in _OLD:
        name = pattern.sub(new, name)
    if name.startswith("decoder.layers."):
        for pattern, new in _OLD_LAYER:
            name = pattern.sub(new, name)
        for fused, own in FUSED:
            name = name.replace(f".{fused}", f".{own}")
    return _GROUPED.sub(r"\1local_experts.\4.\2.\3", name)


def to_local(tensors: Mapping[str, T]) -> dict[str, T]:
    """All names in core's spelling with local layers."""
    return {local_name(name): tensor for name, tensor in tensors.items()}


def respelled(
    tensors: Mapping[str, T], *, engine: bool, grouped: bool, names: Iterable[str] | None = None
) -> dict[str, T]:
    """All names as a model of Transformer Engine's layers (or local ones), of grouped (or sequential) experts has them.

    `names`: of the weights, where `tensors` are a part of them: they tell which layers have experts.
    """
    plain = to_local(tensors)
    known = set(map(local_name, names)) if names is not None else set(plain)
    out: dict[str, T] = {}
    for name, tensor in plain.items():
        if engine:
            name = _fused(name, known)
        if grouped:
            name = _SEQUENTIAL.sub(r"\1\3.\4\2", name)
        out[name] = tensor
    return out


def _fused(name: str, known: set[str]) -> str:
    for fused, own in FUSED:
        head, found, leaf = name.partition(f".{own}")
        if found and f"{head}.{fused.rpartition('.')[0]}.weight" in known:
            return f"{head}.{fused}{leaf}"
    return name
