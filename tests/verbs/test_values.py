"""The pass over values: what is not finite, what is zero, and a file whose tail was never written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from anyckpt.core.checkpoint import Checkpoint
from anyckpt.core.dtypes import DTYPES, of_numpy
from anyckpt.core.source import Inline, Span
from anyckpt.core.tensor import Piece, Tensor, from_array, from_source
from anyckpt.finding import Finding, Report
from anyckpt.io.local import open_local
from anyckpt.verbs.values import NOT_FINITE, check_values

Array = np.ndarray[Any, Any]


def check(weights: dict[str, Tensor]) -> list[Finding]:
    report = Report()
    check_values(Checkpoint("torch", "x.pt", weights), report, jobs=2)
    return report.findings


def in_file(path: Path, arrays: dict[str, Array], tail: bytes = b"") -> dict[str, Tensor]:
    path.write_bytes(b"head" + b"".join(a.tobytes() for a in arrays.values()) + tail)
    file, at, out = open_local(path), 4, {}
    for name, array in arrays.items():
        out[name] = from_source(of_numpy(array.dtype), array.shape, Span(file, at, array.nbytes))
        at += array.nbytes
    return out


@pytest.mark.parametrize("name", NOT_FINITE)
def test_nan_and_infinity_are_counted_in_every_type(name: str) -> None:
    dtype = DTYPES[name].numpy_dtype()
    bits = np.arange(256, dtype=np.uint8) if dtype.itemsize == 1 else None
    values = bits.view(dtype) if bits is not None else np.array([1, np.nan, -np.inf, np.inf, 0, -2]).astype(dtype)
    parts = values.view(values.real.dtype) if dtype.kind == "c" else values
    floats = parts.astype(np.float32) if dtype.itemsize < 4 else parts
    n_nan, n_infinite = int(np.isnan(floats).sum()), int(np.isinf(floats).sum())
    (finding,) = check({"w": from_array(values, DTYPES[name])})
    assert finding.code == "non-finite"
    assert (f"{n_nan} NaN" in finding.message) == bool(n_nan)
    assert (f"{n_infinite} infinite" in finding.message) == bool(n_infinite)


def test_ordinary_values_are_silent(tmp_path: Path) -> None:
    arrays = {"a": np.ones((300, 7), np.float32), "b": np.arange(9), "c": np.ones(3, ml_dtypes.bfloat16)}
    assert check(in_file(tmp_path / "f", arrays)) == []


def test_a_zero_matrix_is_a_warning_a_zero_bias_a_note() -> None:
    found = check({
        "w": from_array(np.zeros((2, 2), np.float32)), "b": from_array(np.zeros(2, np.float32)),
        "x": from_array(np.ones(2, np.float32)),
    })  # fmt: skip
    assert [(f.code, f.where, f.severity) for f in found] == [("all-zero", "w", "warning"), ("all-zero", "b", "note")]


def test_a_tail_that_begins_inside_a_tensor_is_an_error(tmp_path: Path) -> None:
    cut = np.ones(4000, np.float32)
    cut[1500:] = 0
    found = check(in_file(tmp_path / "f", {"a": np.ones(9, np.float32), "b": cut, "c": np.zeros(50, np.float32)}))
    assert [(f.code, f.severity) for f in found] == [("zero-tail", "error")]
    assert "10,200 zero bytes" in found[0].message


def test_a_tail_of_whole_tensors_is_a_warning_and_they_are_not_told_again(tmp_path: Path) -> None:
    zeros = np.zeros((30, 30), np.float32)
    found = check(in_file(tmp_path / "f", {"a": np.ones(9, np.float32), "b": zeros, "c": zeros}))
    assert [(f.code, f.severity) for f in found] == [("zero-tail", "warning")]


def test_one_zero_tensor_at_the_end_is_no_tail(tmp_path: Path) -> None:
    found = check(in_file(tmp_path / "f", {"a": np.ones(9, np.float32), "b": np.zeros((50, 50), np.float32)}))
    assert [f.code for f in found] == ["all-zero"]


def test_zeros_that_do_not_reach_the_end_of_the_file_are_no_tail(tmp_path: Path) -> None:
    zeros = np.zeros((50, 50), np.float32)
    found = check(in_file(tmp_path / "f", {"a": np.ones(9, np.float32), "b": zeros, "c": zeros}, b"directory"))
    assert {f.code for f in found} == {"all-zero"}


def test_a_view_that_repeats_its_bytes_is_read_once() -> None:
    stored = np.array([np.nan, 1], np.float32).tobytes()
    huge = Tensor(DTYPES["float32"], (1 << 40, 2), (Piece(Inline(stored), None, (0, 1)),))
    (finding,) = check({"w": huge})
    assert finding.message == "holds 1 NaN value"


def test_what_cannot_be_read_is_told_and_the_rest_is_read(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(bytes(10))
    lost = from_source(DTYPES["float32"], (4,), Span(open_local(path), 0, 16))
    found = check({"lost": lost, "w": from_array(np.array([np.inf, 1], np.float32))})
    assert [f.code for f in found] == ["truncated", "non-finite"]
    assert found[0].where.startswith("lost")
