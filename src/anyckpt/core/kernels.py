"""Arithmetic on arrays that operations are made of. numpy in, numpy out; no tensors, no files."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from anyckpt.core.dtypes import DType

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]


def cast(array: Array, dtype: DType) -> Array:
    """Values in another dtype, rounded to nearest even, as torch's `.to(dtype)`.

    float32 to bfloat16 is done on the bits, and between 16-bit types by a table: several times faster than the generic
    conversion.
    """
    target = dtype.numpy_dtype()
    if array.dtype == np.float32 and dtype.name == "bfloat16":
        return _float32_to_bfloat16(array)
    if array.dtype.itemsize == 2 and dtype.itemsize == 2 and dtype.kind == "float" and array.size >= 1 << 16:
        return np.take(_table(array.dtype, target), array.view(np.uint16))
    if dtype.kind == "bool":
        return np.asarray(array != 0)
    with np.errstate(over="ignore", invalid="ignore"):
        if array.dtype.kind == "c" and target.kind != "c":
            array = array.real
        return array.astype(target)


@lru_cache
def _table(source: np.dtype[Any], target: np.dtype[Any]) -> Array:
    """Every value of a 16-bit type in another: looking one up is several times faster than converting it."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.arange(1 << 16, dtype=np.uint16).view(source).astype(target)


def _float32_to_bfloat16(array: Array) -> Array:
    import ml_dtypes

    out = np.empty(array.shape, np.uint16)
    flat, result = np.ascontiguousarray(array).reshape(-1).view(np.uint32), out.reshape(-1)
    step = 1 << 18  # small enough that the temporaries stay in cache
    for i in range(0, flat.size, step):
        bits = flat[i : i + step]
        rounded = bits >> 16
        rounded &= 1
        rounded += 0x7FFF
        rounded += bits
        rounded >>= 16
        nan = (bits & 0x7FFFFFFF) > 0x7F800000
        if nan.any():  # rounding could carry a NaN's payload away; torch gives the quiet NaN
            rounded[nan] = 0x7FC0
        result[i : i + step] = rounded
    return out.view(ml_dtypes.bfloat16)


def dequantize(q: Array, scale: Array, zero_point: Array | None = None) -> Array:
    """(q - zero_point) · scale in float32 (float64 scales are used as they are, then rounded)."""
    shifted = q.astype(np.float64 if scale.dtype == np.float64 else np.float32)
    if zero_point is not None:
        shifted = shifted - zero_point
    return np.asarray(shifted * scale)


def densify(layout: str, parts: Sequence[Array], shape: tuple[int, ...]) -> Array:
    """A plain array from the parts of a torch sparse tensor; repeated coordinates of sparse_coo add up."""
    if layout == "sparse_coo":
        indices, values = parts
        out = np.zeros(shape, values.dtype)
        np.add.at(out, tuple(indices), values)
        return out
    compressed, plain, values = parts
    out = np.zeros(shape, values.dtype)
    batch = compressed.shape[:-1]
    by_row = layout in ("sparse_csr", "sparse_bsr")
    for at in np.ndindex(*batch):
        starts, minor, held = compressed[at], plain[at], values[at]
        major = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
        rows, columns = (major, minor) if by_row else (minor, major)
        if layout in ("sparse_csr", "sparse_csc"):
            out[at][rows, columns] = held
        else:
            height, width = held.shape[1], held.shape[2]
            for row, column, block in zip(rows, columns, held, strict=True):
                out[at][row * height : (row + 1) * height, column * width : (column + 1) * width] = block
    return out
