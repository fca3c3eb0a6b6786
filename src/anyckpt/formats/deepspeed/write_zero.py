"""Write ZeRO stages 1 to 3 for any number of ranks: the folder that `engine.load_checkpoint` reads.

    latest                                                          global_stepN
    global_stepN/mp_rank_TT_model_states.pt                         stages 1, 2
    global_stepN/zero_pp_rank_D_mp_rank_TT_model_states.pt          stage 3
    global_stepN/[bf16_]zero_pp_rank_D_mp_rank_TT_optim_states.pt
    global_stepN/layer_NN[-model_TT]-model_states.pt                pipelines
    global_stepN/layer_L_expert_E_mp_rank_TT_model_states.pt        experts

Every rank's buffers are made of pieces of the source, so nothing is read before it is copied to its place. What the
layout depends on in the run's config (round_robin_gradients, parameter_alignment, sub_group_size) is followed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

from anyckpt.core.checkpoint import Asset, Checkpoint
from anyckpt.core.inert import Mapping as OrderedDict
from anyckpt.core.layout import FileLayout, Part
from anyckpt.core.ops import reshape
from anyckpt.core.source import Span
from anyckpt.core.tensor import Tensor
from anyckpt.core.topology import Topology
from anyckpt.errors import Refused
from anyckpt.finding import Finding
from anyckpt.formats.deepspeed import experts, pickled
from anyckpt.formats.deepspeed.around import is_rng
from anyckpt.formats.deepspeed.load import count, mapping
from anyckpt.formats.deepspeed.prepared import ParameterGroup, Prepared, prepare
from anyckpt.formats.deepspeed.write_model import Universe, expert_files, layer_files, model_state, version
from anyckpt.formats.table import WriteOptions
from anyckpt.sharding import flat

SUB_GROUP_SIZE = 1_000_000_000  # elements; the config's default


def write(checkpoint: Checkpoint, options: WriteOptions) -> list[FileLayout]:
    """The files to be. Raises UsageError and Refused where the checkpoint can't be written as such (`prepare`)."""
    prepared = prepare(checkpoint, options)
    topology = prepared.topology
    tag = f"global_step{prepared.step}"
    files = [literal("latest", tag.encode())]
    stages = prepared.stages if prepared.layers else (None,)
    for pp_rank, names in enumerate(stages):
        for tp_rank in range(topology.tp):
            own = None if names is None else frozenset(names)
            universe = Universe(pp_rank * topology.tp + tp_rank, tp_rank, own, prepared)
            files += [_renamed(file, tag) for file in _universe(universe)]
    for tp_rank in range(topology.tp):
        whole = Universe(tp_rank, tp_rank, None, prepared)
        files += [_renamed(file, tag) for file in (*layer_files(whole), *expert_files(whole))]
    return files + companions(checkpoint, topology, options)


def companions(checkpoint: Checkpoint, topology: Topology, options: WriteOptions) -> list[FileLayout]:
    """Config, tokenizer and the trainer's files, as they are."""
    assets = (*checkpoint.assets, *_beside(checkpoint, topology, options))
    return [_copied(asset.name, asset.file) for asset in assets]


def _beside(checkpoint: Checkpoint, topology: Topology, options: WriteOptions) -> list[Asset]:
    """The trainer's files; the generators' states only for as many processes as there were."""
    found = list(checkpoint.facts.get("beside", ()))
    was = checkpoint.topology or Topology()
    if (was.dp, was.tp, was.pp) == (topology.dp, topology.tp, topology.pp) or not any(is_rng(a.name) for a in found):
        return found
    notes = options.extra.get("findings")
    if isinstance(notes, list):
        message = f"the generators' states of {was.dp * was.tp * was.pp} processes can't be spread over another number"
        notes.append(Finding("lossy", "warning", message, hint="data order and dropout will differ from here on"))
    return [asset for asset in found if not is_rng(asset.name)]


def literal(name: str, data: bytes) -> FileLayout:
    """A file of these bytes."""
    return FileLayout(name, len(data), (Part(0, len(data), data),))


def _copied(name: str, file: Any) -> FileLayout:
    return FileLayout(name, file.size, (Part(0, file.size, Span(file, 0, file.size)),) if file.size else ())


def _renamed(file: FileLayout, tag: str) -> FileLayout:
    return FileLayout(f"{tag}/{file.name}", file.size, file.parts, file.checksums)


def _universe(universe: Universe) -> Iterator[FileLayout]:
    prepared = universe.prepared
    stage, dp = prepared.topology.zero, prepared.topology.dp
    buffers = _striped(universe) if stage == 3 else _packed(universe)
    prefix = "bf16_" if prepared.is_bf16 else ""
    mp = f"mp_rank_{universe.index:02d}"
    for rank in range(dp if stage == 3 else 1):
        name = f"zero_pp_rank_{rank}_{mp}_model_states.pt" if stage == 3 else f"{mp}_model_states.pt"
        yield pickled.saved(name, model_state(universe, [dict(b.shapes) for b in buffers], rank))
    for rank in range(dp):
        state = _stage3(universe, buffers, rank) if stage == 3 else _stage12(universe, buffers, rank)
        root = {
            "optimizer_state_dict": state, "ds_config": pickled.kept(prepared.config), "ds_version": version(prepared),
        }
        yield pickled.saved(f"{prefix}zero_pp_rank_{rank}_{mp}_optim_states.pt", root)


# -- optimizer files -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Buffer:
    """One flat group of one universe. `tensors`: slot -> parameters' shares in the order of the layout.

    Experts have one layout, whose parameters differ from one expert-parallel rank to the next: `sets`. `shapes` are by
    the first one's names, whose numbers are those that every rank counts its own experts by.
    """

    group: ParameterGroup
    number: int  # of its parameter group
    layout: flat.Layout
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    sets: tuple[Mapping[str, Sequence[Tensor]], ...]
    gaps: tuple[int, ...] = ()

    def place(self, rank: int) -> tuple[Mapping[str, Sequence[Tensor]], int]:
        """The tensors that data-parallel rank `rank` has a partition of, and the number of that partition."""
        return self.sets[rank % len(self.sets)], rank // len(self.sets)


def _packed(universe: Universe) -> list[Buffer]:
    """Stages 1 and 2: one buffer a parameter group."""
    prepared = universe.prepared
    zero = mapping(prepared.config.get("zero_optimization"))
    dp, ep = prepared.topology.dp, prepared.topology.ep
    out = []
    for number, group in enumerate(prepared.groups):
        names = universe.own(group.names)
        shared = _by_expert_rank(names, ep) if group.is_expert and ep > 1 else [names]
        n_ranks = dp // len(shared)
        if zero.get("round_robin_gradients"):
            shared = [[one[i] for i in flat.round_robin(len(one), n_ranks)] for one in shared]
        sets = tuple(_shares(universe, group, one) for one in shared)
        first = sets[0]["master"]
        sizes = [tensor.size for tensor in first]
        gaps = [0] * len(sizes)
        if zero.get("parameter_alignment") and names:
            itemsize = prepared.weights[names[0]].dtype.itemsize
            gaps = flat.aligned_gaps(sizes, 16 // gcd(16, itemsize))
        layout = flat.packed(sizes, n_ranks, gaps=gaps, multiple=2 * n_ranks)
        shapes = tuple((name, t.shape) for name, t in zip(shared[0], first, strict=True))
        out.append(Buffer(group, number, layout, shapes, sets, tuple(gaps)))
    return out


def _striped(universe: Universe) -> list[Buffer]:
    """Stage 3: one buffer a sub group."""
    prepared = universe.prepared
    limit = count(mapping(prepared.config.get("zero_optimization")).get("sub_group_size"), SUB_GROUP_SIZE)
    dp = prepared.topology.dp
    out = []
    for number, group in enumerate(prepared.groups):
        names = universe.own(group.names)
        shares = _shares(universe, group, names)
        sizes = [tensor.size for tensor in shares["master"]]
        for part in flat.sub_groups(sizes, dp, limit):
            tensors = {slot: [held[i] for i in part] for slot, held in shares.items()}
            layout = flat.striped([sizes[i] for i in part], dp)
            shapes = tuple((names[i], shares["master"][i].shape) for i in part)
            out.append(Buffer(group, number, layout, shapes, (tensors,)))
    return out


def _shares(universe: Universe, group: ParameterGroup, names: Sequence[str]) -> dict[str, list[Tensor]]:
    return {
        slot: [universe.cut(name, tensors[name]) for name in names] for slot, tensors in group.tensors.items()
    }


def _by_expert_rank(names: Sequence[str], ep: int) -> list[list[str]]:
    """An expert group's parameters by the expert-parallel rank that has them, each in the group's order.

    Raises Refused where the experts can't be shared evenly.
    """
    ids: dict[str, set[int]] = {}
    for name in names:
        if match := experts.EXPERT.fullmatch(name):
            ids.setdefault(match["layer"], set()).add(int(match["id"]))
    out: list[list[str]] = [[] for _ in range(ep)]
    for name in names:
        match = experts.EXPERT.fullmatch(name)
        n = len(ids[match["layer"]]) if match else 0
        if match is None or n % ep:
            raise Refused(f"{n} experts can't be shared evenly by {ep} expert-parallel ranks")
        out[int(match["id"]) // (n // ep)].append(name)
    return out


def _stage12(universe: Universe, buffers: Sequence[Buffer], rank: int) -> dict[str, Any]:
    own, stage = universe.prepared.own, universe.prepared.topology.zero
    state: dict[int, dict[str, Any]] = {}
    masters: list[Tensor] = []
    paddings: list[int] = []
    mappings: list[OrderedDict] = []
    for number, held in enumerate(buffers):
        tensors, place = held.place(rank)
        padding = held.layout.padding(place)
        length = held.layout.partition - padding
        masters.append(flat.buffer(held.layout, place, tensors["master"], length=length))
        paddings.append(padding)
        slots = {slot: _slot(held, slot, tensors[slot], place) for slot in tensors if slot != "master"}
        if slots or held.group.scalars:
            state[number] = {**held.group.scalars, **slots}
        mappings.append(OrderedDict({
            held.shapes[f.parameter][0]: pickled.fragment(f.offset, f.length) for f in held.layout.of_rank(place)
        }))
    groups = [{**options_for(held.group, universe.prepared), "params": [held.number]} for held in buffers]
    return {
        "loss_scaler": pickled.loss_scaler(own),
        "dynamic_loss_scale": bool(own.get("dynamic_loss_scale")),
        "overflow": bool(own.get("overflow")),
        "clip_grad": clip_grad(universe.prepared),
        "base_optimizer_state": {"state": state, "param_groups": groups},
        "single_partition_of_fp32_groups": masters,
        "zero_stage": pickled.stage(stage),
        "group_paddings": paddings,
        "param_alignment_paddings": [list(held.gaps) for held in buffers],
        "partition_count": [held.layout.n_ranks for held in buffers],
        "ds_version": version(universe.prepared),
        "param_slice_mappings": mappings,
    }


def _slot(held: Buffer, slot: str, tensors: Sequence[Tensor], place: int) -> Tensor:
    """A rank's partition of a slot, padding and all; Muon's momentum is whole for every parameter that it touches."""
    if held.group.is_muon and slot == "momentum_buffer":
        whole = [reshape(tensors[f.parameter], (tensors[f.parameter].size,)) for f in held.layout.of_rank(place)]
        return flat.concatenated(whole, tensors[0])
    return flat.buffer(held.layout, place, tensors)


def _stage3(universe: Universe, buffers: Sequence[Buffer], rank: int) -> dict[str, Any]:
    own = universe.prepared.own
    state: dict[int, dict[str, Any]] = {}
    masters: list[Tensor] = []
    for index, held in enumerate(buffers):
        tensors = held.sets[0]
        if held.group.is_muon:
            raise Refused("Muon's momentum in ZeRO stage 3 is not known how to write", hint="--zero 1 or --zero 2")
        masters.append(flat.buffer(held.layout, rank, tensors["master"]))
        slots = {slot: flat.buffer(held.layout, rank, tensors[slot]) for slot in tensors if slot != "master"}
        if slots or held.group.scalars:
            state[index] = {**held.group.scalars, **slots}
    groups = [
        {
            **options_for(group, universe.prepared),
            "params": [i for i, held in enumerate(buffers) if held.number == number],
        }
        for number, group in enumerate(universe.prepared.groups)
    ]
    return {
        "zero_stage": pickled.stage(3),
        "loss_scaler": pickled.loss_scaler(own),
        "dynamic_loss_scale": bool(own.get("dynamic_loss_scale")),
        "overflow": bool(own.get("overflow")),
        "partition_count": universe.prepared.topology.dp,
        "optimizer_state_dict": {"state": state, "param_groups": groups},
        "fp32_flat_groups": masters,
    }


def options_for(group: ParameterGroup, prepared: Prepared) -> dict[str, Any]:
    """A group's hyperparameters; the name of an expert group tells the number of expert-parallel ranks."""
    options = {key: pickled.kept(value) for key, value in group.options.items()}
    name = options.get("name")
    if group.is_expert and isinstance(name, str) and name.startswith("ep_size_"):
        options["name"] = f"ep_size_{prepared.topology.ep}"
    return options


def clip_grad(prepared: Prepared) -> float:
    """The largest norm of gradients: as saved, or as the config says."""
    value = prepared.own.get("clip_grad", prepared.config.get("gradient_clipping", 0.0))
    return float(value) if isinstance(value, int | float) else 0.0


