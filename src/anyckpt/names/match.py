"""Pair the names of a checkpoint with those of a target: a module, or another checkpoint.

In order, each for what is left of both: the same name; the same without wrappers; the same but for one whole prefix
that one side has (`net.`, a base model's `bert.`); the same in the newer spelling. What is then left is told with the
nearest name beside it. A prefix that no table knows is taken only if it makes every name of the target found, in its
shape.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

from anyckpt.core.box import Shape
from anyckpt.errors import Refused
from anyckpt.names.prefixes import strip
from anyckpt.names.versions import base_prefixes, older_names

MAX_CANDIDATES = 400  # names compared with each missing one
MAX_SAMPLE = 20_000  # names that prefixes are scored by
MAX_PREFIXES = 4  # prefixes tried, by how many names they explain
OLDER = "older spelling"
NEAR = 0.6  # how alike names must be to be worth showing


@dataclass(frozen=True, slots=True)
class Match:
    """Pairs target name -> source name, and how each was found where it is not the same name.

    `how[target]`: "wrapper prefix", "prefix 'net.'", "older spelling". `missing`: target names without a source;
    `unexpected`: source names that nothing wants. `shapes`: target -> (source's shape, target's) of pairs that differ.
    """

    source_of: Mapping[str, str]
    how: Mapping[str, str]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    shapes: Mapping[str, tuple[Shape, Shape]]

    @property
    def is_complete(self) -> bool:
        """Whether every name of both sides has its counterpart, in its shape."""
        return not (self.missing or self.unexpected or self.shapes)


@dataclass(frozen=True, slots=True)
class Near:
    """The nearest name for one that has no counterpart, with both shapes; `fits`: the shapes are equal."""

    name: str
    shape: Shape
    nearest: str
    nearest_shape: Shape

    @property
    def fits(self) -> bool:
        """Whether the two have one shape."""
        return self.shape == self.nearest_shape

    def __str__(self) -> str:
        return f"{self.name} {list(self.shape)}: nearest {self.nearest} {list(self.nearest_shape)}"


def match(
    source: Mapping[str, Shape],
    target: Mapping[str, Shape],
    *,
    config: Mapping[str, Any] | None = None,
    wrappers: bool = True,
    optional: Collection[str] = (),
) -> Match:
    """Pair two sets of named shapes. `optional`: target names that need no source (their own ties have one).

    With `wrappers` False only equal names are paired.
    """
    pairs = {name: name for name in target if name in source}
    how: dict[str, str] = {}
    if wrappers and len(pairs) < len(target):
        clean_source, clean_target = _clean(source), _clean(target)
        _pair(pairs, how, clean_source, clean_target, "wrapper prefix")
    if wrappers and len(pairs) < len(target):
        sure = frozenset(base_prefixes(config))
        for prefix, source_lacks in _prefixes(clean_source, clean_target, pairs, sure):
            shifted = _shifted(clean_source, prefix, source_lacks)
            trial, trial_how = dict(pairs), dict(how)
            _pair(trial, trial_how, shifted, clean_target, f"prefix {prefix!r}")
            new = [name for name in trial if name not in pairs]
            fit = all(same_shape(source[trial[name]], target[name]) for name in new)
            if new and fit and (prefix in sure or all(name in trial or name in optional for name in target)):
                pairs, how = trial, trial_how
                break
        if len(pairs) < len(target):
            _pair(pairs, how, _newest(source), _newest(target), OLDER)
    taken = set(pairs.values())
    return Match(
        pairs,
        how,
        tuple(name for name in target if name not in pairs),
        tuple(name for name in source if name not in taken),
        {t: (source[s], target[t]) for t, s in pairs.items() if not same_shape(source[s], target[t])},
    )


def same_shape(source: Shape, target: Shape) -> bool:
    """Equal shapes; torch, too, takes a tensor of shape [1] for a scalar and the reverse (files from before 0.4)."""
    return source == target or {source, target} == {(), (1,)}


def _pair(
    pairs: dict[str, str], how: dict[str, str], source: Mapping[str, str], target: Mapping[str, str], word: str
) -> None:
    """Pair what has one canonical name; `source` and `target`: canonical name -> name."""
    taken = set(pairs.values())
    for canonical, name in target.items():
        found = source.get(canonical)
        if name not in pairs and found is not None and found not in taken:
            pairs[name] = found
            how[name] = word
            taken.add(found)


def _clean(names: Iterable[str]) -> Mapping[str, str]:
    """Name without wrappers -> name; the names themselves where stripping would make two the same."""
    try:
        return strip(names).old_of
    except Refused:
        return {name: name for name in names}


def _newest(shapes: Mapping[str, Shape]) -> Mapping[str, str]:
    """Name without wrappers in its newest spelling -> name."""
    old_of = _clean(shapes)
    clean = {new: shapes[old] for new, old in old_of.items()}
    new_of = older_names(clean).new_of
    return {new_of.get(name, name): old_of[name] for name in clean}


def _prefixes(
    source: Mapping[str, str], target: Mapping[str, str], pairs: Mapping[str, str], sure: Collection[str]
) -> list[tuple[str, bool]]:
    """Prefixes that may explain what is unpaired, the most telling first: (prefix, whether the source lacks it).

    `source`, `target`: name without wrappers -> name.
    """
    taken = set(pairs.values())
    left_source = {clean: None for clean, name in source.items() if name not in taken}
    left_target = {clean: None for clean, name in target.items() if name not in pairs}
    scores: dict[tuple[str, bool], int] = {}
    if left_source and left_target:
        for one, other, source_lacks in ((left_source, left_target, False), (left_target, left_source, True)):
            sample = list(one)[:: -(-len(one) // MAX_SAMPLE)]
            for prefix in _leading(sample):
                n = sum(name.startswith(prefix) and name[len(prefix) :] in other for name in sample)
                if n:
                    scores[prefix, source_lacks] = n
    return sorted(scores, key=lambda key: (-scores[key], key[0] not in sure, key))[:MAX_PREFIXES]


def _shifted(source: Mapping[str, str], prefix: str, source_lacks: bool) -> dict[str, str]:
    """The source's names with the prefix put before them, or taken off those that have it."""
    if source_lacks:
        return {prefix + clean: name for clean, name in source.items()}
    return {clean.removeprefix(prefix): name for clean, name in source.items() if clean.startswith(prefix)}


def _leading(names: Collection[str]) -> list[str]:
    """The first one, two and three segments of names, with their dot: the most usual ones."""
    found: dict[str, int] = {}
    for name in names:
        end = -1
        for _ in range(3):
            end = name.find(".", end + 1)
            if end < 0:
                break
            found[name[: end + 1]] = found.get(name[: end + 1], 0) + 1
    return sorted(found, key=lambda prefix: -found[prefix])[:16]


def nearest(
    name: str, shape: Shape, others: Mapping[str, Shape], *, by_leaf: Mapping[str, list[str]] | None = None
) -> Near | None:
    """The name of `others` most like `name`, by segments and shape; None where none is alike.

    An equal shape and an equal last segment count most. `by_leaf`: `others` grouped by last segment, for many calls.
    """
    segments = name.split(".")
    groups = by_leaf if by_leaf is not None else leaves(others)
    candidates = groups.get(segments[-1], [])[:MAX_CANDIDATES] or list(others)[:MAX_CANDIDATES]
    best: tuple[float, str] | None = None
    matcher: SequenceMatcher[str] = SequenceMatcher(autojunk=False)
    matcher.set_seq2(segments)
    letters: SequenceMatcher[str] = SequenceMatcher(autojunk=False)
    letters.set_seq2(name)
    for other in candidates:
        matcher.set_seq1(other.split("."))
        letters.set_seq1(other)
        score = matcher.ratio() + 0.5 * letters.ratio() + (0.5 if others[other] == shape else 0.0)
        if best is None or score > best[0]:
            best = (score, other)
    if best is None or best[0] < NEAR:
        return None
    return Near(name, shape, best[1], others[best[1]])


def leaves(names: Iterable[str]) -> dict[str, list[str]]:
    """Names grouped by their last segment."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(name.rpartition(".")[2], []).append(name)
    return groups


def nearest_of(
    names: Iterable[str], shapes: Mapping[str, Shape], others: Mapping[str, Shape], *, limit: int = 20
) -> tuple[Near, ...]:
    """The nearest of `others` for the first `limit` of `names`, where there is one."""
    groups = leaves(others)
    found = []
    for i, name in enumerate(names):
        if i >= limit:
            break
        if (near := nearest(name, shapes[name], others, by_leaf=groups)) is not None:
            found.append(near)
    return tuple(found)
