"""From one model to what each rank has: the inverse of `join`, for writers and for flat buffers without names.

A rank's tensors come in the order in which Megatron registers parameters, since its optimizers count in that order.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from anyckpt.core.tensor import Tensor
from anyckpt.core.topology import Topology
from anyckpt.errors import UsageError
from anyckpt.formats.megatron import parts
from anyckpt.formats.megatron.join import is_tied
from anyckpt.formats.megatron.ranks import Rank, loading_ranks
from anyckpt.io.paths import printable
from anyckpt.sharding import tp as tensor_parallel
from anyckpt.sharding.pp import Chunk, chunk_order, layer_counts, local_experts
from anyckpt.sharding.tp import Partition, is_expert

EMBEDDINGS = ("word_embeddings", "position_embeddings", "tokentype_embeddings")
_MODULE_ORDER = (
    # transformer_layer.py, attention.py, mlp.py, moe_layer.py of core 0.16; before core: legacy/model/transformer.py
    "input_layernorm", "input_norm", "self_attention.linear_proj", "self_attention.linear_q_proj",
    "self_attention.linear_q_down_proj", "self_attention.linear_q_up_proj", "self_attention.linear_kv_down_proj",
    "self_attention.linear_kv_up_proj", "self_attention.linear_qkv", "self_attention.query_key_value",
    "self_attention.dense", "self_attention.q_layernorm", "self_attention.k_layernorm", "self_attention.kv_layernorm",
    "post_attention_layernorm", "post_attention_norm", "pre_mlp_layernorm", "mlp.router", "mlp.experts",
    "mlp.shared_experts", "mlp.linear_fc1", "mlp.dense_h_to_4h", "mlp.linear_fc2", "mlp.dense_4h_to_h",
)  # fmt: skip
_LEAF_ORDER = ("layer_norm_weight", "layer_norm_bias", "weight", "bias")
_HEADS = re.compile(r"(^|\.)(output_layer|word_embeddings_for_head|lm_head|pooler|binary_head)\.")

Chunks = tuple[dict[str, Tensor], ...]
"""A rank's tensors by local name, one dict a virtual chunk."""


def registered(names: Iterable[str]) -> list[str]:
    """Names in the order of registration: embeddings, layers as their modules are made, last norm, head."""
    return sorted(names, key=_position)


def _position(name: str) -> tuple[Any, ...]:
    found = parts.layer_of(name)
    if found is None:
        stage = 0 if "embedding" in name and not _HEADS.search(name) else 3 if _HEADS.search(name) else 2
        inner = next((i for i, e in enumerate(EMBEDDINGS) if e in name), 0)
        return stage, inner, 0, (0, 0, 0), _leaf(name), name
    stack, layer, rest = found
    module = next((i for i, m in enumerate(_MODULE_ORDER) if rest.startswith(m + ".")), len(_MODULE_ORDER))
    stage = 1 if stack in ("decoder.", "encoder.", "language_model.encoder.") else 2
    return stage, layer, module, _expert_position(name), _leaf(name), name


def _expert_position(name: str) -> tuple[int, int, int]:
    """Sequential experts come one by one, grouped ones layer by layer."""
    found = parts.expert_of(name)
    second = int("linear_fc2" in name)
    if found is None:
        return 0, second, 0
    if found[2]:
        return found[1], second, 0
    return 0, 2 * second + int(".bias" in name), found[1]


def _leaf(name: str) -> int:
    leaf = name.rpartition(".")[2].rstrip("0123456789")
    return _LEAF_ORDER.index(leaf) if leaf in _LEAF_ORDER else len(_LEAF_ORDER)


def spread(
    weights: Mapping[str, Tensor],
    topology: Topology,
    args: Mapping[str, Any],
    *,
    counts: Mapping[Chunk, int] | None = None,
    like: Mapping[str, Tensor] | None = None,
) -> dict[Rank, Chunks]:
    """The tensors of every file that the ranks of a layout load.

    `weights` are the whole model's, under core names (or moments under the names of their parameters, and then `like`
    are the weights: what is gated is told by their shapes). `counts`: layers of each chunk, an even split without it.
    Raises UsageError where something does not divide, saying what would.
    """
    like = weights if like is None else like
    counts = layer_counts(n_layers(like), topology.pp, topology.vpp) if counts is None else counts
    experts = n_experts(like)
    per_rank = local_experts(experts, topology.ep) if experts else 0
    order = chunk_order(topology.pp, topology.vpp)
    first: dict[Chunk, int] = {}
    n = 0
    for chunk in order:
        first[chunk], n = n, n + counts.get(chunk, 0)
    tied = _tied_name(weights, args, topology.pp)
    own_ranks = loading_ranks(topology)
    found: dict[Rank, list[dict[str, Tensor]]] = {
        (t, p, e): [{} for _ in range(topology.vpp)] for p in range(topology.pp) for t, e in own_ranks
    }
    for name in registered(weights):
        partition = parts.partition_of(name, like)
        if partition is None:
            if topology.tp > 1:
                raise UsageError(
                    f"no rule says how {printable(name)} is split over tensor ranks", hint="write it with --tp 1"
                )
            partition = "replicated"
        chunk, local = _home(name, order, first, counts)
        shards = _shards(name, weights[name], partition, topology)
        expert = parts.expert_of(name)
        for t, e in own_ranks:
            if expert is not None and expert[1] // per_rank != e:
                continue
            if expert is not None:
                local = parts.with_expert(local, expert[1] % per_rank)
            index = _expert_tensor_rank(t, e, topology) if is_expert(partition) else t
            found[t, chunk[0], e][chunk[1]][local] = shards[index]
    if tied is not None:
        last = order[-1]
        for t, e in own_ranks:
            found[t, last[0], e][last[1]][tied[1]] = found[t, 0, e][0][tied[0]]
    return {rank: tuple(chunks) for rank, chunks in found.items()}


def _tied_name(weights: Mapping[str, Tensor], args: Mapping[str, Any], pp: int) -> tuple[str, str] | None:
    """The tied embedding and what its copy on the last stage is called; None where there is no copy."""
    if pp == 1 or not is_tied(args):
        return None
    name = next((n for n in weights if n.endswith("embedding.word_embeddings.weight")), None)
    if name is None:
        return None
    return name, "word_embeddings_for_head.weight" if name.startswith("language_model.") else "output_layer.weight"


def _home(
    name: str, order: Sequence[Chunk], first: Mapping[Chunk, int], counts: Mapping[Chunk, int]
) -> tuple[Chunk, str]:
    """The chunk that a parameter is in, and its name there."""
    found = parts.layer_of(name)
    if found is None:
        return (order[0] if _position(name)[0] == 0 else order[-1]), name
    if _position(name)[0] != 1:
        return order[-1], name
    for chunk in order:
        if first[chunk] <= found[1] < first[chunk] + counts.get(chunk, 0):
            return chunk, parts.with_layer(name, found[1] - first[chunk])
    raise UsageError(f"{printable(name)} is of a layer that no pipeline stage has")


def _shards(name: str, tensor: Tensor, partition: Partition, topology: Topology) -> list[Tensor]:
    n_ranks = topology.etp if is_expert(partition) else topology.tp
    if tensor.ndim == 0 or (tensor.ndim == 1 and partition in ("row", "expert_row")):
        return [tensor] * n_ranks
    try:
        return tensor_parallel.split(tensor, partition, n_ranks)
    except UsageError as error:
        raise UsageError(f"{printable(name)} can't be split over {n_ranks} ranks: {error}") from error


def _expert_tensor_rank(t: int, e: int, topology: Topology) -> int:
    """The expert-tensor rank of the first rank with these coordinates: rank x has x % TP, x // ETP % EP, x % ETP."""
    tp, ep, etp = topology.tp, topology.ep, topology.etp
    n_ranks = max(tp * topology.cp * topology.dp, tp, ep * etp)
    return next(x % etp for x in range(n_ranks) if (x % tp, x // etp % ep) == (t, e))


def n_layers(names: Iterable[str]) -> int:
    """Layers of the main stack."""
    numbers = [found[1] for n in names if (found := parts.layer_of(n)) is not None and _position(n)[0] == 1]
    return max(numbers, default=-1) + 1


def n_experts(names: Iterable[str]) -> int:
    """Experts of a layer, 0 for a dense model."""
    return max((found[1] for n in names if (found := parts.expert_of(n)) is not None), default=-1) + 1
