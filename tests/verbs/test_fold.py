"""Folding: every tensor in exactly one row, and rows say what they fold."""

from __future__ import annotations

import re
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from anyckpt.core.dtypes import DTYPES
from anyckpt.core.tensor import Tensor
from anyckpt.verbs.fold import fold, products, span

F32, BF16 = DTYPES["float32"], DTYPES["bfloat16"]


def names(*tensors: tuple[str, tuple[int, ...]]) -> dict[str, Tensor]:
    return {name: Tensor(F32, shape) for name, shape in tensors}


def test_layers_and_experts_become_one_row() -> None:
    tensors = names(*((f"layers.{i}.experts.{j}.w1", (4, 8)) for i, j in product(range(32), range(8))))
    (row,) = fold(tensors)
    assert (row.name, row.count, row.nbytes) == ("layers.{0..31}.experts.{0..7}.w1", 256, 256 * 128)


def test_what_differs_in_shape_or_dtype_stays_apart() -> None:
    tensors = names(("h.0.w", (2,)), ("h.1.w", (2,)), ("h.2.w", (3,)), ("h.10.w", (2,)))
    tensors["h.3.w"] = Tensor(BF16, (2,))
    assert [(r.name, r.count) for r in fold(tensors)] == [("h.{0,1,10}.w", 3), ("h.2.w", 1), ("h.3.w", 1)]


def test_names_without_numbers_and_odd_names_are_themselves() -> None:
    odd = ["", "a..b", "w", "layer1.w", "x.007.w", "x.²", ".", "0"]
    assert [r.name for r in fold(names(*((n, (1,)) for n in odd)))] == odd


def test_runs_are_shortened() -> None:
    assert span([5]) == "5"
    assert span([0, 1]) == "0..1"
    assert span([0, 2, 3, 4, 8, 9]) == "0,2..4,8,9"


def unfold(name: str) -> list[str]:
    """Every name that a row stands for."""

    def numbers(text: str) -> list[str]:
        if not text.startswith("{"):
            return [text]
        out: list[str] = []
        for run in text[1:-1].split(","):
            first, _, last = run.partition("..")
            out += map(str, range(int(first), int(last or first) + 1))
        return out

    return [".".join(parts) for parts in product(*(numbers(s) for s in re.split(r"\.(?![.\d,]*\})", name)))]


@given(st.sets(st.tuples(st.integers(0, 5), st.sampled_from("ab"), st.integers(0, 3)), min_size=1))
def test_every_name_is_in_exactly_one_row(members: set[tuple[int, str, int]]) -> None:
    tensors = names(*((f"m.{i}.{word}.{j}.w", (2,)) for i, word, j in members))
    rows = fold(tensors)
    unfolded = [name for row in rows for name in unfold(row.name)]
    assert sorted(unfolded) == sorted(tensors)
    assert sum(row.count for row in rows) == len(tensors)
    assert sum(row.nbytes for row in rows) == sum(t.nbytes for t in tensors.values())


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 2)), min_size=1))
def test_products_cover_a_set_exactly(members: list[tuple[int, ...]]) -> None:
    covered = [member for row in products(members) for member in product(*row)]
    assert sorted(covered) == sorted(set(members))
