"""The names of `torch_dist` and zarr checkpoints, and those of the live model: layers and experts stacked, norms fused.

    decoder.layers.self_attention.linear_qkv.weight              [layers, rows, columns]
    decoder.layers.3.self_attention.linear_qkv.weight            one a layer, where layers differ, or in new releases
    decoder.layers.mlp.experts.experts.linear_fc1.weight         [layers, experts, rows, columns]
    optimizer.state.exp_avg.decoder.layers.…                     a slot of the same
    decoder.layers.self_attention.linear_qkv._extra_state/shard_3_24    an object: its place in a grid, and the grid
    chained_0.optimizer.state…                                   of one of several optimizers, in some releases

Names are Transformer Engine's also where the model has local layers: what it calls `input_layernorm` is stored as
`self_attention.linear_qkv.layer_norm_…`. `args.transformer_impl` says which spelling the live model has.
Facts: core 0.10 to 0.16 (files), megatron/core/models/gpt/gpt_layer_specs.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from anyckpt.core import ops
from anyckpt.core.box import Box
from anyckpt.core.tensor import Piece, Tensor

_STACK = re.compile(r"(.*?layers)\.(?!\d+\.)(.+)")
_EXPERTS = ".experts.experts."
_SLOT = re.compile(r"(?:(?:optimizer\.)?chained_\d+\.)?optimizer\.state\.(\w+)\.(.+)")
_SHARD = re.compile(r"(.+)/shard_([\d.]+)_([\d.]+)")
FUSED = (
    ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
    ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
)
"""What a norm is called in the file, and in a model of local layers."""
SLOT_NAMES = {"fp32_param": "master", "param": "master"}


@dataclass(frozen=True, slots=True)
class Spelling:
    """How the live model is spelled. `local`: norms by themselves. `grouped`: experts of Transformer Engine's kind."""

    local: bool
    grouped: bool


def spelling_of(args: Mapping[str, Any]) -> Spelling:
    """The live model's spelling, by the run's options; Transformer Engine's where they don't say."""
    return Spelling(args.get("transformer_impl") == "local", bool(args.get("moe_grouped_gemm")))


def slot_of(name: str) -> tuple[str, str] | None:
    """(slot, parameter) of a name of optimizer state; None for the others."""
    match = _SLOT.fullmatch(name)
    if match is None:
        return None
    return SLOT_NAMES.get(match[1], match[1]), match[2]


def shard_of(name: str) -> tuple[str, tuple[int, ...], tuple[int, ...]] | None:
    """(key, index, grid) of an unsharded object's name."""
    match = _SHARD.fullmatch(name)
    if match is None:
        return None
    index, grid = (tuple(int(n) for n in match[i].split(".") if n) for i in (2, 3))
    return match[1], index, grid


def live_names(tensors: Mapping[str, Tensor], spelling: Spelling) -> dict[str, Tensor]:
    """Every layer's and expert's tensor by itself, under the live model's names, in the order of layers."""
    found: list[tuple[int, str, Tensor]] = []
    for name, tensor in tensors.items():
        match = _STACK.fullmatch(name)
        if match is not None and tensor.ndim:
            for layer, part in enumerate(unstacked(tensor)):
                found += _experts(f"{match[1]}.{layer}.{match[2]}", part, layer)
        else:
            own = re.match(r".*?layers\.(\d+)\.", name)
            found += _experts(name, tensor, int(own[1]) if own else -1)
    found.sort(key=lambda item: item[0])
    return {live_name(name, spelling): tensor for _, name, tensor in found}


def _experts(name: str, tensor: Tensor, layer: int) -> list[tuple[int, str, Tensor]]:
    if _EXPERTS not in name or not tensor.ndim:
        return [(layer, name, tensor)]
    head, _, tail = name.partition(_EXPERTS)
    return [(layer, f"{head}.experts.local_experts.{j}.{tail}", part) for j, part in enumerate(unstacked(tensor))]


def live_name(name: str, spelling: Spelling) -> str:
    """One name as the live model has it."""
    if spelling.local:
        for fused, own in FUSED:
            if f".{fused}" in name:
                return name.replace(fused, own)
    if spelling.grouped:
        return re.sub(r"\.local_experts\.(\d+)\.(linear_fc[12]\.(?:weight|bias))$", r".\2\1", name)
    return name


def stored_name(name: str, *, fuse: bool = True) -> tuple[str, int | None, int | None]:
    """The stacked name of a live model's parameter, its layer and its expert: the inverse of `live_names`."""
    name = re.sub(r"\.experts\.(linear_fc[12]\.(?:weight|bias))(\d+)$", r".experts.local_experts.\2.\1", name)
    if fuse:
        for fused, own in FUSED:
            name = re.sub(rf"(layers\.\d+\.){re.escape(own)}", rf"\1{fused}", name)
    layer = expert = None
    if match := re.fullmatch(r"(.*?layers)\.(\d+)\.(.+)", name):
        name, layer = f"{match[1]}.{match[3]}", int(match[2])
    if match := re.fullmatch(r"(.+)\.experts\.local_experts\.(\d+)\.(.+)", name):
        name, expert = f"{match[1]}{_EXPERTS}{match[3]}", int(match[2])
    return name, layer, expert


def unstacked(tensor: Tensor) -> list[Tensor]:
    """The parts along axis 0. Where every piece lies in one part, the parts have their own pieces and no more."""
    n = tensor.shape[0]
    if tensor.op is None and tensor.pieces and n > 1:
        own: list[list[Piece]] = [[] for _ in range(n)]
        for piece in tensor.pieces:
            box = piece.box
            if box is None or box.stop[0] - box.start[0] != 1 or piece.strides is not None:
                break
            own[box.start[0]].append(replace(piece, box=Box(box.start[1:], box.stop[1:])))
        else:
            return [Tensor(tensor.dtype, tensor.shape[1:], tuple(pieces)) for pieces in own]
    return [tensor[i] for i in range(n)]


def stacked(parts: Iterable[Tensor]) -> Tensor:
    """Tensors of one shape along a new axis 0."""
    return ops.concat([ops.reshape(t, (1, *t.shape)) for t in parts], 0)
