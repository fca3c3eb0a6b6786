"""distrib_optim.pt: the flat state of Megatron's distributed optimizer, gathered over the data-parallel ranks.

    {"buckets_coalesced": True,
     0: {(bfloat16, float32): {"param", "exp_avg", "exp_avg_sq": float32 [n], "numel_unpadded": n}},
     1: …}                                              one number a gradient buffer: virtual chunk × element type

or a list [dense, experts] of those for chained optimizers; None where this rank does not write the dense one (e > 0).
Where each parameter lies is not stored: it follows from the model and the run's options (`sharding.buckets`). Their
number of elements must come out, and where several bucket sizes give it, the one whose masters round to the weights
is taken. Files from before February 2024 have no `buckets_coalesced` and lists of buckets under {dtype: …}: read
where there is one bucket, since only then is the old layout today's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from anyckpt.core import ops
from anyckpt.core.dtypes import DType
from anyckpt.core.tensor import Tensor
from anyckpt.errors import CheckpointError
from anyckpt.finding import Report
from anyckpt.formats.megatron import parts
from anyckpt.formats.megatron.join import is_tied
from anyckpt.formats.megatron.optimizer import Local, RankSlots, entries_of, inner_of, parameters_of, shares
from anyckpt.formats.megatron.ranks import RankState
from anyckpt.sharding.buckets import Buffer, bucket_sizes, lay_out

FILE = "distrib_optim.pt"
SAMPLE = 64  # elements of a master compared with its weight, to choose between layouts
MAX_SAMPLED = 12
SLOT_NAMES = {"param": "master"}
"""What the file calls the master copies."""


def read_flat(state: RankState, saved: Any, report: Report, where: str, pp: int) -> RankSlots:
    """A rank's moments and masters by parameter, from its distrib_optim.pt.

    The groups' options stand in model_optim_rng.pt; which parameters are in each follows from their kind.
    """
    found = RankSlots()
    heads = entries_of(state.root.get("optimizer"))
    bodies = saved if isinstance(saved, list | tuple) else [saved]
    if len(bodies) == 1:
        owned = [parameters_of(state)]
    else:
        owned = shares(state, heads if len(heads) == len(bodies) else bodies)
    for body, own in zip(bodies, owned, strict=True):
        if isinstance(body, dict):
            read_body(state, body, own, found, report, where, pp)
    for head, own in zip(heads, shares(state, heads), strict=True):
        inner = inner_of(head)
        for group in inner["param_groups"] if inner else ():
            if isinstance(group, dict):
                options = {str(k): v for k, v in group.items() if k != "params"}
                found.groups.append((options, of_group(group, own, state)))
    return found


def of_group(group: Mapping[Any, Any], own: Sequence[Local], state: RankState) -> list[Local]:
    """The parameters of a group that lists none: those that its weight decay applies to."""
    rest = group.get("wd_mult", 1.0 if group.get("weight_decay") else 0.0) == 0
    return [x for x in own if parts.decays(x[1], state.chunks[x[0]][x[1]].ndim) != rest]


def read_body(
    state: RankState, body: dict[Any, Any], own: Sequence[Local], found: RankSlots, report: Report, where: str, pp: int
) -> None:
    """Add to `found` what the flat buffers of one optimizer hold of the parameters `own`."""
    kinds = buffer_parameters(state, own)
    for key in sorted(k for k in body if isinstance(k, int)):
        by_dtype = body[key]
        if not isinstance(by_dtype, dict):
            continue
        for dtype_key, flats in by_dtype.items():
            if not isinstance(flats, dict):
                continue
            if key >= len(kinds):
                report.add("inconsistent", f"holds buffer {key}, the model has {len(kinds)}", where=where)
                continue
            v, dtype, parameters = kinds[key]
            wanted = dtype_key[0] if isinstance(dtype_key, tuple) and dtype_key else dtype
            if isinstance(wanted, DType) and wanted != dtype:
                report.add("inconsistent", f"buffer {key} is of {wanted}, the model's is of {dtype}", where=where)
                continue
            flat = {slot: t for slot, value in flats.items() if (t := _whole(value)) is not None}
            _cut(state, v, parameters, flat, found, report, where, pp)


def buffer_parameters(state: RankState, own: Sequence[Local]) -> list[tuple[int, DType, list[Local]]]:
    """The gradient buffers of a rank: virtual chunk, element type, parameters in the model's order."""
    buffers: dict[tuple[int, DType], list[Local]] = {}
    for local in own:
        dtype = state.chunks[local[0]][local[1]].dtype
        buffers.setdefault((local[0], dtype), []).append(local)
    return [(v, dtype, parameters) for (v, dtype), parameters in buffers.items()]


def _whole(value: Any) -> Tensor | None:
    """One flat tensor; a list of one bucket is that bucket."""
    if isinstance(value, list | tuple) and len(value) == 1:
        value = value[0]
    return value if isinstance(value, Tensor) and value.ndim == 1 else None


def _cut(
    state: RankState, v: int, parameters: Sequence[Local], flat: Mapping[str, Tensor], found: RankSlots,
    report: Report, where: str, pp: int,
) -> None:
    """Cut the flat tensors of one buffer into its parameters'."""
    sizes = {t.size for t in flat.values()}
    if len(sizes) != 1:
        report.add("inconsistent", "the flat states of one buffer differ in length", where=where)
        return
    weights = {local[1]: state.chunks[v][local[1]] for local in parameters}
    n_elements = sizes.pop()
    fitting = [
        layout for layout in layouts(weights, state, v, pp) if layout.n_elements == n_elements
    ]
    chosen = choose(fitting, weights, flat.get("param"))
    if chosen is None:
        why = "no layout of the model's parameters has so many" if not fitting else "in no layout do its masters fit"
        report.add(
            "inconsistent", f"a flat buffer has {n_elements:,} elements; {why}", where=where,
            hint="the optimizer's state of this rank is left out",
        )
        found.unnamed += len(parameters)
        return
    offsets = chosen.file_offsets()
    for slot, whole in flat.items():
        own = found.flat.setdefault(SLOT_NAMES.get(slot, slot), {})
        own.update(((v, name), (whole, start, weights[name].shape)) for name, start in offsets.items())


def layouts(weights: Mapping[str, Tensor], state: RankState, v: int, pp: int) -> Iterator[Buffer]:
    """The layouts that a run may have had, the likeliest first, each once."""
    args = state.args
    dp = args.get("data_parallel_size")
    dp = dp if isinstance(dp, int) and dp > 0 else 1
    p = state.rank[1]
    own = own_buckets(weights, args, p, pp)
    sizes = [(name, t.size) for name, t in weights.items()]
    busbw = bool(args.get("ddp_pad_buckets_for_high_nccl_busbw"))
    seen: set[tuple[tuple[str, int], ...]] = set()
    tied = frozenset(n for n in weights if n.endswith("embedding.word_embeddings.weight") and is_tied(args))
    for own_bucket in dict.fromkeys((own, frozenset[str](), tied)):
        for size in bucket_sizes(args, sum(n for _, n in sizes), dp, first_chunk=p == 0 and v == 0):
            layout = lay_out(sizes, dp=dp, bucket_size=size, own_bucket=own_bucket, high_busbw=busbw)
            key = tuple(layout.file_offsets().items())
            if key not in seen:
                seen.add(key)
                yield layout


def own_buckets(names: Mapping[str, Any], args: Mapping[str, Any], p: int, pp: int) -> frozenset[str]:
    """Parameters with a bucket of their own: a tied embedding where the pipeline has its copy on another stage."""
    if pp == 1 or not is_tied(args):
        return frozenset()
    first, last = p == 0, p == pp - 1
    return frozenset(
        n for n in names
        if (first and n.endswith("embedding.word_embeddings.weight"))
        or (last and (n == "output_layer.weight" or n.endswith("word_embeddings_for_head.weight")))
    )


def choose(fitting: Sequence[Buffer], weights: Mapping[str, Tensor], master: Tensor | None) -> Buffer | None:
    """The only layout, or of several the first whose masters, at a few places, round to the weights."""
    if len(fitting) <= 1 or master is None:
        return fitting[0] if fitting else None
    return next((layout for layout in fitting if _agrees(layout.file_offsets(), weights, master)), None)


def _agrees(offsets: Mapping[str, int], weights: Mapping[str, Tensor], master: Tensor) -> bool:
    names = list(offsets)
    step = max(1, len(names) // MAX_SAMPLED)
    for name in [*names[::step], names[-1]]:
        weight = weights[name]
        n = min(SAMPLE, weight.size)
        try:
            stored = ops.reshape(weight, (weight.size,))[:n]
            rounded = ops.cast(master[offsets[name] : offsets[name] + n], weight.dtype)
            if not np.array_equal(_bits(stored), _bits(rounded)):
                return False
        except CheckpointError:
            continue
    return True


def _bits(tensor: Tensor) -> Any:
    return np.ascontiguousarray(tensor.numpy()).view(np.uint8)
