"""numpy files: equal to what numpy loads, headers read without evaluating them, pickles inside judged."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyckpt.errors import CheckpointError
from anyckpt.finding import Report
from anyckpt.formats.numpy import npy
from anyckpt.formats.numpy.npy import parse_literal
from anyckpt.io.view import MemoryFile

literals = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**6), 10**6) | st.text("abc<|4 _", max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text("abc", max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(literals)
def test_a_literal_means_what_python_takes_it_for(value: Any) -> None:
    assert parse_literal(repr(value)) == ast.literal_eval(repr(value))


@pytest.mark.parametrize(
    "text",
    ["", "{", "{'a' 1}", "[1 2]", "(1)(2)", "__import__('os')", "1.5", "{'a': 1, 'a': 2}", "'\\x41'", "(" * 99, "a"],
)
def test_what_is_no_literal_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_literal(text)


@pytest.mark.parametrize("dtype", ["<f4", ">f4", "<f2", ">i8", "|b1", "|u1", "<c8", ">c16", "<u4"])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("shape", [(3, 4, 2), (5,), (), (0, 2)])
def test_arrays_are_those_that_numpy_loads(dtype: str, order: Any, shape: Any, tmp_path: Path, read: Any) -> None:
    array = np.asarray(np.arange(24)[: int(np.prod(shape))].reshape(shape), dtype=dtype, order=order)
    np.save(tmp_path / "a.npy", array)
    checkpoint, report = read(tmp_path / "a.npy")
    assert not report.findings
    assert np.array_equal(checkpoint.weights["array"].numpy(), array)


def test_an_archive_gives_its_arrays_by_name(tmp_path: Path, read: Any, codes: Any) -> None:
    arrays = {"w": np.arange(6.0).reshape(2, 3), "b": np.float32([1, 2])}
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "a.npz", **arrays, names=np.array(["x", "y"]))
        checkpoint, _ = read(tmp_path / "a.npz")
        assert set(checkpoint.weights) == {"w", "b"}
        assert all(np.array_equal(checkpoint.weights[n].numpy(), a) for n, a in arrays.items())
        assert "names" in checkpoint.state
        assert "crc-mismatch" not in codes(tmp_path / "a.npz")


def test_bfloat16_of_ml_dtypes_is_kept_as_bits(tmp_path: Path, read: Any) -> None:
    import ml_dtypes

    array = np.ones(3, ml_dtypes.bfloat16)
    np.save(tmp_path / "a.npy", array)
    tensor = read(tmp_path / "a.npy")[0].weights["array"]
    assert (tensor.dtype.name, tensor.tobytes()) == ("bits16", array.tobytes())


def header(text: str, data: bytes = b"", version: int = 1) -> bytes:
    n = len(text).to_bytes(2 if version == 1 else 4, "little")
    return b"\x93NUMPY" + bytes([version, 0]) + n + text.encode() + data


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (header("{'descr': '<f4', 'fortran_order': False, 'shape': (4,)}", bytes(15)), "truncated"),
        (header("{'descr': '<f4', 'fortran_order': False, 'shape': (-4,)}"), "negative-size"),
        (header("{'descr': '<f4', 'fortran_order': 0, 'shape': (4,)}"), "bad-header"),
        (header("{'descr': '<f4', 'fortran_order': False, 'shape': (4,), 'x': 1}"), "bad-header"),
        (header("(" * 3000), "bad-header"),
        (header("{}", version=9), "unsupported-version"),
        (b"\x93NUMPY\x02\0\xff\xff\xff\xff{}", "truncated"),
        (b"\x93NUM", "truncated"),
    ],
)
def test_a_broken_file_has_its_word(data: bytes, code: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        npy.read(MemoryFile("a.npy", data), Report())
    assert caught.value.finding.code == code


def test_object_arrays_are_judged_and_never_loaded(tmp_path: Path, read: Any) -> None:
    np.save(tmp_path / "a.npy", np.array([{"a": 1}], object), allow_pickle=True)
    checkpoint, report = read(tmp_path / "a.npy")
    assert report.verdict == "safe"
    assert not checkpoint.weights
    evil = header("{'descr': '|O', 'fortran_order': False, 'shape': (1,)}", b"\x80\x02cos\nsystem\nX\x01\0\0\0x\x85R.")
    (tmp_path / "b.npy").write_bytes(evil)
    assert read(tmp_path / "b.npy")[1].verdict == "dangerous"
