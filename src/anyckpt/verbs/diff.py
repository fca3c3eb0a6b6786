"""What two checkpoints of any formats differ in: names, shapes, types, values.

Values are compared slab by slab in bounded memory, and not read at all where both sides are the same bytes of the same
file. The comparison of values itself is `verbs/compare.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from anyckpt.core.checkpoint import Checkpoint
from anyckpt.core.inert import NumpyArray, TensorSubclass, walk
from anyckpt.core.tensor import Tensor
from anyckpt.names.match import OLDER, Match, Near, match, nearest_of
from anyckpt.names.prefixes import find
from anyckpt.names.ties import storage_identity
from anyckpt.verbs.compare import ValueDifference, compare_values
from anyckpt.verbs.open import open
from anyckpt.verbs.reading import Events, each
from anyckpt.verbs.tensors import optimizer_tensors, other_tensors

Path = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class Named:
    """A name that only one side has: its tensor's type and shape, and the nearest name of the other side if any.

    `tied_to`: the name whose tensor it is, where the other side has that one: no value is lost then.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nearest: Near | None = None
    tied_to: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The row as `--json` prints it."""
        near = {"name": self.nearest.nearest, "shape": list(self.nearest.nearest_shape)} if self.nearest else None
        return {
            "name": self.name, "dtype": self.dtype, "shape": list(self.shape), "nearest": near,
            "tied_to": self.tied_to or None,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Renamed:
    """One tensor under two names, and why that is certain ("wrapper prefix", "older spelling", "prefix 'net.'")."""

    a: str
    b: str
    why: str


@dataclass(frozen=True, slots=True)
class Other:
    """Something beside the tensors that differs: a hyperparameter, a step, a scheduler's value."""

    what: str
    a: str
    b: str


@dataclass(frozen=True, slots=True)
class Difference:
    """What `diff` found. Everything is empty where the two are the same, but for what says how that was seen.

    `is_same`: same names (but for ties that one side leaves out, and for renames where those were asked to be looked
    through), shapes, types (unless those were to be ignored) and values, within the tolerance given.
    `n_same`: tensors that agree in every way; `n_compared`: pairs whose values were compared, or known to be equal.
    """

    a: str
    b: str
    is_same: bool
    n_same: int
    n_compared: int
    deep: bool
    only_a: tuple[Named, ...] = ()
    only_b: tuple[Named, ...] = ()
    renamed: tuple[Renamed, ...] = ()
    shapes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    dtypes: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    values: tuple[ValueDifference, ...] = ()
    other: tuple[Other, ...] = ()
    prefixes: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())

    def as_dict(self) -> dict[str, Any]:
        """The record as `--json` prints it."""
        return {
            "a": self.a, "b": self.b, "same": self.is_same, "tensors_same": self.n_same,
            "tensors_compared": self.n_compared, "deep": self.deep,
            "only_a": [n.as_dict() for n in self.only_a], "only_b": [n.as_dict() for n in self.only_b],
            "renamed": [{"a": r.a, "b": r.b, "why": r.why} for r in self.renamed],
            "shapes": {n: {"a": list(a), "b": list(b)} for n, (a, b) in self.shapes.items()},
            "dtypes": {n: {"a": a, "b": b} for n, (a, b) in self.dtypes.items()},
            "values": [v.as_dict() for v in self.values],
            "other": [{"what": o.what, "a": o.a, "b": o.b} for o in self.other],
            "prefixes": {"a": list(self.prefixes[0]), "b": list(self.prefixes[1])},
        }  # fmt: skip


def diff(
    a: Path | Checkpoint,
    b: Path | Checkpoint,
    *,
    strip_prefixes: bool = False,
    state: bool = False,
    rtol: float = 0.0,
    atol: float = 0.0,
    ignore_dtype: bool = False,
    deep: bool = True,
    jobs: int | None = None,
    events: Events | None = None,
) -> Difference:
    """Compare two checkpoints. Without `deep`, only names, shapes and types: no value is read.

    Names that are certainly the same but for a wrapper, a prefix or an older spelling are compared as a pair and told
    as `renamed`; prefixes count as a difference unless `strip_prefixes`, spellings always. Values agree where |a - b|
    <= max(atol, rtol · max(|a|, |b|)); with both tolerances 0, where all bytes do (after the cast to the narrower type,
    where types differ). With `state`, optimizer slots (`parameter/slot`), hyperparameters, step, epoch and all else
    saved are compared too.
    Raises CheckpointError where values are cut short.
    """
    one, two = (x if isinstance(x, Checkpoint) else open(x) for x in (a, b))
    found = _match(one.weights, two.weights, one.config or two.config)
    parts = [_Part(one.weights, two.weights, found)]
    other: tuple[Other, ...] = ()
    if state:
        parts += [_slots(one, two, found), _others(one, two)]
        other = tuple(_plain_differences(one, two, found))
    renamed = tuple(r for part in parts for r in part.renamed())
    only_a = tuple(n for part in parts for n in part.only(one, True))
    only_b = tuple(n for part in parts for n in part.only(two, False))
    shapes = {n: s for part in parts for n, s in part.shapes.items()}
    pairs = [pair for part in parts for pair in part.pairs()]
    rows = _compared(pairs, rtol, atol, deep, jobs, events)
    dtypes = {p.name: (p.a.dtype.name, p.b.dtype.name) for p in pairs if p.a.dtype != p.b.dtype}
    values = tuple(row for row in rows if row is not None and not (row.is_equal and row.is_bitwise))
    unlike = {v.name for v in values if not v.is_equal} | set(shapes) | (set() if ignore_dtype else set(dtypes))
    lost = [n for n in (*only_a, *only_b) if not n.tied_to]
    n_pairs = sum(len(part.found.source_of) for part in parts)
    told = [r for r in renamed if not strip_prefixes or r.why == OLDER]
    is_same = not (unlike or lost or other or told)
    return Difference(
        one.path, two.path, is_same, n_pairs - len(unlike), sum(row is not None for row in rows), deep,
        only_a, only_b, renamed, shapes, dtypes, values, other, (_prefixes(one), _prefixes(two)),
    )


@dataclass(frozen=True, slots=True)
class _Pair:
    name: str
    a: Tensor
    b: Tensor


@dataclass(frozen=True, slots=True)
class _Part:
    """One kind of tensors of both sides and how their names pair; `found.source_of`: name in b -> name in a."""

    a: Mapping[str, Tensor]
    b: Mapping[str, Tensor]
    found: Match

    def pairs(self) -> list[_Pair]:
        pairs = ((s, self.a[s], self.b[t]) for t, s in self.found.source_of.items())
        return [_Pair(s, a, b) for s, a, b in pairs if a.shape == b.shape]

    def renamed(self) -> list[Renamed]:
        return [Renamed(s, t, self.found.how.get(t, "")) for t, s in self.found.source_of.items() if s != t]

    @property
    def shapes(self) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
        pairs = self.found.source_of.items()
        return {s: (self.a[s].shape, self.b[t].shape) for t, s in pairs if self.a[s].shape != self.b[t].shape}

    def only(self, checkpoint: Checkpoint, first: bool) -> list[Named]:
        names = self.found.unexpected if first else self.found.missing
        mine, others = (self.a, self.b) if first else (self.b, self.a)
        rest = {n: others[n].shape for n in (self.found.missing if first else self.found.unexpected)}
        shapes = {n: t.shape for n, t in mine.items()}
        near = {n.name: n for n in nearest_of(names, shapes, rest)}
        paired = set(self.found.source_of.values()) if first else set(self.found.source_of)
        return [
            Named(n, mine[n].dtype.name, mine[n].shape, near.get(n), _other_name(checkpoint.aliases, n, paired))
            for n in names
        ]


def _other_name(aliases: Mapping[str, str], name: str, paired: Collection[str]) -> str:
    """A name among `paired` that is tied to `name`, in either direction; "" where there is none."""
    kept = aliases.get(name, name)
    names = (kept, *(tied for tied, holder in aliases.items() if holder == kept))
    return next((n for n in names if n != name and n in paired), "")


def _match(a: Mapping[str, Tensor], b: Mapping[str, Tensor], config: Mapping[str, Any] | None) -> Match:
    shapes = [{name: t.shape for name, t in side.items()} for side in (a, b)]
    return match(shapes[0], shapes[1], config=config)


def _exact(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Match:
    shapes = [{name: t.shape for name, t in side.items()} for side in (a, b)]
    return match(shapes[0], shapes[1], wrappers=False)


def _slots(one: Checkpoint, two: Checkpoint, weights: Match) -> _Part:
    """Optimizer slots, paired as their parameters are."""
    a, b = optimizer_tensors(one), optimizer_tensors(two)
    name_in_a = weights.source_of
    source_of, how = {}, {}
    for name in b:
        parameter, _, slot = name.rpartition("/")
        source = f"{name_in_a.get(parameter, parameter)}/{slot}"
        if source in a:
            source_of[name] = source
            if parameter in weights.how and source != name:
                how[name] = weights.how[parameter]
    taken = set(source_of.values())
    missing = tuple(n for n in b if n not in source_of)
    found = Match(source_of, how, missing, tuple(n for n in a if n not in taken), {})
    return _Part(a, b, found)


def _others(one: Checkpoint, two: Checkpoint) -> _Part:
    a, b = other_tensors(one), other_tensors(two)
    return _Part(a, b, _exact(a, b))


def _compared(
    pairs: list[_Pair], rtol: float, atol: float, deep: bool, jobs: int | None, events: Events | None
) -> list[ValueDifference | None]:
    """The comparison of each pair; None where there is nothing to compare. Tied pairs are read once."""
    if not deep:
        return []
    done: dict[Any, int] = {}
    first: list[int] = []
    work: list[_Pair] = []
    for pair in pairs:
        key = (storage_identity(pair.a) or id(pair.a), storage_identity(pair.b) or id(pair.b))
        if key not in done:
            done[key] = len(work)
            work.append(pair)
        first.append(done[key])

    def one(pair: _Pair, advance: Callable[[int], None]) -> ValueDifference | None:
        key = storage_identity(pair.a)
        if not pair.a.is_stored or not pair.b.is_stored:
            return None
        if pair.a is pair.b or (key is not None and key == storage_identity(pair.b)):
            advance(pair.a.nbytes + pair.b.nbytes)
            return ValueDifference(pair.name, pair.a.size)
        return compare_values(pair.name, pair.a, pair.b, rtol=rtol, atol=atol, advance=advance)

    total = sum(p.a.nbytes + p.b.nbytes for p in work if p.a.is_stored and p.b.is_stored)
    rows = each(one, work, total_bytes=total, jobs=jobs, events=events)
    out = []
    for pair, i in zip(pairs, first, strict=True):
        row = rows[i]
        out.append(replace(row, name=pair.name) if row is not None else None)
    return out


def _prefixes(checkpoint: Checkpoint) -> tuple[str, ...]:
    return tuple(f"{f.segment}." for f in find(checkpoint.weights) if f.where != "asked")


def _plain_differences(one: Checkpoint, two: Checkpoint, weights: Match) -> list[Other]:
    """Plain values beside the tensors that differ, by their path; a value that only one side has is "(none)"."""
    new_name = {s: t for t, s in weights.source_of.items()}
    a, b = _plain(one, new_name), _plain(two, {})
    rows = []
    for what in dict.fromkeys((*a, *b)):
        left, right = a.get(what, "(none)"), b.get(what, "(none)")
        if left != right:
            rows.append(Other(what, left, right))
    return rows


def _plain(checkpoint: Checkpoint, new_name: Mapping[str, str]) -> dict[str, str]:
    """Path -> text of every plain value saved beside the tensors."""
    found: dict[str, str] = {}
    if checkpoint.optimizer:
        for i, group in enumerate(checkpoint.optimizer.groups):
            group = {**group, "params": [new_name.get(n, n) for n in group.get("params", ())]}
            found.update(_leaves(f"optimizer/group {i}", group))
    rest = {
        "step": checkpoint.step, "epoch": checkpoint.epoch, "scheduler": checkpoint.scheduler, "rng": checkpoint.rng,
        **checkpoint.state,
    }
    for key, value in rest.items():
        if value is not None:
            found.update(_leaves(key, value))
    return found


def _leaves(root: str, value: Any) -> Iterable[tuple[str, str]]:
    for path, leaf in walk(value):
        if not isinstance(leaf, Tensor | NumpyArray | TensorSubclass | dict | list | tuple):
            yield "/".join((root, *map(str, path))), repr(leaf)
