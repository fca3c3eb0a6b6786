"""From a checkpoint into torch: tensors, state dicts, and modules filled in place.

`load_into` settles every name and shape before it changes anything, then copies slab by slab into the parameters the
module already has, so that there is never a second copy of the model in memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from anyckpt.core.box import whole
from anyckpt.core.checkpoint import Checkpoint
from anyckpt.core.tensor import DEQUANTIZERS, Tensor
from anyckpt.errors import MissingDependency, UsageError
from anyckpt.verbs.open import open
from anyckpt.verbs.reading import Events, boxes_of, each, read_values, refuse_damaged

NoAdvance: Callable[[int], None] = lambda _: None  # noqa: E731


def load(
    path: str | os.PathLike[str] | Checkpoint,
    *,
    device: Any = "cpu",
    dtype: Any = None,
    names: Sequence[str] | None = None,
    jobs: int | None = None,
    events: Events | None = None,
) -> dict[str, Any]:
    """The weights of a checkpoint of any format as a state dict of torch tensors; tied names share one tensor.

    `dtype` (torch's) casts floating-point tensors. `names`: patterns of the tensors wanted (`"*.norm.weight"`).
    Raises MissingDependency without torch, CheckpointError where the checkpoint is damaged, UsageError where a pattern
    fits no name.
    """
    torch = import_torch()
    checkpoint = path if isinstance(path, Checkpoint) else open(path)
    refuse_damaged(checkpoint)
    wanted = dict(checkpoint.weights)
    if names is not None:
        for pattern in names:
            if not any(fnmatchcase(name, pattern) for name in wanted):
                raise UsageError(f"no tensor is called {pattern!r}", hint="see the names with: anyckpt inspect --all")
        wanted = {n: t for n, t in wanted.items() if any(fnmatchcase(n, pattern) for pattern in names)}
    unique = {name: t for name, t in wanted.items() if checkpoint.aliases.get(name) not in wanted}

    def one(item: tuple[str, Tensor], advance: Callable[[int], None]) -> Any:
        made = to_torch(item[1], name=item[0], advance=advance)
        floats = dtype is not None and (made.dtype.is_floating_point or made.dtype.is_complex)
        return made.to(device=device, dtype=dtype) if floats else made.to(device=device)

    with torch.no_grad():
        total = sum(t.nbytes for t in unique.values())
        made = dict(zip(unique, each(one, unique.items(), total_bytes=total, jobs=jobs, events=events), strict=True))
    return {name: made[name] if name in made else made[checkpoint.aliases[name]] for name in wanted}


def to_torch(tensor: Tensor, *, name: str = "", advance: Callable[[int], None] = NoAdvance) -> Any:
    """A torch tensor (CPU) of the same dtype, shape and bytes; block-quantized types give their values in float32.

    Raises UsageError for types that torch has no plain tensor of, CheckpointError where bytes are missing.
    """
    torch = import_torch()
    kind, shape = torch_form(tensor, name)
    out = torch.empty(shape, dtype=kind)
    if out.numel() == 0:
        return out
    target = out.reshape(-1).view(torch.uint8).numpy()
    at = 0
    for box in boxes_of(tensor):
        values = np.ascontiguousarray(read_values(tensor, box, name)).reshape(-1).view(np.uint8)
        target[at : at + values.size] = values
        at += values.size
        advance(tensor.dtype.nbytes(box.volume))
    return out


def torch_form(tensor: Tensor, name: str = "") -> tuple[Any, tuple[int, ...]]:
    """The torch dtype and shape that hold a tensor's elements. Raises UsageError where there is none."""
    torch = import_torch()
    dtype, shape = tensor.dtype, tensor.shape
    if dtype.name in DEQUANTIZERS:
        return torch.float32, shape
    if dtype.name == "float4_e2m1fn" and shape and shape[-1] % 2 == 0:  # torch counts bytes of two values
        kind, shape = getattr(torch, "float4_e2m1fn_x2", None), (*shape[:-1], shape[-1] // 2)
    else:
        kind = getattr(torch, dtype.name, None) if dtype.block == 1 and dtype.kind != "quantized" else None
    if kind is None:
        hint = 'take checkpoint.view("dense")' if dtype.kind == "quantized" else ""
        newer = f"; it takes torch {dtype.since_torch} or later" if dtype.since_torch and not hint else ""
        where = f"{name}: " if name else ""
        raise UsageError(f"{where}torch has no plain tensor of type {dtype.name}{newer}", hint=hint)
    return kind, shape


def import_torch() -> Any:
    """torch, or MissingDependency with how to get it."""
    try:
        import torch
    except ImportError as error:
        raise MissingDependency("this needs torch: pip install torch") from error
    return torch


@dataclass(frozen=True, slots=True)
class CastTo:
    """A tensor whose values were rounded to the module's own dtype."""

    name: str
    stored: str
    module: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """What `load_into` did. Names are the module's; `renamed`: name in the module -> (name in the file, why).

    `missing` and `unexpected` (names of the file) are empty where `strict`. `kept`: counters that the file is too old
    to have, left as the module had them. `ignored`: buffers that newer code computes. `tied`: names filled through
    another one. `made`: what was on the meta device and was given memory; `still_meta`: what still has none, such as
    buffers that no checkpoint holds (call the module's own initialisation for those).
    """

    path: str
    n_tensors: int
    n_bytes: int
    renamed: Mapping[str, tuple[str, str]]
    casts: tuple[CastTo, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    kept: tuple[str, ...]
    ignored: tuple[str, ...]
    tied: Mapping[str, str]
    made: tuple[str, ...]
    still_meta: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """The record as plain data."""
        return {
            "path": self.path, "tensors": self.n_tensors, "bytes": self.n_bytes,
            "renamed": {name: {"from": old, "why": why} for name, (old, why) in self.renamed.items()},
            "casts": [{"name": c.name, "from": c.stored, "to": c.module} for c in self.casts],
            "missing": list(self.missing), "unexpected": list(self.unexpected), "kept": list(self.kept),
            "ignored": list(self.ignored), "tied": dict(self.tied), "made": list(self.made),
            "still_meta": list(self.still_meta),
        }  # fmt: skip


def load_into(
    model: Any,
    path: str | os.PathLike[str] | Checkpoint,
    *,
    strict: bool = True,
    prefix: str | None = None,
    jobs: int | None = None,
    events: Events | None = None,
) -> Loaded:
    """Fill a torch module with a checkpoint of any format, in place.

    Either side may be wrapped (`module.`, `_orig_mod.` …) or spell names in an older way. `prefix`: take only names of
    the file that begin with it, without it (`"net."`). With `strict`, raises UsageError, before anything is changed,
    where the module's names are not all there or the file has others; a shape that differs always does. Values are
    rounded to the module's own dtypes as torch does, which `Loaded.casts` tells.
    """
    from anyckpt.verbs.fitting import fit, slots_of

    torch = import_torch()
    checkpoint = path if isinstance(path, Checkpoint) else open(path)
    refuse_damaged(checkpoint)
    slots = slots_of(model)
    fitted = fit(checkpoint, slots, strict=strict, prefix=prefix)

    def one(name: str, advance: Callable[[int], None]) -> None:
        slot, tensor = slots[name], fitted.tensor_of[name]
        target = slot.tensor
        if slot.is_meta:
            target = torch.empty(slot.shape or tensor.shape, dtype=target.dtype)
        elif slot.is_lazy:
            target.materialize(tensor.shape)
        fill(target, tensor, name, advance)
        if slot.is_meta:
            made = torch.nn.Parameter(target, slot.tensor.requires_grad) if slot.is_parameter else target
            for owner in fitted.owners_of(name):
                slots[owner].places[slots[owner].name] = made

    with torch.no_grad():
        total = sum(fitted.tensor_of[name].nbytes for name in fitted.tensor_of)
        each(one, fitted.tensor_of, total_bytes=total, jobs=jobs, events=events)
    return Loaded(
        checkpoint.path, len(fitted.tensor_of), total, fitted.renamed,
        tuple(CastTo(n, a, b) for n, (a, b) in fitted.casts.items()), fitted.missing, fitted.unexpected, fitted.kept,
        fitted.ignored, fitted.tied, tuple(n for n in slots if slots[n].is_meta and n not in fitted.missing),
        tuple(n for named in (model.named_parameters, model.named_buffers) for n, t in named() if t.is_meta),
    )  # fmt: skip


def fill(target: Any, tensor: Tensor, name: str, advance: Callable[[int], None] = NoAdvance) -> None:
    """Copy a tensor's values into a torch tensor of its shape, of any dtype, strides and device, slab by slab."""
    torch = import_torch()
    if tuple(target.shape) != tensor.shape:  # a scalar and a tensor of one element
        target = target.detach().reshape(tensor.shape)
    kind, shape = torch_form(tensor, name)
    if shape != tensor.shape:
        target.detach().copy_(to_torch(tensor, name=name))
        return
    for box in boxes_of(tensor):
        values = np.ascontiguousarray(read_values(tensor, box, name))
        held = torch.from_numpy(values.reshape(-1).view(np.uint8)).view(kind).reshape(box.shape)
        place = target.detach() if box == whole(tensor.shape) else target.detach()[box.slices()]
        place.copy_(held)
        advance(tensor.dtype.nbytes(box.volume))


