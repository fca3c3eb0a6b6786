"""Blocks of every ggml type: official bytes to official values bit for bit, and values to official bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anyckpt.core.dtypes import DTYPES
from anyckpt.core.ggml import native, op
from anyckpt.core.ggml.pack import PACKED_BY_NUMPY, pack, packer
from anyckpt.core.ggml.types import BLOCK_TYPES
from anyckpt.core.ggml.unpack import unpack
from anyckpt.core.tensor import from_array
from anyckpt.errors import CheckpointError, UsageError

Vectors = dict[str, np.ndarray[Any, Any]]
MISPLACED = 7
"""The row of scattered zeros, where ggml's IQ3_S encoder writes values to the wrong places (`core.ggml.native`)."""


@pytest.fixture(scope="module")
def vectors(official: Path) -> Vectors:
    import anyckpt

    return {name: t.numpy() for name, t in anyckpt.open(official / "types" / "vectors.safetensors").weights.items()}


@pytest.fixture
def no_libgguf(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.OFF, "1")


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_official_bytes_give_the_official_values(name: str, vectors: Vectors) -> None:
    n = 0
    for suffix in ("", "@imatrix"):
        raw = vectors.get(f"{name.upper()}{suffix}/bytes")
        want = vectors.get(f"{name.upper()}{suffix}/values")
        if raw is None or want is None:
            continue
        assert unpack(name, raw, want.shape).tobytes() == want.tobytes()
        n += 1
    if not n:
        pytest.skip("no official vector of this type")


@pytest.mark.parametrize("name", sorted(PACKED_BY_NUMPY))
@pytest.mark.parametrize("suffix", ["", "@imatrix"])
def test_numpy_gives_the_official_bytes(name: str, suffix: str, vectors: Vectors) -> None:
    want = vectors.get(f"{name.upper()}{suffix}/bytes")
    if want is None:
        pytest.skip("no official vector of this type")
    with np.errstate(all="ignore"):
        got = packer(name)(vectors["x"], vectors["imatrix"] if suffix else None)
    rows = [r for r in range(len(want)) if not (name == "iq3_s" and r == MISPLACED)]
    assert np.array_equal(got[rows], want[rows])


def test_our_iq3_s_is_nearer_to_the_values_where_ggml_misplaces_them(vectors: Vectors) -> None:
    x, want = vectors["x"], vectors["IQ3_S/bytes"]
    got = pack("iq3_s", x)
    assert np.flatnonzero((got != want).any(axis=1)).tolist() == [MISPLACED]
    errors = [float(np.square(unpack("iq3_s", b, x.shape) - x)[MISPLACED].mean()) for b in (got, want)]
    assert errors[0] < errors[1]


@pytest.mark.parametrize("name", sorted(PACKED_BY_NUMPY & native.TYPES))
@pytest.mark.parametrize("weighted", [False, True])
def test_numpy_and_libgguf_give_the_same_bytes(
    name: str, weighted: bool, no_libgguf: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("libgguf", reason="the extra `gguf` is not installed")
    rng = np.random.default_rng(len(name))
    n = 4 if name == "iq3_s" else 24
    scales = rng.choice([1e-4, 0.02, 1, 300], (n, 1)).astype(np.float32)
    rows = rng.standard_normal((n, 512)).astype(np.float32) * scales
    rows[0, ::7] *= 40
    weights = rng.random(512).astype(np.float32) if weighted else None
    got = pack(name, rows, weights)
    monkeypatch.delenv(native.OFF)
    assert np.array_equal(got, pack(name, rows, weights))


@given(st.sampled_from(sorted(PACKED_BY_NUMPY - {"iq3_s"})), st.integers(0, 1 << 30), st.floats(1e-3, 1e3))
@settings(max_examples=60, deadline=None)
def test_values_come_back_within_the_step_of_their_type(name: str, seed: int, scale: float) -> None:
    rows = (np.random.default_rng(seed).standard_normal((2, 256)) * scale).astype(np.float32)
    back = unpack(name, pack(name, rows), rows.shape)
    coarse = {"q1_0": 1.0, "tq1_0": 1.0, "tq2_0": 1.0, "q2_0": 1.0, "q2_k": 0.5}.get(name, 0.3)
    assert np.abs(back - rows).max() <= coarse * np.abs(rows).max()


@pytest.mark.parametrize("name", ["q8_0", "q4_k", "q6_k"])
def test_a_quantized_tensor_gives_blocks_as_bytes_and_their_values_as_numbers(name: str) -> None:
    rows = np.random.default_rng(3).standard_normal((8, 512)).astype(np.float32)
    tensor = op.quantize(from_array(rows), DTYPES[name])
    assert np.array_equal(tensor.numpy(), unpack(name, pack(name, rows), rows.shape))
    assert tensor.tobytes() == pack(name, rows).tobytes()


def test_a_part_of_a_quantized_tensor_is_that_part_of_the_whole() -> None:
    rows = np.random.default_rng(4).standard_normal((6, 512)).astype(np.float32)
    values = op.dequantize(op.quantize(from_array(rows), DTYPES["q4_k"]))
    assert np.array_equal(values[2:5, 100:400].numpy(), values.numpy()[2:5, 100:400])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_no_numbers_are_not_quantized(bad: float) -> None:
    rows = np.zeros((1, 256), np.float32)
    rows[0, 9] = bad
    with pytest.raises(CheckpointError, match="NaN or infinite"):
        pack("q4_k", rows)


def test_a_scale_beyond_float16_is_refused() -> None:
    with pytest.raises(CheckpointError, match="scale"):
        pack("q8_0", np.full((1, 32), 1e9, np.float32))


def test_rows_must_be_whole_blocks() -> None:
    with pytest.raises(UsageError, match="whole blocks of 256"):
        op.quantize(from_array(np.zeros((2, 96), np.float32)), DTYPES["q4_k"])


def test_float16_does_not_silently_overflow() -> None:
    fits = from_array(np.array([65519.0, -65504.0], np.float32))
    assert op.narrow(fits).numpy().tolist() == [65504.0, -65504.0]
    with pytest.raises(CheckpointError, match="float16"):
        op.narrow(from_array(np.array([70000.0], np.float32))).numpy()
