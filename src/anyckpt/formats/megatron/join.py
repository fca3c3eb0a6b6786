"""From the ranks' tensors to one model: global layer and expert numbers, shards joined, copies known as copies.

The work is done once, as placements (which shards of which ranks make a parameter, and how); weights, moments and
masters are then joined by the same placements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from anyckpt.core import ops
from anyckpt.core.box import Shape
from anyckpt.core.dtypes import DType
from anyckpt.core.source import Absent
from anyckpt.core.tensor import Tensor, from_source, stored_bytes
from anyckpt.finding import Report
from anyckpt.formats.megatron import parts
from anyckpt.formats.megatron.ranks import Grid, Rank, RankState
from anyckpt.io.paths import printable
from anyckpt.sharding.pp import Chunk, chunk_order, first_layers
from anyckpt.sharding.tp import Partition, is_expert, join

Lookup = Callable[[Rank, int, str], Tensor | None]
"""(rank, virtual chunk, local name) -> its shard of a weight or of a slot."""
Kind = tuple[DType, Shape]
KindOf = Callable[[Rank, int, str], Kind | None]


@dataclass(frozen=True, slots=True)
class Placement:
    """One parameter of the whole model: its local name in a chunk, and the ranks of its shards (None: lost)."""

    name: str
    local: str
    chunk: Chunk
    partition: Partition
    ranks: tuple[Rank | None, ...]
    replicas: tuple[Rank, ...] = ()


@dataclass(frozen=True, slots=True)
class Placements:
    """All parameters in the order of the model. `copies`: a tied weight's second copy -> the name it is a copy of."""

    all: tuple[Placement, ...]
    copies: Mapping[str, str]


def place_all(grid: Grid, report: Report) -> Placements:
    """Find the shards of every parameter. Names that no rule knows are reported and left out where TP > 1."""
    topology = grid.topology
    args = grid.first.args
    order = chunk_order(topology.pp, topology.vpp)
    first = _first_layers(grid, report)
    placed: dict[str, Placement] = {}
    copies: dict[str, str] = {}
    unknown: list[str] = []
    for p, v in order:
        dense = grid.dense(p)
        sample = next((s for s in dense if s is not None), None)
        if sample is None or v >= len(sample.chunks):
            continue
        experts = [(e, grid.expert(p, e)) for e in range(topology.ep)]
        for local, tensor in sample.chunks[v].items():
            partition = _refined(parts.partition_of(local, sample.chunks[v]), local, tensor, args)
            if partition is None:
                if topology.tp > 1 or (topology.ep > 1 and parts.is_expert(local)):
                    unknown.append(local)
                    continue
                partition = "replicated"
            name = _with_first(local, first, (p, v))
            if parts.expert_of(local) is not None:
                continue  # below, for every expert rank
            ranks = _ranks(dense)
            if partition == "replicated":
                ranks = (sample.rank,)
            replicas = tuple(s.rank for s in grid.replicas(p) if _is_replica(s.rank, ranks, partition))
            original = _original(local, p, topology.pp, placed, args)
            if original is not None:
                copies[name] = original
            elif name in placed:
                copies[f"{name}@{p}"] = name
                name = f"{name}@{p}"
            placed[name] = Placement(name, local, (p, v), partition, ranks, replicas)
        for e, files in experts:
            own = next((s for s in files if s is not None), None)
            if own is None or v >= len(own.chunks):
                continue
            n_local = _n_experts(own.chunks[v])
            for local in own.chunks[v]:
                found = parts.expert_of(local)
                if found is None:
                    continue
                partition = parts.partition_of(local, own.chunks[v])
                if partition is None or not (is_expert(partition) or partition == "replicated"):
                    unknown.append(local)
                    continue
                name = parts.with_expert(_with_first(local, first, (p, v)), found[1] + e * n_local)
                ranks = _ranks(files) if is_expert(partition) else (own.rank,)
                placed[name] = Placement(name, local, (p, v), partition, ranks)
    if unknown:
        shown = ", ".join(printable(n, limit=100) for n in unknown[:3])
        report.add(
            "unmapped-tensor", f"no rule says how {len(unknown)} parameters are split over ranks: {shown}",
            where=grid.first.file, hint="they are left out; please report the model's kind",
        )
    return Placements(tuple(placed.values()), copies)


def _ranks(states: Iterable[RankState | None]) -> tuple[Rank | None, ...]:
    return tuple(None if state is None else state.rank for state in states)


def _is_replica(rank: Rank, taken: tuple[Rank | None, ...], partition: Partition) -> bool:
    """Whether a rank holds another copy: any other for what is not split, the same tensor rank for what is."""
    if rank in taken:
        return False
    return partition == "replicated" or any(r is not None and r[0] == rank[0] for r in taken)


def _refined(
    partition: Partition | None, local: str, tensor: Tensor, args: Mapping[str, Any]
) -> Partition | None:
    """Latent attention's down projections: whole on every rank with Transformer Engine, split with local layers."""
    for module, sizes in (
        ("linear_q_down_proj", ("q_lora_rank",)), ("linear_kv_down_proj", ("kv_lora_rank", "qk_pos_emb_head_dim")),
    ):
        if f".{module}." in local and partition == "replicated":
            rows = [args.get(size) for size in sizes]
            if all(isinstance(n, int) for n in rows):
                return "replicated" if tensor.shape[0] == sum(rows) else "column"  # type: ignore[arg-type]
            return None
    return partition


def _n_experts(names: Iterable[str]) -> int:
    return 1 + max((found[1] for name in names if (found := parts.expert_of(name)) is not None), default=-1)


def _first_layers(grid: Grid, report: Report) -> dict[str, dict[Chunk, int]]:
    """For every stack of layers, the number of each chunk's first one in the whole model."""
    topology = grid.topology
    counts: dict[str, dict[Chunk, int]] = {}
    absent: list[Chunk] = []
    for chunk in chunk_order(topology.pp, topology.vpp):
        p, v = chunk
        sample = next((s for s in grid.dense(p) if s is not None), None)
        if sample is None or v >= len(sample.chunks):
            absent.append(chunk)
            continue
        for name in sample.chunks[v]:
            found = parts.layer_of(name)
            if found is not None:
                own = counts.setdefault(found[0], {})
                own[chunk] = max(own.get(chunk, 0), found[1] + 1)
    n_layers = grid.first.args.get("num_layers")
    for stack, own in counts.items():
        if not isinstance(n_layers, int) or stack not in ("decoder.", "language_model.encoder.", "encoder."):
            continue
        n_lacking = n_layers - sum(own.values())
        if absent and n_lacking > 0 and n_lacking % len(absent) == 0:
            own.update(dict.fromkeys(absent, n_lacking // len(absent)))
        elif n_lacking and len(counts) == 1:
            report.add(
                "inconsistent", f"the ranks hold {sum(own.values())} layers, the run's options say {n_layers}",
                where=grid.first.file,
            )
    return {stack: first_layers(own, topology.pp, topology.vpp) for stack, own in counts.items()}


def _with_first(local: str, first: Mapping[str, Mapping[Chunk, int]], chunk: Chunk) -> str:
    found = parts.layer_of(local)
    return local if found is None else parts.with_layer(local, found[1] + first[found[0]][chunk])


def is_tied(args: Mapping[str, Any]) -> bool | None:
    """Whether input and output embeddings are one weight; None where the options don't say."""
    if (untied := args.get("untie_embeddings_and_output_weights")) is not None:
        return not untied
    if (shared := args.get("share_embeddings_and_output_weights")) is not None:
        return bool(shared)
    return None


def _original(
    local: str, p: int, pp: int, placed: Mapping[str, Placement], args: Mapping[str, Any]
) -> str | None:
    """The first stage's name of a tied embedding's copy on the last stage; None for what is no copy."""
    if pp == 1 or p != pp - 1:
        return None
    if not (local.endswith("word_embeddings_for_head.weight") or (local == "output_layer.weight" and is_tied(args))):
        return None
    return next((name for name in placed if name.endswith("embedding.word_embeddings.weight")), None)


def join_all(
    placements: Placements, lookup: Lookup, report: Report, kind_of: KindOf | None = None
) -> Mapping[str, Tensor]:
    """Every parameter that any rank has by `lookup`, whole; lost shards are absent parts of it.

    Second copies of tied weights are left out. What does not go together is reported and left out; a tensor is made
    when it is asked for, for there are many. `kind_of` says what `lookup` would give without making it.
    """
    kind_of = kind_of or (lambda rank, v, local: _kind(lookup(rank, v, local)))
    found: dict[str, Placement] = {}
    for placement in placements.all:
        if placement.name in placements.copies:
            continue
        v = placement.chunk[1]
        kinds = {kind_of(r, v, placement.local) for r in placement.ranks if r is not None} - {None}
        if len(kinds) > 1:
            listed = ", ".join(sorted(f"{kind[0]} {list(kind[1])}" for kind in kinds if kind))
            report.add(
                "shape-mismatch", f"the ranks' shards don't go together: they are of {listed}",
                where=printable(placement.name),
            )
        elif kinds:
            found[placement.name] = placement
    return Joined(found, lookup)


def _kind(tensor: Tensor | None) -> Kind | None:
    return None if tensor is None else (tensor.dtype, tensor.shape)


class Joined(Mapping[str, Tensor]):
    """Parameters by global name, each joined from its shards on first use."""

    __slots__ = ("_lookup", "_made", "_placements")

    def __init__(self, placements: Mapping[str, Placement], lookup: Lookup) -> None:
        self._placements, self._lookup = placements, lookup
        self._made: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        made = self._made.get(name)
        if made is None:
            made = self._made[name] = join_one(self._placements[name], self._lookup)
        return made

    def __iter__(self) -> Iterator[str]:
        return iter(self._placements)

    def __len__(self) -> int:
        return len(self._placements)


def join_one(placement: Placement, lookup: Lookup) -> Tensor:
    """One parameter, of which some rank has a shard."""
    v = placement.chunk[1]
    shards = [None if rank is None else lookup(rank, v, placement.local) for rank in placement.ranks]
    known = next(s for s in shards if s is not None)
    if known.ndim == 0:  # a step, the same on every rank
        return known
    absent = from_source(
        known.dtype, known.shape, Absent(stored_bytes(known.dtype, known.shape), "the rank's file is not there")
    )
    return join([absent if s is None else s for s in shards], placement.partition)


def replicas_of(placements: Placements, lookup: Lookup) -> list[tuple[str, Tensor, Tensor]]:
    """What must be equal: (name, the shard that is read, another rank's copy of it)."""
    pairs: list[tuple[str, Tensor, Tensor]] = []
    for placement in placements.all:
        v = placement.chunk[1]
        for rank in placement.replicas:
            whole = placement.partition == "replicated"
            taken = next((r for r in placement.ranks if r is not None and (whole or r[0] == rank[0])), None)
            one = taken and lookup(taken, v, placement.local)
            other = lookup(rank, v, placement.local)
            if one is not None and other is not None:
                pairs.append((placement.name, one, other))
    return pairs


def weights_lookup(grid: Grid) -> Lookup:
    """Weights by rank, with the rows of old releases' query_key_value put into today's order."""

    def lookup(rank: Rank, v: int, local: str) -> Tensor | None:
        state = grid.states[rank]
        if v >= len(state.chunks):
            return None
        tensor = state.chunks[v].get(local)
        return tensor if tensor is None else modern_order(tensor, local, state, grid.topology.tp)

    return lookup


def modern_order(tensor: Tensor, local: str, state: RankState, tp: int) -> Tensor:
    """query_key_value as [heads, 3, size] rows; checkpoint version 0 has [3, heads, size], 1.0 [heads, size, 3]."""
    version = state.root.get("checkpoint_version", 0)
    if not isinstance(version, int | float) or version >= 2.0 or parts.module_of(local)[0] != "query_key_value":
        return tensor
    n_heads = state.args.get("num_attention_heads")
    if tensor.ndim == 0 or not isinstance(n_heads, int) or n_heads % tp or tensor.shape[0] % (3 * (n_heads // tp)):
        return tensor
    heads = n_heads // tp
    size, rest = tensor.shape[0] // (3 * heads), tensor.shape[1:]
    old = (3, heads, size) if version == 0 else (heads, size, 3)
    axes = (1, 0, 2) if version == 0 else (0, 2, 1)
    moved = ops.permute(ops.reshape(tensor, (*old, *rest)), (*axes, *range(3, 3 + len(rest))))
    return ops.reshape(moved, tensor.shape)
