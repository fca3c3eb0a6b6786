"""FSDP1's LOCAL_STATE_DICT: each unit's parameters in one flat buffer, cut into equal parts for the ranks.

    <unit>._flat_param          a 1-D ShardedTensor; rank r holds [r·c, min((r + 1)·c, n)), c = ceil(n / world)
    <unit> is the path of the wrapped module, the root's being empty; buffers stand beside as plain tensors

The buffer holds the unit's parameters in the order of module.named_parameters(), those of nested units left out and
tied ones once, each flattened row by row. With use_orig_params=True each is padded to 16 bytes, the whole to a multiple
of the world, and the dict also has every parameter's own name with this rank's 1-D piece. Names, order and shapes are
in no file: a reference gives them, and the sums must come out. Optimizer state is one 1-D tensor a unit (padded at its
end), or one piece a parameter.
Source: torch 2.13 `distributed/fsdp/_flat_param.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from anyckpt.core.box import Shape
from anyckpt.core.checkpoint import Checkpoint
from anyckpt.core.inert import Mapping as SavedMapping
from anyckpt.core.inert import TensorSubclass
from anyckpt.core.ops import reshape
from anyckpt.core.tensor import Tensor
from anyckpt.errors import UsageError
from anyckpt.finding import Report, fail
from anyckpt.formats.hf.order import order_of
from anyckpt.formats.ranks.join import joined
from anyckpt.formats.ranks.located import is_sharded, part_of
from anyckpt.formats.torch.optimizer import is_optimizer
from anyckpt.formats.torch.unwrap import WEIGHT_KEYS
from anyckpt.io.paths import printable
from anyckpt.sharding import flat as buffers

FLAT = "_flat_param"
ALIGNMENT_BYTES = 16
_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """One FSDP unit: its flat parameter's name in the files, the prefix of its parameters' names, and its layout."""

    key: str
    prefix: str
    n_elements: int
    names: tuple[str, ...]
    shapes: tuple[Shape, ...]
    layout: buffers.Layout


@dataclass(frozen=True, slots=True)
class Counted:
    """What an optimizer's numbers count: units, or parameters in the model's `order`."""

    units: Sequence[Unit]
    order: tuple[str, ...]
    by_unit: bool


def is_flat(objects: Mapping[int, Any]) -> bool:
    """Whether the ranks hold flat parameters."""
    return any(_flat_keys(state) for state in map(model_state, objects.values()))


def model_state(value: Any) -> Mapping[Any, Any]:
    """The dict that holds the model's entries: the root, or what stands under the key of a wrapper."""
    if not isinstance(value, dict):
        return {}
    for key in WEIGHT_KEYS:
        if isinstance(value.get(key), dict) and _flat_keys(value[key]):
            return value[key]  # type: ignore[no-any-return]
    return value


def _flat_keys(state: Mapping[Any, Any]) -> list[str]:
    return [k for k, v in state.items() if isinstance(k, str) and k.rpartition(".")[2] == FLAT and is_sharded(v)]


def unflattened(objects: Mapping[int, Any], like: Checkpoint, report: Report, where: str) -> Any:
    """The object with whole parameters under their names. Raises UsageError where `like` is of another model."""
    states = {rank: model_state(value) for rank, value in objects.items()}
    first = next(iter(states.values()))
    dtype_bytes = next(v.dtype.itemsize for v in first.values() if is_sharded(v))
    world = max(part_of(first[key], 0).n_ranks for key in _flat_keys(first))
    pieces_named = _has_pieces(first, like)
    parameters = _parameters(like, _buffer_names(states))
    units = _units(first, parameters, world, dtype_bytes)
    flat = {unit.key: _buffers_of(unit, states) for unit in units}
    weights = SavedMapping()
    for key, value in first.items():
        unit = next((u for u in units if u.key == key), None)
        if unit is not None:
            for i, (name, shape) in enumerate(zip(unit.names, unit.shapes, strict=True)):
                weights[unit.prefix + name] = buffers.joined(unit.layout, i, flat[key].__getitem__, shape)
        elif not (pieces_named and any(key == u.prefix + n for u in units for n in u.names)):
            weights.setdefault(_clean(key), value)
    for tied, kept in like.aliases.items():
        if kept in weights and tied not in weights:
            weights[tied] = weights[kept]
    rest = _rest(objects, states, Counted(units, tuple(parameters), not pieces_named), report, where)
    return {"model": weights, **rest}


def _has_pieces(state: Mapping[Any, Any], like: Checkpoint) -> bool:
    """Whether parameters have entries of their own, flattened, beside the flat ones (use_orig_params=True)."""
    beside = {_clean(k): v for k, v in state.items() if isinstance(k, str) and isinstance(v, Tensor)}
    return any(name in beside and beside[name].shape != like.weights[name].shape for name in like.weights)


def _buffer_names(states: Mapping[int, Mapping[Any, Any]]) -> set[str]:
    """Plain tensors that every rank holds whole; of a parameter's own entry each rank has another piece, or nothing."""
    held: list[dict[str, Shape]] = [
        {_clean(k): v.shape for k, v in state.items() if isinstance(v, Tensor)} for state in states.values()
    ]
    return {
        name
        for name, shape in held[0].items()
        if not shape or (0 not in shape and all(other.get(name) == shape for other in held) and len(held) > 1)
    }


def _clean(key: str) -> str:
    for wrapper in _WRAPPERS:
        key = key.replace(wrapper, "")
    return key


def _parameters(like: Checkpoint, buffer_names: set[str]) -> dict[str, Shape]:
    """The reference's parameters in the model's order."""
    names = [name for name in order_of(like) if name not in buffer_names]
    return {name: like.weights[name].shape for name in names}


def _units(state: Mapping[Any, Any], parameters: Mapping[str, Shape], world: int, itemsize: int) -> list[Unit]:
    """The FSDP units with the parameters that are theirs: those of the longest prefix that fits."""
    keys = _flat_keys(state)
    prefixes = {key: _clean(key).removesuffix(FLAT) for key in keys}
    owned: dict[str, list[str]] = {key: [] for key in keys}
    by_length = sorted(keys, key=lambda key: -len(prefixes[key]))
    for name in parameters:
        owner = next((key for key in by_length if name.startswith(prefixes[key])), None)
        if owner is None:
            raise UsageError(f"the reference has {printable(name)!r}, which belongs to no unit of these files")
        owned[owner].append(name)
    units = []
    for key in keys:
        n_elements = prod(part_of(state[key], 0).shape)
        shapes = tuple(parameters[name] for name in owned[key])
        names = tuple(name.removeprefix(prefixes[key]) for name in owned[key])
        layout = _layout(shapes, world, n_elements, itemsize)
        if layout is None:
            raise UsageError(
                f"{printable(key)!r} holds {n_elements:,} elements, the reference's {len(names)} parameters "
                f"{sum(map(prod, shapes)):,}: it is of another model, or lists buffers among its tensors",
                hint="name a checkpoint of the very model that was trained",
            )
        units.append(Unit(key, prefixes[key], n_elements, names, shapes, layout))
    return units


def _layout(shapes: Sequence[Shape], world: int, n_elements: int, itemsize: int) -> buffers.Layout | None:
    """The layout whose sum fits: without padding inside, or with each parameter padded to 16 bytes."""
    sizes = [prod(shape) for shape in shapes]
    if sum(sizes) == n_elements:
        return buffers.packed(sizes, world)
    for last in (False, True):
        gaps = buffers.aligned_gaps(sizes, max(1, ALIGNMENT_BYTES // itemsize), last=last)
        total = sum(sizes) + sum(gaps)
        if n_elements in (total, -(-total // world) * world):
            return buffers.packed(sizes, world, gaps=gaps)
    return None


def _buffers_of(unit: Unit, states: Mapping[int, Mapping[Any, Any]]) -> dict[int, Tensor]:
    """Each rank's part of a flat parameter, by rank."""
    found: dict[int, Tensor] = {}
    for rank, state in states.items():
        value = state.get(unit.key)
        if not isinstance(value, TensorSubclass):
            continue
        for box, _, local in part_of(value, rank).held:
            if box.start[0] != rank * unit.layout.partition:
                raise fail("inconsistent", f"{unit.key} of rank {rank} begins at {box.start[0]:,}", where=unit.key)
            found[rank] = local
    need = -(-unit.layout.used // unit.layout.partition) if unit.layout.partition else 0
    lacking = [rank for rank in range(need) if rank not in found]
    if lacking:
        raise fail("missing-shard", f"the part of rank {lacking[0]} is not there", where=unit.key)
    return found


# -- what stands beside the model ------------------------------------------------------------------------------------


def _rest(
    objects: Mapping[int, Any],
    states: Mapping[int, Any],
    counted: Counted,
    report: Report,
    where: str,
) -> dict[str, Any]:
    """The other entries of the ranks' objects, optimizers unflattened as the parameters are."""
    others = {
        rank: {k: v for k, v in value.items() if v is not states[rank]} if value is not states[rank] else {}
        for rank, value in objects.items()
    }
    optimizers = {
        key: {rank: o[key] for rank, o in others.items() if key in o}
        for key, value in next(iter(others.values())).items()
        if is_optimizer(value)
    }
    plain = {rank: {k: v for k, v in o.items() if k not in optimizers} for rank, o in others.items()}
    rest = joined(plain, report, where) if any(plain.values()) else {}
    if any(len(next(iter(by_rank.values()))["param_groups"]) > 1 for by_rank in optimizers.values()):
        report.add(
            "ambiguous", "the optimizer has several groups, and which parameters its numbers mean is in no file: its "
            "state is left out", where=where, hint="save it with FSDP.optim_state_dict, which gives names",
        )
        return rest
    return {**rest, **{key: _optimizer(by_rank, counted, where) for key, by_rank in optimizers.items()}}


def _optimizer(by_rank: Mapping[int, Any], what: Counted, where: str) -> dict[str, Any]:
    """An optimizer by parameter name: its ids are units, or parameters whose pieces lie on the ranks."""
    first = next(iter(by_rank.values()))
    ids = [i for group in first["param_groups"] for i in group["params"]]
    place = {name: i for i, name in enumerate(what.order)}
    counted = [[(unit, i) for i in range(len(unit.names))] for unit in what.units]
    if not what.by_unit:
        owner = {unit.prefix + name: (unit, i) for unit in what.units for i, name in enumerate(unit.names)}
        counted = [[owner[name]] for name in what.order]
    if len(ids) != len(counted):
        raise fail("inconsistent", f"the optimizer has {len(ids)} parameters, the model {len(counted)}", where=where)
    owners = dict(zip(sorted(ids), counted, strict=True))
    state: dict[str, dict[str, Any]] = {}
    for key, owned in owners.items():
        for slot in dict.fromkeys(s for one in by_rank.values() for s in one["state"].get(key, {})):
            held = {r: one["state"][key][slot] for r, one in by_rank.items() if slot in one["state"].get(key, {})}
            for unit, i in owned:
                name = unit.prefix + unit.names[i]
                state.setdefault(name, {})[slot] = _slot(held, unit, i, whole_unit=what.by_unit)
    groups = []
    for group in first["param_groups"]:
        names = [u.prefix + u.names[i] for key in group["params"] for u, i in owners[key]]
        groups.append({**group, "params": sorted(names, key=place.__getitem__)})
    return {"state": state, "param_groups": groups}


def _slot(held: Mapping[int, Any], unit: Unit, index: int, *, whole_unit: bool) -> Any:
    """One slot of one parameter from what the ranks hold: parts of the unit's buffer, or pieces of the parameter."""
    value = next(iter(held.values()))
    if not isinstance(value, Tensor) or value.ndim != 1:
        return value
    if whole_unit:
        return buffers.joined(unit.layout, index, held.__getitem__, unit.shapes[index])
    pieces = [t for _, t in sorted(held.items())]
    flat = buffers.concatenated([buffers.run(t, 0, t.size) for t in pieces], value)
    if flat.size != prod(unit.shapes[index]):
        raise fail("missing-shard", f"its pieces have {flat.size:,} elements", where=unit.prefix + unit.names[index])
    return reshape(flat, unit.shapes[index])
