"""Showing values: numpy's indexing without eval, no more read than shown."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anyckpt.core.checkpoint import Checkpoint, Optimizer
from anyckpt.core.dtypes import DTYPES
from anyckpt.core.source import Foreign
from anyckpt.core.tensor import from_array, from_source
from anyckpt.errors import UsageError
from anyckpt.verbs.show import expand, parse_index, show

A = np.arange(24, dtype=np.int64).reshape(2, 3, 4)


def checkpoint(array: np.ndarray = A, name: str = "w") -> Checkpoint:
    return Checkpoint("m", "m", {name: from_array(array)})


@pytest.mark.parametrize(
    "text",
    ["0", "-1", ":", "0:1", "::2", "1:", ":-1", "..., -1", "0, ...", "..., 0:2", "0, 1, 2", "1, ..., 1:3", "..."],
)
def test_an_index_means_what_it_means_in_numpy(text: str) -> None:
    index = tuple(eval(f"np.s_[{text},]"))
    shown = show(checkpoint(), f"w[{text}]")
    assert shown.values == A[index].tolist()
    assert shown.shape == A[index].shape


@pytest.mark.parametrize(
    "text", ["a", "1.5", "0 1", "0:1:2:3", "..., ...", "0,,1", "(0)", "__import__('os')", "0,0,0,0"]
)
def test_anything_else_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError):
        show(checkpoint(), f"w[{text}]")


def test_a_step_below_one_and_an_index_out_of_range_are_told() -> None:
    for text in ("::-1", "2", "::0"):
        with pytest.raises(UsageError):
            show(checkpoint(), f"w[{text}]")


def test_ellipsis_may_stand_for_no_axis() -> None:
    assert expand(parse_index("0, ..., 1, 2"), 3) == (0, 1, 2)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=3))
def test_the_corners_of_a_large_tensor_are_its_own_values(shape: list[int]) -> None:
    array = np.arange(np.prod(shape)).reshape(shape)
    shown = show(checkpoint(array), "w", limit=1)

    def check(values: object, part: np.ndarray) -> None:
        if not isinstance(values, list):
            assert values == part
            return
        cut = values.index("…") if "…" in values else len(values)
        for i, value in enumerate(values[:cut]):
            check(value, part[i])
        for i, value in enumerate(reversed(values[cut + 1 :]), 1):
            check(value, part[-i])

    check(shown.values, array)
    assert shown.is_cut == (array.size > 1)


def test_a_large_tensor_is_not_read_whole() -> None:
    read = 0

    def reader(box):  # type: ignore[no-untyped-def]
        nonlocal read
        read += box.volume
        return np.zeros(box.shape, np.float32)

    tensor = from_source(DTYPES["float32"], (10**6, 10**6), Foreign(reader, 4 * 10**12))
    shown = show(Checkpoint("m", "m", {"w": tensor}), "w")
    assert shown.is_cut
    assert read == 36
    assert shown.text.count("…") == 7


def test_narrow_floats_show_their_shortest_decimal() -> None:
    shown = show(checkpoint(np.array([0.1, 0.5], np.float32)), "w")
    assert shown.values == [0.1, 0.5]
    assert show(checkpoint(np.array([0.1], ml_dtypes.bfloat16)), "w").values == [0.100097656]


def test_names_are_found_in_weights_slots_and_state_and_nearest_told() -> None:
    one = from_array(np.float32([1, 2]))
    full = Checkpoint(
        "m", "m", {"a.fc.weight": one, "x[0]": one}, optimizer=Optimizer({"exp_avg": {"a.fc.weight": one}}),
        state={"ema": {"w": from_array(np.float32([7]))}},
    )
    assert show(full, "a.fc.weight/exp_avg[1]").values == 2.0
    assert show(full, "ema/w").values == [7.0]
    assert show(full, "fc.weight").name == "a.fc.weight"
    assert show(full, "x[0]").values == [1.0, 2.0]
    with pytest.raises(UsageError, match="no tensor is called") as error:
        show(full, "a.fc.wieght")
    assert "a.fc.weight" in error.value.hint


def test_types_without_values_show_their_bytes() -> None:
    raw = Checkpoint("m", "m", {"w": from_array(np.arange(4, dtype=np.uint8), DTYPES["bits8"])})
    assert show(raw, "w").values == "00 01 02 03"
