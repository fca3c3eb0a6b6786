"""The legacy `torch` folder to be, for any layout, as `load_checkpoint` of Megatron-LM takes it.

    iter_NNNNNNN/mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt      see `ranks`
                                        distrib_optim.pt        with the distributed optimizer: see `distrib`
    latest_checkpointed_iteration.txt

Without a step it is a `release`: weights alone, which every run may begin from. The optimizer is written as the run's
options have it: by number, or in flat buffers. RNG states belong to ranks and are kept only where the layout is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from anyckpt.core import ops
from anyckpt.core.checkpoint import Checkpoint, Optimizer
from anyckpt.core.dtypes import DTYPES, DType
from anyckpt.core.inert import Mapping as OrderedDict
from anyckpt.core.inert import Opaque
from anyckpt.core.layout import FileLayout, Part
from anyckpt.core.tensor import Tensor, filled, from_array
from anyckpt.core.topology import Topology
from anyckpt.errors import Refused
from anyckpt.formats.megatron import folders, parts
from anyckpt.formats.megatron.distrib import FILE, own_buckets
from anyckpt.formats.megatron.fit import fit, note, refuse_unknown
from anyckpt.formats.megatron.ranks import Rank, folder_name, home_expert, topology_of
from anyckpt.formats.megatron.spread import Chunks, spread
from anyckpt.formats.table import WriteOptions
from anyckpt.formats.torch.plain import Replacements
from anyckpt.formats.torch.zipwrite import archive
from anyckpt.pickle.reduce import Call, Name
from anyckpt.sharding.buckets import bucket_sizes, lay_out

__all__ = ["fit", "write"]

SAFE_ENUMS = frozenset(
    "megatron.core.enums.ModelType megatron.core.transformer.enums.AttnBackend signal.Signals".split()
)
"""Classes in `args` that Megatron registers as safe to load (core/safe_globals.py); others are left out."""
_HALF = ("bfloat16", "float16")
_FLAT_NAMES = {"master": "param"}


def write(checkpoint: Checkpoint, options: WriteOptions) -> list[FileLayout]:
    """The files to be. `checkpoint` is fitted to the layout (`fit`).

    Raises UsageError where a dimension does not divide, Refused where the optimizer's state is not complete.
    """
    args = dict(checkpoint.config or {})
    refuse_unknown(args)
    topology = checkpoint.topology or topology_of(args)
    training = bool(options.extra.get("training")) and checkpoint.optimizer is not None
    is_release = checkpoint.step is None
    folder = "release" if is_release else f"iter_{checkpoint.step:07d}"
    chunks_of = spread(checkpoint.weights, topology, args)
    slots_of = _slots(checkpoint, topology, args) if training else {}
    shared = {
        "args": namespace(args), "checkpoint_version": 3.0, "iteration": checkpoint.step or 0,
        "num_floating_point_operations_so_far": checkpoint.state.get("num_floating_point_operations_so_far", 0),
    }  # fmt: skip
    if training and checkpoint.scheduler is not None:
        shared["opt_param_scheduler"] = Replacements([]).plain(checkpoint.scheduler)
    rng = _kept_rng(checkpoint, topology, options)
    files: list[FileLayout] = []
    for rank, chunks in sorted(chunks_of.items()):
        own = folder_name(rank, topology.pp, topology.ep)
        root: dict[str, Any] = dict(shared)
        for v, chunk in enumerate(chunks):
            root["model" if topology.vpp == 1 else f"model{v}"] = nested(chunk)
        if own in rng:
            root["rng_state"] = Replacements([]).plain(rng[own])
        if training:
            assert checkpoint.optimizer is not None
            slots = {slot: of_rank[rank] for slot, of_rank in slots_of.items()}
            root["optimizer"], flat = _optimizer(checkpoint, chunks, slots, rank, topology)
            if flat is not None:
                files.append(_placed(archive(flat, "distrib_optim"), f"{folder}/{own}/{FILE}"))
        files.append(_placed(archive(root, "model_optim_rng"), f"{folder}/{own}/model_optim_rng.pt"))
    tracker = ("release" if is_release else str(checkpoint.step)).encode()
    return [*files, FileLayout(folders.TRACKER, len(tracker), (Part(0, len(tracker), tracker),))]


def _placed(layout: FileLayout, name: str) -> FileLayout:
    return FileLayout(name, layout.size, layout.parts, layout.checksums)


def namespace(args: Mapping[str, Any]) -> Call:
    """The options as an argparse.Namespace, with those objects that Megatron's own loader allows."""
    plain: dict[str, Any] = {}
    for name, value in args.items():
        if isinstance(value, Opaque):
            if value.class_name not in SAFE_ENUMS:
                continue
            module, _, cls = value.class_name.rpartition(".")
            plain[name] = Call(Name(module, cls), value.args)
        else:
            plain[name] = Replacements([]).plain(value)
    return Call(Name("argparse", "Namespace"), (), state=plain)


def nested(chunk: Mapping[str, Tensor]) -> Any:
    """The state dict of a chunk: flat in core, nested modules around a flat encoder before."""
    if not any(name.startswith("language_model.") for name in chunk):
        flat = OrderedDict()
        flat.update(chunk)
        return flat
    root: dict[str, Any] = {}
    for name, tensor in chunk.items():
        path = name.split(".")
        depth = 2 if path[:2] == ["language_model", "encoder"] else len(path) - 1
        at = root
        for part in path[:depth]:
            at = at.setdefault(part, OrderedDict() if part == "encoder" else {})
        at[".".join(path[depth:])] = tensor
    return root


def complete_slots(checkpoint: Checkpoint) -> None:
    """Raise Refused where a slot lacks parameters of its kind: an optimizer is whole, or it is left out."""
    assert checkpoint.optimizer is not None
    for slot, tensors in checkpoint.optimizer.slots.items():
        lacking = [
            n for n, t in checkpoint.weights.items()
            if n not in tensors and t.dtype.is_floating and (slot != "master" or t.dtype.name in _HALF)
        ]
        if lacking and slot != "step":
            raise Refused(
                f"the optimizer has no {slot} for {len(lacking)} of the weights, {lacking[0]} first",
                hint="convert the weights alone: --only weights",
            )


def _slots(checkpoint: Checkpoint, topology: Topology, args: Mapping[str, Any]) -> dict[str, dict[Rank, Chunks]]:
    """Every slot spread as the weights are."""
    assert checkpoint.optimizer is not None
    complete_slots(checkpoint)
    slots = checkpoint.optimizer.slots
    return {slot: spread(tensors, topology, args, like=checkpoint.weights) for slot, tensors in slots.items()}


def _kept_rng(checkpoint: Checkpoint, topology: Topology, options: WriteOptions) -> Mapping[str, Any]:
    """RNG states by rank folder, where they are of this very layout."""
    told = options.extra.get("findings")
    saved = checkpoint.rng if isinstance(checkpoint.rng, dict) else {}
    wanted = {folder_name((t, p, 0), topology.pp, topology.ep) for t in range(topology.tp) for p in range(topology.pp)}
    if saved and wanted <= set(saved):
        return saved
    if isinstance(told, list) and checkpoint.step is not None:
        told.append(note("lossy", "RNG states belong to ranks of one layout and are left out: load with --no-load-rng"))
    return {}


# -- the optimizer ---------------------------------------------------------------------------------------------------


def _optimizer(
    checkpoint: Checkpoint, chunks: Chunks, slots: Mapping[str, Chunks], rank: Rank, topology: Topology
) -> tuple[Any, Any]:
    """What stands under `optimizer`, and the object of distrib_optim.pt (None without it)."""
    args = checkpoint.config or {}
    optimizer = checkpoint.optimizer
    assert optimizer is not None
    own = [(v, name) for v, chunk in enumerate(chunks) for name in chunk]
    dense = [local for local in own if not parts.is_expert(local[1])]
    experts = [local for local in own if parts.is_expert(local[1])]
    # Only with EP > 1 does Megatron give experts an optimizer of their own (tensor_parallel/layers.py: `allreduce`).
    shares = [(dense, False), (experts, True)] if experts and topology.ep > 1 else [(own, False)]
    flat = bool(args.get("use_distributed_optimizer"))
    scaler = checkpoint.state.get("grad_scaler")
    heads: list[Any] = []
    bodies: list[Any] = []
    for share, is_expert in shares:
        groups = grouped(share, chunks, optimizer, is_expert)
        step = step_of(optimizer)
        if flat:
            inner = {"param_groups": [{**options, "step": step} for options, _ in groups]}
            heads.append({"optimizer": inner, **({"grad_scaler": scaler} if scaler else {})})
            skipped = not is_expert and rank[2] != home_expert(rank[0], topology)
            bodies.append(None if skipped else _flat(share, chunks, slots, args, rank, topology))
            continue
        numbered = _numbered(groups, slots, step if "step" in optimizer.slots else None)
        if "master" not in slots:
            heads.append(numbered)
            continue
        masters = [[_of(slots["master"], x) for x in group if _is_half(chunks, x)] for _, group in groups]
        heads.append({
            "optimizer": numbered, **({"grad_scaler": scaler} if scaler else {}), "fp32_from_fp16_params": masters,
        })  # fmt: skip
    one = len(shares) == 1
    return (heads[0] if one else heads), (None if not flat else bodies[0] if one else bodies)


Local = tuple[int, str]


def _of(chunks: Chunks, local: Local) -> Tensor:
    return chunks[local[0]][local[1]]


def _is_half(chunks: Chunks, local: Local) -> bool:
    return _of(chunks, local).dtype.name in _HALF


def grouped(
    share: Sequence[Local], chunks: Chunks, optimizer: Optimizer, is_expert: bool
) -> list[tuple[dict[str, Any], list[Local]]]:
    """The groups of a rank's parameters with their options: those with weight decay, then those without."""
    found: list[tuple[dict[str, Any], list[Local]]] = []
    for decayed in (True, False):
        own = [x for x in share if parts.decays(x[1], _of(chunks, x).ndim) == decayed]
        if own:
            found.append((options_of(optimizer, decayed, is_expert), own))
    return found


def options_of(optimizer: Optimizer, decayed: bool, is_expert: bool) -> dict[str, Any]:
    """The saved options of such a group, or the nearest to them."""
    def distance(group: Mapping[str, Any]) -> int:
        has_decay = group.get("wd_mult", 1.0 if group.get("weight_decay") else 0.0) != 0
        return 2 * int(has_decay != decayed) + int(bool(group.get("is_expert_parallel")) != is_expert)

    nearest = min(optimizer.groups, key=distance, default={})
    plain = {k: Replacements([]).plain(v) for k, v in nearest.items() if k not in ("params", "step")}
    if distance(nearest) & 2 or not nearest:
        plain |= {"wd_mult": float(decayed)} | ({} if decayed else {"weight_decay": 0.0})
    return plain | ({"is_expert_parallel": is_expert} if "is_expert_parallel" in plain or is_expert else {})


def step_of(optimizer: Optimizer) -> float:
    """Steps taken, from parameters' own counts or the groups'."""
    from anyckpt.formats.torch.optimizer import last_step

    if (step := last_step(optimizer)) is not None:
        return float(step)
    known = [g["step"] for g in optimizer.groups if isinstance(g.get("step"), int | float)]
    return float(max(known, default=0))


def _numbered(
    groups: Sequence[tuple[dict[str, Any], list[Local]]], slots: Mapping[str, Chunks], step: float | None
) -> dict[str, Any]:
    state: dict[int, dict[str, Any]] = {}
    listed: list[dict[str, Any]] = []
    for options, own in groups:
        first = len(state)
        for local in own:
            entry: dict[str, Any] = {} if step is None else {"step": from_array(np.array(step, np.float32))}
            for slot, chunks in slots.items():
                if slot not in ("step", "master") and local[1] in chunks[local[0]]:
                    entry[slot] = _of(chunks, local)
            state[len(state)] = entry
        extra = {} if step is not None else {"step": _common_step(options)}
        listed.append({**options, **extra, "params": list(range(first, first + len(own)))})
    return {"state": state, "param_groups": listed}


def _common_step(options: Mapping[str, Any]) -> Any:
    return options.get("step", 0)


def _flat(
    share: Sequence[Local], chunks: Chunks, slots: Mapping[str, Chunks], args: Mapping[str, Any], rank: Rank,
    topology: Topology,
) -> dict[Any, Any]:
    """The flat buffers of a share of a rank's parameters."""
    body: dict[Any, Any] = {"buckets_coalesced": True}
    buffers: dict[tuple[int, DType], list[str]] = {}
    for v, name in share:
        buffers.setdefault((v, chunks[v][name].dtype), []).append(name)
    in_fp32 = args.get("accumulate_allreduce_grads_in_fp32", True) or args.get("bf16")
    for index, ((v, dtype), names) in enumerate(buffers.items()):
        weights = {name: chunks[v][name] for name in names}
        layout = lay_out(
            [(name, t.size) for name, t in weights.items()], dp=topology.dp,
            bucket_size=next(bucket_sizes(
                args, sum(t.size for t in weights.values()), topology.dp, first_chunk=rank[1] == 0 and v == 0
            )),
            own_bucket=own_buckets(weights, args, rank[1], topology.pp),
            high_busbw=bool(args.get("ddp_pad_buckets_for_high_nccl_busbw")),
        )  # fmt: skip
        sources = {slot: of[v] for slot, of in slots.items() if slot != "step"}
        if "master" not in sources:
            sources["master"] = weights  # an fp32 model is its own master
        flats: dict[str, Any] = {
            _FLAT_NAMES.get(slot, slot): flat_tensor(layout.file_offsets(), of, layout.n_elements)
            for slot, of in sources.items()
        }
        key = (dtype, DTYPES["float32"] if in_fp32 else dtype)
        body[index] = {key: {"param": flats.pop("param"), **flats, "numel_unpadded": layout.n_elements}}
    return body


def flat_tensor(offsets: Mapping[str, int], tensors: Mapping[str, Tensor], n_elements: int) -> Tensor:
    """Tensors end to end at their offsets, zeros between; the master of an fp32 parameter is the parameter."""
    pieces: list[Tensor] = []
    at = 0
    fp32 = DTYPES["float32"]
    for name, start in sorted(offsets.items(), key=lambda item: item[1]):
        if start > at:
            pieces.append(filled(fp32, (start - at,), bytes(4)))
        tensor = ops.cast(tensors[name], fp32)
        pieces.append(ops.reshape(tensor, (tensor.size,)))
        at = start + tensor.size
    if at < n_elements:
        pieces.append(filled(fp32, (n_elements - at,), bytes(4)))
    return ops.concat(pieces, 0)
