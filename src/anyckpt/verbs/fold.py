"""Fold repeated layers: names that differ only in whole-number segments, of one shape and dtype, become one row.

    model.layers.0.mlp.up_proj.weight …31…   ->   model.layers.{0..31}.mlp.up_proj.weight ×32
    experts.{0..7} inside layers.{0..3}      ->   layers.{0..3}.experts.{0..7}.w1 ×32

What differs in shape or dtype, or is missing, stays apart: nothing about the pattern is assumed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from anyckpt.core.box import Shape
from anyckpt.core.tensor import Tensor

Numbers = frozenset[int]
Literals = tuple[str, ...]  # what stands between the numbers of a name

# A whole segment that is a number as Python spells it: "007" written as a number would not be the same name.
_NUMBER = re.compile(r"(?<![^.])(0|[1-9][0-9]{0,17})(?![^.])")


@dataclass(frozen=True, slots=True)
class Fold:
    """`count` tensors of one shape and dtype whose names fit `name`; `nbytes` is of all of them together."""

    name: str
    count: int
    dtype: str
    shape: Shape
    nbytes: int

    def as_dict(self) -> dict[str, Any]:
        """The row as `--json` prints it."""
        return {
            "name": self.name,
            "count": self.count,
            "dtype": self.dtype,
            "shape": list(self.shape),
            "bytes": self.nbytes,
        }


def fold(tensors: Mapping[str, Tensor]) -> list[Fold]:
    """The tensors as folded rows, in the order in which the first of each occurs."""
    groups: dict[tuple[Literals, str, Shape], list[tuple[int, ...]]] = {}
    sizes: dict[tuple[str, Shape], int] = {}
    for name, tensor in tensors.items():
        parts = _NUMBER.split(name)
        kind = (tensor.dtype.name, tensor.shape)
        if kind not in sizes:
            sizes[kind] = tensor.nbytes
        groups.setdefault((tuple(parts[::2]), *kind), []).append(tuple(map(int, parts[1::2])))
    rows: list[Fold] = []
    for (literals, dtype, shape), members in groups.items():
        for product in products(members):
            count = prod(map(len, product))
            rows.append(Fold(_spell(literals, product), count, dtype, shape, count * sizes[dtype, shape]))
    return rows


def products(members: Iterable[tuple[int, ...]]) -> list[tuple[Numbers, ...]]:
    """Cut a set of number tuples into few products of sets, each tuple in exactly one of them.

    >>> [[sorted(s) for s in p] for p in products([(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)])]
    [[[0, 1], [0, 1]], [[2], [0]]]
    """
    # From the last axis on, numbers that go with the same rest become a set. A row is (numbers, sets behind them).
    rows: list[tuple[tuple[int, ...], tuple[Numbers, ...]]] = [(member, ()) for member in dict.fromkeys(members)]
    for _ in range(len(rows[0][0]) if rows else 0):
        merged: dict[tuple[tuple[int, ...], tuple[Numbers, ...]], list[int]] = {}
        for numbers, sets in rows:
            merged.setdefault((numbers[:-1], sets), []).append(numbers[-1])
        rows = [(numbers, (frozenset(held), *sets)) for (numbers, sets), held in merged.items()]
    return [sets for _, sets in rows]


def span(numbers: Iterable[int]) -> str:
    """A set of numbers, runs shortened.

    >>> span([0, 1, 2, 3, 7, 9, 10])
    '0..3,7,9,10'
    """
    runs: list[list[int]] = []
    for n in sorted(numbers):
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ",".join(str(a) if a == b else f"{a},{b}" if b == a + 1 and len(runs) > 1 else f"{a}..{b}" for a, b in runs)


def _spell(literals: Literals, product: tuple[Numbers, ...]) -> str:
    words = [literals[0]]
    for numbers, literal in zip(product, literals[1:], strict=True):
        words += [str(next(iter(numbers))) if len(numbers) == 1 else "{" + span(numbers) + "}", literal]
    return "".join(words)
