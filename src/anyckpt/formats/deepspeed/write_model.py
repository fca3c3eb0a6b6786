"""The model files of a step to be: module, shapes and counters; a pipeline's layers; experts.

Keys and their order are those of DeepSpeed 0.19.8 (`engine.py`, `_save_checkpoint` and `_save_moe_checkpoint`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from anyckpt.core.dtypes import DType
from anyckpt.core.inert import Mapping as OrderedDict
from anyckpt.core.layout import FileLayout
from anyckpt.core.tensor import Tensor, filled
from anyckpt.errors import Refused
from anyckpt.formats.deepspeed import experts, pickled
from anyckpt.formats.deepspeed.prepared import LAYOUT_VERSION, Prepared
from anyckpt.formats.deepspeed.tensor_parallel import split
from anyckpt.sharding import flat


@dataclass(frozen=True, slots=True)
class Universe:
    """What one model-parallel rank holds: its share of every tensor. `cut(name, tensor)` gives that share."""

    index: int
    tp_rank: int
    names: frozenset[str] | None  # parameters of its pipeline stage; None: all
    prepared: Prepared

    def cut(self, name: str, tensor: Tensor) -> Tensor:
        """This rank's share of a whole tensor."""
        try:
            return split(name, tensor, self.prepared.topology.tp, self.prepared.rules)[self.tp_rank]
        except ValueError as error:
            raise Refused(str(error)) from error

    def own(self, names: Sequence[str]) -> list[str]:
        """Those of `names` that are in its pipeline stage."""
        return [name for name in names if self.names is None or name in self.names]


def version(prepared: Prepared) -> str:
    """The release that loaders are told: the source's own, or the one whose layout this is."""
    saved = prepared.own.get("ds_version")
    return saved if isinstance(saved, str) and saved else LAYOUT_VERSION


def model_state(universe: Universe, param_shapes: Sequence[Mapping[str, Any]], rank: int) -> dict[str, Any]:
    """A model file. `param_shapes`: name -> shape of each flat group, in the order of its buffer."""
    prepared = universe.prepared
    topology, own = prepared.topology, prepared.own
    striped = topology.zero == 3
    frozen = universe.own(prepared.frozen)
    shapes: Any = None
    fragments: Any = None
    if topology.zero > 1:  # stage 1 saves none (engine.py, _save_checkpoint)
        local = {name: universe.cut(name, prepared.weights[name]) for name in frozen}
        shapes = OrderedDict({name: pickled.size(tensor.shape) for name, tensor in local.items()})
        fragments = OrderedDict({n: fragment_of(t, topology.dp, rank) if striped else t for n, t in local.items()})
    buffers = [name for name in prepared.buffers if universe.names is None or _in_stage(name, universe)]
    state = {
        "module": None if prepared.layers else module(universe, placeholders=striped),
        "buffer_names": buffers,
        "optimizer": None,
        "param_shapes": [OrderedDict({n: pickled.size(s) for n, s in one.items()}) for one in param_shapes],
        "frozen_param_shapes": shapes,
        "shared_params": dict(prepared.aliases) if rank == 0 or not striped else {},
        "frozen_param_fragments": fragments,
        "lr_scheduler": pickled.kept(prepared.scheduler),
        "data_sampler": pickled.kept(own.get("data_sampler")),
        "random_ltd": pickled.kept(own.get("random_ltd")),
        "skipped_steps": pickled.whole_number(own, "skipped_steps"),
        "global_steps": prepared.step,
        "global_samples": pickled.whole_number(own, "global_samples"),
        "dp_world_size": topology.dp,
        "mp_world_size": topology.tp * topology.pp,
        "checkpoint_parallel_dimensions": {"pp_degree": topology.pp, "tp_degree": topology.tp},
        "ds_config": pickled.kept(prepared.config),
        "ds_version": version(prepared),
    }
    if "num_experts" in own:
        state |= {"num_experts": pickled.kept(own["num_experts"]), "ds_autoep_layers": None}
    if "universal_checkpoint_info" in own:
        state["universal_checkpoint_info"] = pickled.kept(own["universal_checkpoint_info"])
    client = {key: pickled.kept(value) for key, value in prepared.client.items() if key not in state}
    return {**state, **client}


def module(universe: Universe, *, placeholders: bool) -> OrderedDict:
    """The module's state dict; of stage 3 with empty tensors for parameters."""
    prepared = universe.prepared
    out = OrderedDict()
    empty: dict[DType, Tensor] = {}  # one record for all placeholders of a type
    for name, whole in prepared.weights.items():
        if experts.EXPERT.fullmatch(name) and prepared.topology.ep and "num_experts" in prepared.own:
            continue
        holder = prepared.aliases.get(name)
        if placeholders and name not in prepared.buffers:
            out[name] = empty.setdefault(whole.dtype, filled(whole.dtype, (0,), bytes(whole.dtype.itemsize)))
        elif holder in out:
            out[name] = out[holder]
        else:
            out[name] = universe.cut(name, whole)
    return out


def fragment_of(tensor: Tensor, dp: int, rank: int) -> Tensor:
    """A rank's part of one parameter of stage 3, padded."""
    return flat.buffer(flat.striped([tensor.size], dp), rank, [tensor])


def _in_stage(name: str, universe: Universe) -> bool:
    lead = name.partition(".")[0]
    return any(own.partition(".")[0] == lead for own in universe.names or ())


def layer_files(universe: Universe) -> Iterator[FileLayout]:
    """Pipelines: one file a layer, names without the layer's lead."""
    prepared = universe.prepared
    suffix = f"-model_{universe.tp_rank:02d}" if prepared.topology.tp > 1 else ""
    for layer, lead in sorted(prepared.layers.items()):
        own = {
            name[len(lead) :]: universe.cut(name, tensor)
            for name, tensor in prepared.weights.items()
            if name.startswith(lead)
        }
        yield pickled.saved(f"layer_{layer:02d}{suffix}-model_states.pt", OrderedDict(own))


def expert_files(universe: Universe) -> Iterator[FileLayout]:
    """One file an expert; layers are counted in the order of the model, experts over all ranks."""
    prepared = universe.prepared
    if "num_experts" not in prepared.own:
        return
    found: dict[tuple[str, int], dict[str, Tensor]] = {}
    for name, tensor in prepared.weights.items():
        if match := experts.EXPERT.fullmatch(name):
            found.setdefault((match["layer"], int(match["id"])), {})[name] = universe.cut(name, tensor)
    layers = {layer: number for number, layer in enumerate(dict.fromkeys(layer for layer, _ in found))}
    for (layer, expert), tensors in found.items():
        mp = f"mp_rank_{universe.index:02d}"
        yield pickled.saved(f"layer_{layers[layer]}_expert_{expert}_{mp}_model_states.pt", tensors)
