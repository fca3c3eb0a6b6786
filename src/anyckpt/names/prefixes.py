"""What wrappers leave in parameter names, and taking it out again.

DDP, FSDP, `torch.compile` and their kin save a model under names with one segment more (`module.layers.0.weight`), and
they nest, in any order, so names are cleaned to a fixed point: `_orig_mod.module.x` and `module._orig_mod.x` are both
`x`. One table says which segments are wrappers, and how sure that is:

* `anywhere`: a private attribute that only the wrapper has, so it is one wherever it stands (`layers.0._orig_mod.fc`);
* `front`: a plain word, so it is one only where every name begins with it (a model may well have a part of that name);
* everything else that all names begin with (`model.`, Lightning's `net.`) may be the model's own and goes on request.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from anyckpt.core.checkpoint import Checkpoint, Optimizer
from anyckpt.errors import Refused, UsageError
from anyckpt.finding import DEFAULT_SEVERITY, Finding

T = TypeVar("T")
Where = Literal["anywhere", "front", "asked"]


@dataclass(frozen=True, slots=True)
class Wrapper:
    """One row: a segment (or several, joined by dots) that a wrapper puts into names.

    `beside`: names the wrapper itself adds at the same level, which may lack the segment. `unless`: where a name has
    one of these segments the prefix belongs to it and stays.
    """

    segment: str
    made_by: str
    where: Where
    beside: tuple[str, ...] = ()
    unless: tuple[str, ...] = ()


WRAPPERS: tuple[Wrapper, ...] = (
    Wrapper("_orig_mod", "torch.compile", "anywhere"),
    Wrapper("_fsdp_wrapped_module", "FSDP", "anywhere"),
    Wrapper("_fpw_module", "FSDP before torch 1.13, fairscale", "anywhere"),
    Wrapper("_checkpoint_wrapped_module", "activation checkpointing", "anywhere"),
    Wrapper("_forward_module", "Lightning Fabric or Lightning's DeepSpeed strategy", "anywhere"),
    # torch.optim.swa_utils.AveragedModel keeps a counter beside the module it averages.
    Wrapper("module", "DistributedDataParallel, DataParallel, DeepSpeed or AveragedModel", "front", ("n_averaged",)),
    Wrapper("_module", "Opacus GradSampleModule", "front"),
    # In an adapter's file the prefix is part of the format (formats/peft.py), so it stays there.
    Wrapper("base_model.model", "PEFT", "front", unless=("lora_A", "lora_B", "lora_embedding_A", "base_layer")),
)

_ANYWHERE = {row.segment: row for row in WRAPPERS if row.where == "anywhere"}
_FRONT = tuple(row for row in WRAPPERS if row.where == "front")
_ANYWHERE_TEXT = re.compile("|".join(map(re.escape, _ANYWHERE)))  # a quick no for nearly every name


@dataclass(frozen=True, slots=True)
class Found:
    """A wrapper's trace: `segment`, who makes it, how many names have it, and one of them."""

    segment: str
    made_by: str
    where: Where
    n_names: int
    example: str

    def __str__(self) -> str:
        return f"{self.segment}. ({self.made_by})" if self.made_by else f"{self.segment}."


@dataclass(frozen=True, slots=True)
class Stripped:
    """Names without wrappers: `old_of[new] = old`, in the order of the names given, and what was taken out."""

    old_of: Mapping[str, str]
    removed: tuple[Found, ...]

    @property
    def new_of(self) -> dict[str, str]:
        """Old name -> new name."""
        return {old: new for new, old in self.old_of.items()}

    @property
    def changed(self) -> bool:
        """Whether any name is another now."""
        return bool(self.removed)


def strip(names: Iterable[str], also: Sequence[str] = ()) -> Stripped:
    """Take every wrapper's segment out of `names`, to a fixed point.

    `also`: prefixes that are no known wrapper's, each taken once from the names that begin with it (`"model."`); a
    leading `*.` takes the segment out wherever it stands (`"*.module."`). Raises Refused where two names become one,
    UsageError where no name has a prefix of `also`.

    >>> strip(["_orig_mod.module.fc.weight", "_orig_mod.module.fc.bias"]).old_of
    {'fc.weight': '_orig_mod.module.fc.weight', 'fc.bias': '_orig_mod.module.fc.bias'}
    """
    old = list(names)
    new = list(old)
    removed: dict[tuple[str, Where], Found] = {}
    _strip_known(new, old, removed)
    for asked in also:
        _strip_asked(new, old, asked, removed)
        _strip_known(new, old, removed)
    old_of: dict[str, str] = {}
    for after, before in zip(new, old, strict=True):
        other = old_of.setdefault(after, before)
        if other != before:
            raise Refused(
                f"{other!r} and {before!r} would both be called {after!r} without their prefixes",
                hint="leave the prefixes in, or choose one of the two with --include or --exclude",
            )
    return Stripped(old_of, tuple(removed.values()))


def find(names: Iterable[str]) -> tuple[Found, ...]:
    """What `strip` would take out, outermost first, and last (`where` "asked") what all remaining names begin with.

    The last is worded by the caller as possibly the model's own: nothing in the names tells.
    """
    old = list(names)
    new = list(old)
    removed: dict[tuple[str, Where], Found] = {}
    _strip_known(new, old, removed)
    prefix = common_prefix(new)
    found = list(removed.values())
    if prefix:
        found.append(Found(prefix.rstrip("."), "", "asked", len(new), old[0]))
    return tuple(found)


def common_prefix(names: Collection[str]) -> str:
    """The whole segments, with their dots, that all names begin with; "" for fewer than two names.

    A number is never part of it: `0.` is an element of a Sequential, no wrapper.
    """
    if len(names) < 2:
        return ""
    low, high = min(names).split("."), max(names).split(".")
    prefix = ""
    for a, b in zip(low[:-1], high[:-1], strict=False):
        if a != b or a.isdigit():
            break
        prefix += f"{a}."
    return prefix


def _strip_known(new: list[str], old: list[str], removed: dict[tuple[str, Where], Found]) -> None:
    """Take out rows of the table until none applies. Changes `new` in place."""
    while True:
        _strip_anywhere(new, old, removed)
        row = next((row for row in _FRONT if _leads(row, new)), None)
        if row is None:
            return
        hits = [i for i, name in enumerate(new) if name.startswith(f"{row.segment}.")]
        for i in hits:
            new[i] = new[i][len(row.segment) + 1 :]
        _note(removed, Found(row.segment, row.made_by, "front", len(hits), old[hits[0]]))


def _strip_anywhere(new: list[str], old: list[str], removed: dict[tuple[str, Where], Found]) -> None:
    hits: dict[str, list[int]] = {}
    for i, name in enumerate(new):
        if not _ANYWHERE_TEXT.search(name):
            continue
        *modules, last = name.split(".")
        gone = dict.fromkeys(s for s in modules if s in _ANYWHERE)
        if gone:
            new[i] = ".".join([*(s for s in modules if s not in _ANYWHERE), last])
            for segment in gone:
                hits.setdefault(segment, []).append(i)
    for segment, at in hits.items():
        _note(removed, Found(segment, _ANYWHERE[segment].made_by, "anywhere", len(at), old[at[0]]))


def _leads(row: Wrapper, names: Sequence[str]) -> bool:
    """Whether a `front` row's segment stands before all names, but for those that the wrapper puts beside it."""
    prefix = f"{row.segment}."
    if not all(name.startswith(prefix) or name in row.beside for name in names):
        return False
    if row.unless and any(not set(row.unless).isdisjoint(name.split(".")) for name in names):
        return False
    return any(name.startswith(prefix) for name in names)


def _strip_asked(new: list[str], old: list[str], asked: str, removed: dict[tuple[str, Where], Found]) -> None:
    anywhere = asked.startswith("*.")
    segment = asked.removeprefix("*.").rstrip(".")
    prefix, inner = f"{segment}.", f".{segment}."
    hits: list[int] = []
    for i, name in enumerate(new):
        short = name.removeprefix(prefix)
        while anywhere and inner in short:
            short = short.replace(inner, ".")
        if short != name:
            hits.append(i)
            new[i] = short
    if hits:
        _note(removed, Found(segment, "", "asked", len(hits), old[hits[0]]))
    elif new:
        raise UsageError(f"no name begins with {prefix!r}", hint=f"the first name is {old[0]!r}")


def _note(removed: dict[tuple[str, Where], Found], found: Found) -> None:
    """Record what was taken out; of a wrapper met again (`module.module.`), the most names at once."""
    known = removed.setdefault((found.segment, found.where), found)
    if found.n_names > known.n_names:
        removed[found.segment, found.where] = replace(known, n_names=found.n_names)


def stripped(checkpoint: Checkpoint, also: Sequence[str] = ()) -> Checkpoint:
    """The checkpoint under names without wrappers: weights, aliases, optimizer slots and groups alike.

    Lazy: nothing is read. Raises as `strip`; returns the same object where no name has a wrapper's segment.
    """
    result = strip(checkpoint.weights, also)
    optimizer = checkpoint.optimizer
    own = strip(_optimizer_names(optimizer) - set(checkpoint.weights), ()) if optimizer else Stripped({}, ())
    if not result.changed and not own.changed:
        return checkpoint
    new_of = {**own.new_of, **result.new_of}
    facts = dict(checkpoint.facts)
    facts["prefix"] = tuple(f"{found.segment}." for found in result.removed)
    if subclasses := facts.get("subclasses"):
        facts["subclasses"] = _renamed(subclasses, new_of)
    return replace(
        checkpoint,
        weights={new: checkpoint.weights[before] for new, before in result.old_of.items()},
        aliases={new_of.get(a, a): new_of.get(b, b) for a, b in checkpoint.aliases.items()},
        optimizer=rename_optimizer(optimizer, new_of) if optimizer else None,
        facts=facts,
    )


def rename_optimizer(optimizer: Optimizer, new_of: Mapping[str, str]) -> Optimizer:
    """The same optimizer state under other parameter names; names that `new_of` lacks stay.

    Raises Refused where two parameters of a slot would share a name.
    """
    groups = tuple(
        {**group, **{key: [new_of.get(n, n) for n in group[key]] for key in ("params", "param_names") if key in group}}
        for group in optimizer.groups
    )
    slots = {slot: _renamed(by_name, new_of) for slot, by_name in optimizer.slots.items()}
    return replace(optimizer, slots=slots, groups=groups)


def note(found: Iterable[Found], n_names: int) -> list[Finding]:
    """The `prefixed` notes for what `find` found; `n_names` is how many names there are in all."""
    return [
        Finding(
            "prefixed",
            DEFAULT_SEVERITY["prefixed"],
            f"{f.n_names:,} of {n_names:,} names carry {f.segment!r}, the wrapper of {f.made_by}",
            where=f.example,
            hint="convert with --strip-prefixes, or load_into a model: prefixes are handled there",
        )
        for f in found
        if f.where != "asked"
    ]


def _optimizer_names(optimizer: Optimizer) -> set[str]:
    names = {name for by_name in optimizer.slots.values() for name in by_name}
    return names | {n for group in optimizer.groups for n in group.get("params", ()) if isinstance(n, str)}


def _renamed(by_name: Mapping[str, T], new_of: Mapping[str, str]) -> dict[str, T]:
    out: dict[str, Any] = {}
    for name, value in by_name.items():
        new = new_of.get(name, name)
        if new in out:
            raise Refused(f"two entries would be called {new!r} without their prefixes")
        out[new] = value
    return out
