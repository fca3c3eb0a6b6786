"""The flat optimizer state in distributed checkpoints: buckets of a model-parallel rank, or its distrib_optim.pt.

    G = optimizer.distributed.dp_group_idx_N
    G.gbuf_idx_B.dtype_(torch.bfloat16, torch.float32).bucket_idx_K.{param, exp_avg, exp_avg_sq}       [elements]
    G.{optimizer, per_bucket_numel, per_bucket_numel_unpadded}/shard_0_1                               objects
    G.param_state/shard_0_1                                                the dict of a distrib_optim.pt, one object

with `chained_N.` before the names of experts' and further optimizers. Which parameters a rank has is not stored: the
whole model is spread over the run's own layout again (`spread`), and each rank's buffers are cut as those of a
distrib_optim.pt are. Uneven pipelines are tried as the options name them, until every buffer has its number of
elements.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from anyckpt.core import ops
from anyckpt.core.dtypes import DTYPES
from anyckpt.core.tensor import Tensor
from anyckpt.core.topology import Topology
from anyckpt.errors import UsageError
from anyckpt.finding import Report
from anyckpt.formats.megatron import distrib
from anyckpt.formats.megatron.join import place_all
from anyckpt.formats.megatron.optimizer import RankSlots, inner_of, merge, parameters_of
from anyckpt.formats.megatron.parts import is_expert
from anyckpt.formats.megatron.ranks import Grid, Rank, RankState, topology_of
from anyckpt.formats.megatron.spread import n_layers, spread
from anyckpt.sharding.pp import Chunk, chunk_order, layer_counts

_FLAT = re.compile(
    r"(?:(?:optimizer\.)?chained_(?P<chained>\d+)\.)?optimizer\.distributed\."
    r"dp_group_idx_(?P<group>\d+)\.(?P<rest>.+)"
)
_BUCKET = re.compile(
    r"gbuf_idx_(?P<buffer>\d+)\.dtype_\(?torch\.(?P<dtype>\w+)[^)]*\)?\."
    r"bucket_idx_(?P<bucket>\d+)\.(?P<slot>\w+)"
)


def is_flat(name: str) -> bool:
    """Whether a stored name is of flat optimizer state."""
    return _FLAT.fullmatch(name) is not None


@dataclass(slots=True)
class _Group:
    """What one optimizer of one model-parallel rank stored."""

    buffers: dict[int, dict[str, dict[int, Tensor]]] = field(default_factory=dict)  # buffer -> slot -> bucket -> flat
    dtypes: dict[int, str] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)

    def as_saved(self) -> dict[Any, Any]:
        """The same as the dict of a distrib_optim.pt: a flat tensor for all buckets of a buffer."""
        if isinstance(self.objects.get("param_state"), dict):
            saved: dict[Any, Any] = self.objects["param_state"]
            return saved
        out: dict[Any, Any] = {}
        for buffer, slots in self.buffers.items():
            flats = {slot: ops.concat([own[k] for k in sorted(own)], 0) for slot, own in slots.items()}
            out[buffer] = {(DTYPES.get(self.dtypes[buffer]), None): flats}
        return out


def read(
    tensors: Mapping[str, Tensor], objects: Mapping[str, Any], weights: Mapping[str, Tensor],
    args: Mapping[str, Any], report: Report,
) -> tuple[dict[str, dict[str, Tensor]], list[dict[str, Any]]]:
    """Moments and masters by the live model's names, and the groups. Raises UsageError where no layout fits."""
    found = _collected(tensors, objects)
    topology = topology_of(args)
    last: UsageError | None = None
    for counts in _layer_splits(weights, args, topology):
        try:
            return _cut(found, weights, args, topology, counts, report)
        except UsageError as error:
            last = error
    raise last or UsageError("the options name no layout that fits")


def _collected(tensors: Mapping[str, Tensor], objects: Mapping[str, Any]) -> dict[tuple[int, int], _Group]:
    """(chained optimizer, model-parallel rank) -> what it stored."""
    found: dict[tuple[int, int], _Group] = {}
    for name, value in (*tensors.items(), *objects.items()):
        match = _FLAT.fullmatch(name)
        if match is None:
            continue
        group = found.setdefault((int(match["chained"] or 0), int(match["group"])), _Group())
        bucket = _BUCKET.fullmatch(match["rest"])
        if bucket is not None and isinstance(value, Tensor):
            buffer = int(bucket["buffer"])
            group.dtypes[buffer] = bucket["dtype"]
            group.buffers.setdefault(buffer, {}).setdefault(bucket["slot"], {})[int(bucket["bucket"])] = value
        elif bucket is None:
            # An unsharded object is stored as a list of one.
            whole = value[0] if isinstance(value, list) and len(value) == 1 else value
            group.objects[match["rest"].partition("/")[0]] = whole
    return found


def _layer_splits(
    weights: Mapping[str, Tensor], args: Mapping[str, Any], topology: Topology
) -> Iterator[dict[Chunk, int]]:
    """Layers of each chunk as the options may mean: given ends, or even."""
    n, pp, vpp = n_layers(weights), topology.pp, topology.vpp
    order = chunk_order(pp, vpp)
    first, last = (args.get(f"decoder_{end}_pipeline_num_layers") for end in ("first", "last"))
    if isinstance(first, int) or isinstance(last, int):
        ends = {order[0]: first, order[-1]: last}
        given = {chunk: size for chunk, size in ends.items() if isinstance(size, int)}
        rest = [chunk for chunk in order if chunk not in given]
        if rest and (n - sum(given.values())) % len(rest) == 0:
            yield given | dict.fromkeys(rest, (n - sum(given.values())) // len(rest))
    extra = [
        chunk for chunk, option in ((order[0], "embedding"), (order[-1], "loss"))
        if args.get(f"account_for_{option}_in_pipeline_split")
    ]
    if extra and (n + len(extra)) % len(order) == 0:
        even = dict.fromkeys(order, (n + len(extra)) // len(order))
        yield {chunk: size - extra.count(chunk) for chunk, size in even.items()}
    yield layer_counts(n, pp, vpp)


def _cut(
    found: Mapping[tuple[int, int], _Group], weights: Mapping[str, Tensor], args: Mapping[str, Any],
    topology: Topology, counts: Mapping[Chunk, int], report: Report,
) -> tuple[dict[str, dict[str, Tensor]], list[dict[str, Any]]]:
    chunks_of = spread(weights, topology, args, counts=counts)
    states = {
        rank: RankState(f"rank {rank}", rank, {}, args, chunks, ({},) * len(chunks), ())
        for rank, chunks in chunks_of.items()
    }
    grid = Grid(states, topology)
    trial = Report()
    by_rank: dict[Rank, RankSlots] = {}
    chained = sorted({key[0] for key in found})
    for (which, group), stored in found.items():
        for_experts = len(chained) > 1 and which == chained[-1] and any(is_expert(n) for n in weights)
        rank = _rank_of(group, topology, for_experts)
        state = states.get(rank)
        if state is None:
            raise UsageError(f"no rank of the run's layout is number {group}")
        own = [local for local in parameters_of(state) if len(chained) == 1 or is_expert(local[1]) == for_experts]
        slots = by_rank.setdefault(rank, RankSlots())
        distrib.read_body(state, stored.as_saved(), own, slots, trial, f"dp_group_idx_{group}", topology.pp)
        inner = inner_of(stored.objects.get("optimizer"))
        for options in inner["param_groups"] if inner else ():
            if isinstance(options, dict):
                plain = {str(k): v for k, v in options.items() if k != "params"}
                slots.groups.append((plain, distrib.of_group(options, own, state)))
    if trial.errors:
        raise UsageError(trial.errors[0].message)
    placements = place_all(grid, trial)
    merged = merge(by_rank, grid, placements, report, "")
    if merged is None:
        return {}, []
    return {slot: dict(named) for slot, named in merged.slots.items()}, [dict(g) for g in merged.groups]


def _rank_of(group: int, topology: Topology, for_experts: bool) -> Rank:
    """The rank that a model-parallel group's number stands for: tensor ranks fastest, then (expert ranks,) stages."""
    if not for_experts:
        return group % topology.tp, group // topology.tp, 0
    et, rest = group % topology.etp, group // topology.etp
    e, p = rest % topology.ep, rest // topology.ep
    return (et + topology.etp * e) % topology.tp, p, e
