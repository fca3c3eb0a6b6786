"""Settle, before anything is changed, which tensor of a checkpoint goes where in a torch module.

Works on names, shapes and dtypes alone; what does not fit is told as one message with the nearest names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from anyckpt.core.box import Box, Shape
from anyckpt.core.checkpoint import Checkpoint
from anyckpt.core.tensor import Tensor
from anyckpt.errors import Refused, UsageError
from anyckpt.names.match import Match, Near, match, nearest_of
from anyckpt.names.prefixes import strip
from anyckpt.names.ties import by_config, storage_identity
from anyckpt.names.versions import obsolete_names
from anyckpt.verbs.reading import boxes_of, read_values

if TYPE_CHECKING:
    from anyckpt.core.tensor import Array

# A counter that torch.nn.BatchNorm has since 0.4.1; files without any of it are older, and 0 is right for them.
LATER_COUNTERS = re.compile(r"(^|\.)num_batches_tracked$")
SHOWN = 8  # names of each kind in a message


@dataclass(frozen=True, slots=True)
class Slot:
    """A place in a module: a parameter or a saved buffer, under `name` in `places`."""

    tensor: Any
    places: dict[str, Any]
    name: str
    is_parameter: bool
    is_lazy: bool

    @property
    def is_meta(self) -> bool:
        """Whether it has a shape but no memory yet."""
        return bool(self.tensor.is_meta)

    @property
    def shape(self) -> Shape:
        """Its shape; () for one that is not initialised."""
        return () if self.is_lazy else tuple(self.tensor.shape)


@dataclass(frozen=True, slots=True)
class Fitted:
    """What goes where: `tensor_of[name]` for one name of each tie; the rest as `verbs.load.Loaded` tells it."""

    tensor_of: Mapping[str, Tensor]
    renamed: Mapping[str, tuple[str, str]]
    casts: Mapping[str, tuple[str, str]]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    kept: tuple[str, ...]
    ignored: tuple[str, ...]
    tied: Mapping[str, str] = field(default_factory=dict)

    def owners_of(self, name: str) -> list[str]:
        """`name` and the names tied to it."""
        return [name, *(tied for tied, kept in self.tied.items() if kept == name)]


def slots_of(model: Any) -> dict[str, Slot]:
    """Every name that the module's state dict has, with its place. Raises UsageError for sharded parameters."""
    from torch.nn.parameter import is_lazy

    slots: dict[str, Slot] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        lead = f"{path}." if path else ""
        for places, left_out in ((module._parameters, ()), (module._buffers, module._non_persistent_buffers_set)):
            for name, tensor in places.items():
                if tensor is not None and name not in left_out:
                    is_parameter = places is module._parameters
                    slots[lead + name] = Slot(tensor, places, name, is_parameter, is_lazy(tensor))
    for name, slot in slots.items():
        if hasattr(slot.tensor, "device_mesh") or name.rpartition(".")[2] in ("_flat_param", "flat_param"):
            raise UsageError(
                f"{name} is sharded over processes: load_into fills whole modules",
                hint="load before the module is sharded, or write a sharded checkpoint with anyckpt convert",
            )
    return slots


def fit(checkpoint: Checkpoint, slots: Mapping[str, Slot], *, strict: bool, prefix: str | None) -> Fitted:
    """Pair a checkpoint's weights with the places of a module.

    Raises UsageError where they don't fit, telling all that is wrong; Refused where tied places would get different
    values.
    """
    weights = _below(checkpoint.weights, prefix)
    target = {name: slot.shape for name, slot in slots.items()}
    groups = _tied_places(slots)
    source = {name: t.shape for name, t in weights.items()}
    optional = {n for n in target if groups[n] != n or LATER_COUNTERS.search(n)}
    found = match(source, target, config=checkpoint.config, optional=optional)
    source_of = dict(found.source_of)
    _fill_declared_ties(checkpoint, weights, target, source_of)
    shapes = {n: pair for n, pair in found.shapes.items() if not slots[n].is_lazy}
    chosen, tied = _one_of_each_tie(groups, source_of, weights)
    absent = [n for n in target if groups[n] not in chosen and n not in source_of]
    any_counter = any(LATER_COUNTERS.search(name) for name in weights)
    kept = tuple(n for n in absent if LATER_COUNTERS.search(n) and not any_counter and not slots[n].is_meta)
    missing = tuple(n for n in absent if n not in kept)
    obsolete = obsolete_names({name: source[name] for name in found.unexpected})
    unexpected = tuple(n for n in found.unexpected if n not in obsolete and checkpoint.aliases.get(n) not in weights)
    if shapes or (strict and (missing or unexpected)) or not chosen:
        raise _misfit(checkpoint, found, source, target, missing, unexpected, shapes, strict)
    tensor_of = {name: weights[chosen[name]] for name in chosen}
    return Fitted(
        tensor_of,
        {n: (source_of[n], found.how.get(n, "prefix given")) for n in source_of if _was_renamed(n, source_of, prefix)},
        _casts(tensor_of, slots),
        missing,
        unexpected,
        kept,
        tuple(obsolete),
        tied,
    )


def _below(weights: Mapping[str, Tensor], prefix: str | None) -> dict[str, Tensor]:
    """The weights whose names begin with `prefix`, without it; the prefix may stand behind wrappers."""
    if prefix is None:
        return dict(weights)
    prefix = prefix.rstrip(".") + "."
    below = {n.removeprefix(prefix): t for n, t in weights.items() if n.startswith(prefix)}
    if not below:
        old_of = strip(weights).old_of
        below = {n.removeprefix(prefix): weights[old] for n, old in old_of.items() if n.startswith(prefix)}
    if not below:
        raise UsageError(f"no name begins with {prefix!r}", hint=f"the first is {next(iter(weights), '(none)')!r}")
    return below


def _tied_places(slots: Mapping[str, Slot]) -> dict[str, str]:
    """name -> the first name of the same tensor (itself where there is no other)."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(slot.tensor), name) for name, slot in slots.items()}


def _fill_declared_ties(
    checkpoint: Checkpoint, weights: Mapping[str, Tensor], target: Mapping[str, Shape], source_of: dict[str, str]
) -> None:
    """Give names that the file leaves out because the config ties them the tensor that they are tied to.

    For modules whose own tie is not made yet, as on the meta device.
    """
    for tie in by_config(checkpoint.config, weights):
        if tie.tied in target and tie.tied not in source_of and tie.kept in source_of.values():
            source_of[tie.tied] = tie.kept


def _one_of_each_tie(
    groups: Mapping[str, str], source_of: Mapping[str, str], weights: Mapping[str, Tensor]
) -> tuple[dict[str, str], dict[str, str]]:
    """For places that are one tensor: the name to fill -> its source, and the other names -> that name."""
    chosen: dict[str, str] = {}
    tied: dict[str, str] = {}
    for name, first in groups.items():
        source = source_of.get(name)
        if name != first:
            tied[name] = first
        if source is None:
            continue
        other = chosen.setdefault(first, source)
        if other != source and not _equal(weights[other], weights[source], source):
            raise Refused(
                f"{first} and {name} are one tensor in the module, but {other} and {source} hold different values",
                hint="untie the module's weights, or leave one of the two out of the checkpoint",
            )
    return chosen, tied


def _equal(a: Tensor, b: Tensor, name: str) -> bool:
    if a is b or ((key := storage_identity(a)) is not None and key == storage_identity(b)):
        return True
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return all(np.array_equal(_raw(a, box, name), _raw(b, box, name)) for box in boxes_of(a))


def _raw(tensor: Tensor, box: Box, name: str) -> Array:
    return np.ascontiguousarray(read_values(tensor, box, name)).reshape(-1).view(np.uint8)


def _was_renamed(name: str, source_of: Mapping[str, str], prefix: str | None) -> bool:
    return source_of[name] != name or prefix is not None


def _casts(tensor_of: Mapping[str, Tensor], slots: Mapping[str, Slot]) -> dict[str, tuple[str, str]]:
    """Where the module's dtype is another; UsageError where a cast would lose a part or change the meaning."""
    casts = {}
    for name, tensor in tensor_of.items():
        wanted = slots[name].tensor.dtype
        stored, module = tensor.dtype.name, str(wanted).removeprefix("torch.")
        if stored == module:
            continue
        casts[name] = (stored, module)
        if tensor.dtype.kind == "complex" and not wanted.is_complex:
            raise UsageError(f"{name} is {stored} in the file and {module} in the module: its imaginary part would go")
        if tensor.dtype.kind == "float" and not (wanted.is_floating_point or wanted.is_complex):
            raise UsageError(f"{name} is {stored} in the file and {module} in the module: its fractions would go")
        if tensor.dtype.kind in ("int", "uint") and wanted.is_floating_point and tensor.size > 1:
            raise UsageError(
                f"{name} is {stored} in the file and {module} in the module: it may be quantized",
                hint="if it is, its scale stands beside it; convert the checkpoint to plain weights first",
            )
    return casts


def _misfit(
    checkpoint: Checkpoint,
    found: Match,
    source: Mapping[str, Shape],
    target: Mapping[str, Shape],
    missing: tuple[str, ...],
    unexpected: tuple[str, ...],
    shapes: Mapping[str, tuple[Shape, Shape]],
    strict: bool,
) -> UsageError:
    """All that does not fit, as one error: what, how many, and the nearest name beside each."""
    near_missing = {n.name: n for n in nearest_of(missing, target, {n: source[n] for n in unexpected}, limit=SHOWN)}
    near_extra = {n.name: n for n in nearest_of(unexpected, source, {n: target[n] for n in missing}, limit=SHOWN)}
    lines = []
    if shapes:
        lines.append(f"{len(shapes):,} have another shape:")
        lines += [
            f"  {name}: {list(theirs)} in the file, {list(ours)} in the module"
            + (f" (where it is {found.source_of[name]})" if found.source_of[name] != name else "")
            for name, (theirs, ours) in list(shapes.items())[:SHOWN]
        ]
    if missing and (strict or len(missing) == len(target)):
        lines.append(f"{len(missing):,} of the module's {len(target):,} are not in the file:")
        lines += _listed(missing, target, near_missing)
    if unexpected and strict:
        lines.append(f"{len(unexpected):,} of the file's {len(source):,} are not in the module:")
        lines += _listed(unexpected, source, near_extra)
    hint = "strict=False loads what fits" if not shapes and len(missing) < len(target) else ""
    if missing and not found.source_of:
        hint = 'no name fits: is it the right model? A part of the names can be taken with prefix="…"'
    return UsageError(
        f"{checkpoint.path} does not fit the module; nothing was changed\n" + "\n".join(lines), hint=hint
    )


def _listed(names: Iterable[str], shapes: Mapping[str, Shape], near: Mapping[str, Near]) -> list[str]:
    names = list(names)
    lines = []
    for name in names[:SHOWN]:
        beside = near.get(name)
        nearest = f"   nearest: {beside.nearest} {list(beside.nearest_shape)}" if beside else ""
        lines.append(f"  {name} {list(shapes[name])}{nearest}")
    return [*lines, f"  … and {len(names) - SHOWN:,} more"] if len(names) > SHOWN else lines
