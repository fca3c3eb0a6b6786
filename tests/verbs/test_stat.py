"""Statistics agree with numpy in float64, whatever the type and however the tensor is cut."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anyckpt.core.checkpoint import Checkpoint
from anyckpt.core.dtypes import DTYPES
from anyckpt.core.source import Absent
from anyckpt.core.tensor import from_array, from_source
from anyckpt.errors import UsageError
from anyckpt.verbs.stat import stat, statistics_of

TYPES = [np.float32, np.float16, np.float64, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.int64, np.int8, np.uint64,
         np.bool_]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(TYPES), st.integers(1, 400), st.integers(0, 2**32 - 1))
def test_numbers_agree_with_numpy(dtype: type, n: int, seed: int) -> None:
    values = (np.random.default_rng(seed).standard_normal(n) * 40).clip(0 if dtype is np.uint64 else -100).astype(dtype)
    wide = values.astype(np.float64)
    row = statistics_of("x", from_array(values))
    assert (row.min, row.max) == (wide.min(), wide.max())
    assert row.mean == pytest.approx(wide.mean(), rel=1e-12, abs=1e-12)
    assert row.std == pytest.approx(wide.std(), rel=1e-9, abs=1e-12)
    assert row.norm == pytest.approx(np.linalg.norm(wide), rel=1e-12)
    assert row.n_zeros == (wide == 0).sum()


def test_slabs_merge_without_loss_around_a_large_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    values = 1e9 + np.random.default_rng(1).standard_normal(5000)
    monkeypatch.setattr("anyckpt.verbs.reading.BLOCK", 17)
    row = statistics_of("x", from_array(values))
    assert row.std == pytest.approx(values.std(), rel=1e-6)


def test_what_is_not_finite_is_counted_and_left_out() -> None:
    row = statistics_of("x", from_array(np.array([1, np.nan, np.inf, -np.inf, 3, 0], np.float32)))
    assert (row.n_nan, row.n_infinite, row.n_zeros) == (1, 2, 1)
    assert (row.min, row.max, row.mean) == (0, 3, pytest.approx(4 / 3))
    nothing = statistics_of("x", from_array(np.array([np.nan], np.float32)))
    assert nothing.mean is None
    assert nothing.is_read


def test_exact_integers_and_huge_floats() -> None:
    assert statistics_of("x", from_array(np.array([2**63 - 1, 1]))).max == 2**63 - 1
    row = statistics_of("x", from_array(np.array([1e300, -1e300])))
    assert row.norm == pytest.approx(np.sqrt(2) * 1e300)
    json.dumps(row.as_dict(), allow_nan=False)


def test_types_without_values_and_tensors_without_data_are_told_as_not_read() -> None:
    raw = from_source(DTYPES["bits8"], (4,), Absent(4, "skipped"))
    assert not statistics_of("x", raw).is_read
    assert statistics_of("x", from_array(np.zeros((0, 3), np.float32))).norm is None


def test_a_whole_file(data: Path) -> None:
    found = stat(data / "trainer" / "checkpoint.pt", state=True)
    assert {row.name for row in found.tensors} >= {"model.norm.weight", "model.norm.weight/exp_avg"}
    once = stat(data / "trainer" / "checkpoint.pt", names=["model.embed*"])
    assert [row.name for row in once.tensors] == ["model.embed_tokens.weight"]
    assert found.norm > once.norm > 0
    with pytest.raises(UsageError, match="no tensor is called"):
        stat(Checkpoint("m", "m", {}), names=["x"])
