"""Operations and reading, against numpy on whole arrays, for any box."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyckpt.core import kernels, ops
from anyckpt.core import read as reading
from anyckpt.core.box import Box
from anyckpt.core.dtypes import DTYPES
from anyckpt.core.source import Absent, Inline, Span
from anyckpt.core.tensor import Piece, Tensor, filled, from_array, from_source
from anyckpt.errors import CheckpointError, UsageError

F32 = DTYPES["float32"]


@dataclass(frozen=True, eq=False)
class Memory:
    """A file in memory that counts what is read of it."""

    data: bytes
    name: str = "memory"

    @property
    def size(self) -> int:
        return len(self.data)

    def read(self, offset: int, length: int) -> bytes:
        return self.data[offset : offset + length]

    def readinto(self, offset: int, buffer: memoryview) -> None:
        buffer[:] = self.data[offset : offset + len(buffer)]

    def on_disk(self) -> None:
        return None

    def fileno(self) -> None:
        return None


def arange(*shape: int) -> np.ndarray[Any, Any]:
    return np.arange(prod(shape), dtype=np.float32).reshape(shape)


def check_boxes(tensor: Tensor, want: np.ndarray[Any, Any], data: st.DataObject) -> None:
    assert tensor.shape == want.shape
    np.testing.assert_array_equal(tensor.numpy(), want)
    edges = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in want.shape]
    box = Box(tuple(a for a, _ in edges), tuple(b for _, b in edges))
    if box.volume:
        np.testing.assert_array_equal(tensor.numpy(box), want[box.slices()])


shapes = st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple)


@given(shapes, st.data())
def test_moving_operations_equal_numpy_on_any_box(shape: tuple[int, ...], data: st.DataObject) -> None:
    array = arange(*shape)
    t, want = from_array(array), array
    for _ in range(data.draw(st.integers(1, 4))):
        kind = data.draw(st.sampled_from(["slice", "reshape", "permute", "concat"]))
        if kind == "slice":
            index = tuple(slice(data.draw(st.integers(0, n - 1)), n, data.draw(st.integers(1, 2))) for n in want.shape)
            t, want = t[index], want[index]
        elif kind == "reshape":
            shape = data.draw(st.sampled_from([(want.size,), (1, want.size), tuple(reversed(want.shape))]))
            t, want = ops.reshape(t, shape), want.reshape(shape)
        elif kind == "permute":
            axes = tuple(data.draw(st.permutations(range(want.ndim))))
            t, want = ops.permute(t, axes), want.transpose(axes)
        else:
            axis = data.draw(st.integers(0, want.ndim - 1))
            t, want = ops.concat([t, t], axis), np.concatenate([want, want], axis)
    check_boxes(t, want, data)


@given(shapes, st.data())
def test_strided_views_read_as_numpy_does(shape: tuple[int, ...], data: st.DataObject) -> None:
    strides = tuple(data.draw(st.integers(0, 7)) for _ in shape)
    extent = sum((n - 1) * s for n, s in zip(shape, strides)) + 1
    base = np.arange(extent, dtype=np.int32)
    want = np.lib.stride_tricks.as_strided(base, shape, tuple(4 * s for s in strides))
    file = Memory(base.tobytes())
    t = from_source(DTYPES["int32"], shape, Span(file, 0, file.size), strides)  # type: ignore[arg-type]
    check_boxes(t, want, data)


@given(st.data())
def test_scattered_reads_cut_into_blocks_equal_one_read(data: st.DataObject) -> None:
    array = arange(17, 13, 5)
    file = Memory(array.tobytes())
    t = from_source(F32, (5, 17, 13), Span(file, 0, file.size), (1, 65, 5))  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "BLOCK", data.draw(st.integers(4, 900)))
        patch.setattr(reading, "SMALL", data.draw(st.integers(4, 200)))
        check_boxes(t, array.transpose(2, 0, 1), data)


@given(shapes, st.data())
def test_pieces_of_a_grid_make_the_whole(shape: tuple[int, ...], data: st.DataObject) -> None:
    array = arange(*shape)
    axis = data.draw(st.integers(0, len(shape) - 1))
    cut = data.draw(st.integers(0, shape[axis]))
    pieces = []
    for a, b in ((0, cut), (cut, shape[axis])):
        if a < b:
            start = tuple(a if i == axis else 0 for i in range(len(shape)))
            stop = tuple(b if i == axis else n for i, n in enumerate(shape))
            box = Box(start, stop)
            pieces.append(Piece(Inline(array[box.slices()].tobytes()), box))
    check_boxes(Tensor(F32, shape, tuple(pieces)), array, data)


def test_a_hole_between_pieces_is_an_error_not_zeros() -> None:
    half = Tensor(F32, (4,), (Piece(Inline(bytes(8)), Box((0,), (2,))),))
    with pytest.raises(CheckpointError, match="in no piece"):
        half.numpy()


def test_values_never_saved_are_an_error_not_zeros() -> None:
    meta = from_source(F32, (4,), Absent(16, "a meta tensor"))
    assert not meta.is_stored
    with pytest.raises(CheckpointError, match="never saved"):
        meta.numpy()


def test_the_other_byte_order_is_turned_for_complex_numbers_by_halves() -> None:
    want = np.array([1 + 2j, -3.5j], np.complex64)
    file = Memory(want.astype(">c8").tobytes())
    t = from_source(DTYPES["complex64"], (2,), Span(file, 0, 16, swap=4))  # type: ignore[arg-type]
    np.testing.assert_array_equal(t.numpy(), want)


def test_fill_repeats_one_element_and_packed_types_give_their_bytes() -> None:
    t = filled(DTYPES["bfloat16"], (2, 3), b"\x80\x3f")
    np.testing.assert_array_equal(t.numpy(), np.ones((2, 3), ml_dtypes.bfloat16))
    packed = from_source(DTYPES["float4_e2m1fn"], (2, 4), Inline(b"\x12\x34\x56\x78"))
    assert packed.nbytes == 4
    assert packed.tobytes() == b"\x12\x34\x56\x78"
    assert packed[1].tobytes() == b"\x56\x78"
    odd = from_source(DTYPES["float4_e2m1fn"], (3,), Inline(b"\x12\x34"))
    assert odd.tobytes() == b"\x12\x34"


def test_steps_and_bounds_of_an_index_are_checked() -> None:
    t = from_array(arange(4, 5))
    assert t[1].shape == (5,)
    assert t[-1, 2].shape == ()
    for bad in (4, (0, 0, 0), slice(None, None, -1)):
        with pytest.raises(UsageError):
            t[bad]  # type: ignore[index]
    assert t[2:2].numpy().shape == (0, 5)


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float64", "int32", "bool"])
def test_casts_equal_the_generic_conversion(name: str) -> None:
    rng = np.random.default_rng(0)
    values = np.concatenate([rng.normal(size=4000), [0, -0.0, 1.5, 65504, 3e-8]]).astype(np.float32)
    got = kernels.cast(values, DTYPES[name])
    assert got.tobytes() == values.astype(DTYPES[name].numpy_dtype()).tobytes()


@pytest.mark.parametrize(("source", "target"), [("bfloat16", "float16"), ("float16", "bfloat16")])
def test_every_16_bit_value_is_cast_as_the_generic_conversion_does(source: str, target: str) -> None:
    every = np.tile(np.arange(1 << 16, dtype=np.uint16), 2).view(DTYPES[source].numpy_dtype())
    with np.errstate(over="ignore", invalid="ignore"):
        want = every.astype(DTYPES[target].numpy_dtype())
    got = kernels.cast(every.reshape(2, -1), DTYPES[target])
    assert got.dtype == want.dtype
    assert got.tobytes() == want.tobytes()


def test_bfloat16_rounds_to_nearest_even_and_keeps_nan_and_infinity() -> None:
    bits = np.array([0x3F808000, 0x3F818000, 0x7F800000, 0xFF800000, 0x7F800001, 0x7F7FFFFF, 0x00000001], np.uint32)
    got = kernels.cast(bits.view(np.float32), DTYPES["bfloat16"]).view(np.uint16)
    assert got[:4].tolist() == [0x3F80, 0x3F82, 0x7F80, 0xFF80]
    assert np.isnan(got[4:5].view(ml_dtypes.bfloat16).astype(np.float32))[0]
    assert got[5:].tolist() == [0x7F80, 0x0000]


@given(st.integers(0, 3), st.data())
def test_low_rank_updates_are_the_same_for_a_part_as_for_the_whole(seed: int, data: st.DataObject) -> None:
    rng = np.random.default_rng(seed)
    w, a, b = (rng.normal(size=s).astype(np.float32) for s in ((6, 5), (2, 5), (6, 2)))
    m = rng.normal(size=6).astype(np.float32)
    for transposed in (False, True):
        for magnitude in (None, from_array(m)):
            base = from_array(w.T if transposed else w)
            op = ops.Lora(base, from_array(a), from_array(b), 2.0, transposed, magnitude)
            merged = w + 2 * (b @ a)
            if magnitude is not None:
                merged = m[:, None] * merged / np.linalg.norm(merged, axis=1, keepdims=True)
            want = merged.T if transposed else merged
            got = Tensor(F32, base.shape, op=op)
            np.testing.assert_allclose(got.numpy(), want, rtol=1e-5)
            part = got.numpy(Box((1, 2), (4, 4)))
            np.testing.assert_allclose(part, want[1:4, 2:4], rtol=1e-5)


def test_weight_norm_scales_rows_to_g() -> None:
    rng = np.random.default_rng(1)
    v, g = rng.normal(size=(4, 3, 2)).astype(np.float32), rng.normal(size=(4, 1, 1)).astype(np.float32)
    want = g * v / np.sqrt((v * v).sum(axis=(1, 2), keepdims=True))
    t = Tensor(F32, v.shape, op=ops.WeightNorm(from_array(g), from_array(v), 0))
    np.testing.assert_allclose(t.numpy(), want, rtol=1e-6)
    np.testing.assert_allclose(t.numpy(Box((1, 1, 0), (3, 2, 2))), want[1:3, 1:2], rtol=1e-6)


def test_dequantize_takes_scales_per_tensor_and_per_channel() -> None:
    q = np.arange(-6, 6, dtype=np.int8).reshape(3, 4)
    one = ops.Dequantize(from_array(q), from_array(np.array(0.5)), from_array(np.array(2)), None, F32)
    np.testing.assert_array_equal(Tensor(F32, (3, 4), op=one).numpy(), (q.astype(np.float32) - 2) * 0.5)
    scale, zero = np.array([1.0, 2.0, 4.0], np.float32), np.array([0, 1, -1])
    rows = ops.Dequantize(from_array(q), from_array(scale), from_array(zero), 0, F32)
    t = Tensor(F32, (3, 4), op=rows)
    want = (q - zero[:, None]) * scale[:, None]
    np.testing.assert_array_equal(t.numpy(), want)
    np.testing.assert_array_equal(t.numpy(Box((1, 1), (3, 3))), want[1:3, 1:3])
