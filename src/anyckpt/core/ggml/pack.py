"""Bytes of blocks from values: float32 rows -> uint8, byte for byte what ggml's `quantize_*` writes on x86-64.

C sums one element after the other in float32, without fused multiply-add; here a pass works on an array of shape
(elements of a group, groups), whose sums along the first axis are the same chain of additions for every group. Rounding
is named as C has it: `nearest` is to even, `away` is `roundf`. Source: `ggml-quants.c`, llama.cpp build 11434.

`pack(name, rows, weights)` is the only function that others call. `weights` is the importance of each column.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from anyckpt.core.ggml.types import BLOCK_TYPES
from anyckpt.core.ggml.validate import bad_blocks
from anyckpt.finding import fail

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]

    Packer = Callable[[Array, Array | None], Array]
    """(rows [n, columns], weights [columns] or None) -> bytes [n, bytes of a row]"""

F32 = np.float32
CHUNK = 1 << 16  # values of one pass: the temporaries stay in the cache


def pack(name: str, rows: Array, weights: Array | None = None) -> Array:
    """Quantize `rows` (float32 [n, columns], columns whole blocks). Returns uint8 [n, bytes of a row].

    Raises CheckpointError [non-finite] where a value or a scale is no finite number, which no reader takes.
    """
    from anyckpt.core.ggml import native

    row = BLOCK_TYPES[name]
    n, columns = rows.shape
    out = np.empty((n, columns // row.block * row.n_bytes), np.uint8)
    if not out.size:
        return out
    if not (np.isfinite(rows.min()) and np.isfinite(rows.max())):
        raise fail("non-finite", "a value is NaN or infinite; it can't be quantized")
    fast = native.packer(name)
    with np.errstate(all="ignore"):
        if fast is None:
            _by_chunks(packer(name), rows, weights, out)
        else:
            out[...] = fast(name, rows, weights)
            if name == "iq3_s" and (wrong := native.misplaces(rows)).any():
                out[wrong] = packer(name)(rows[wrong], weights)
    if bad_blocks(out.reshape(-1, row.n_bytes), name).any():
        raise fail("non-finite", f"a block's scale is beyond what {name} can hold")
    return out


def _by_chunks(encode: Packer, rows: Array, weights: Array | None, out: Array) -> None:
    step = max(1, CHUNK // rows.shape[1])
    for i in range(0, len(rows), step):
        out[i : i + step] = encode(rows[i : i + step], weights)


def packer(name: str) -> Packer:
    """The numpy encoder of a type. Raises KeyError where there is none."""
    module, function = _PACKERS[name]
    found: Packer = getattr(import_module(f"anyckpt.core.ggml.{module}"), function)
    return found


_PACKERS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        **{name: ("pack_plain", name) for name in ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q1_0", "q2_0", "tq1_0",
                                                   "tq2_0", "mxfp4")},
        **{name: ("pack_k", name) for name in ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k")},
        **{name: ("pack_iq", name) for name in ("iq4_nl", "iq4_xs", "iq3_s")},
    }
)  # fmt: skip
PACKED_BY_NUMPY = frozenset(_PACKERS)
"""Types that can be written without any other package."""


# --- what all encoders use ---


def columns_of(rows: Array, width: int) -> Array:
    """(n, columns) -> (width, groups): element i of every group of `width` in row i."""
    return np.ascontiguousarray(rows.reshape(-1, width).T)


def spread(weights: Array | None, rows: Array, width: int) -> Array | None:
    """Column weights in the same form."""
    return None if weights is None else columns_of(np.broadcast_to(weights, rows.shape), width)


def total(values: Array) -> Array:
    """Sums along the first axis, one element after the other."""
    return np.asarray(np.add.reduce(values, axis=0))


def away(values: Array) -> Array:
    """roundf: halves away from zero."""
    whole = np.trunc(values)
    return np.asarray(whole + np.where(np.abs(values - whole) >= F32(0.5), np.copysign(F32(1), values), F32(0)))


def nearest(values: Array, *, small: bool = True) -> Array:
    """ggml's nearest_int, as float32: to even, and what its bit trick makes of numbers beyond 2^22 unless `small`."""
    if small:
        return np.asarray(np.rint(values))
    bits = (values + F32(12582912)).view(np.int32)
    return np.asarray(((bits & 0x007FFFFF) - 0x00400000).astype(F32))


def halves(values: Array) -> Array:
    """float32 (n,) -> the two bytes of its float16, (n, 2)."""
    return values.astype("<f2").view(np.uint8).reshape(-1, 2)


def half_values(values: Array) -> Array:
    """What a float32 is once it went through float16."""
    return values.astype(np.float16).astype(F32)


def inverse(values: Array) -> Array:
    """1 / value, 0 for 0."""
    return np.asarray(np.where(values != 0, F32(1) / values, F32(0)))


def join_nibbles(q: Array) -> Array:
    """(n, 2k) -> (n, k): low halves from the first k values, high halves from the rest."""
    half = q.shape[1] // 2
    return np.asarray(q[:, :half] | q[:, half:] << 4)


def fifth_bits(q: Array) -> Array:
    """(n, 32) of 5-bit quants -> the four bytes of their upper bits."""
    return np.packbits(q >> 4, axis=1, bitorder="little")


def extreme(x: Array) -> tuple[Array, Array]:
    """Per group: the first value of largest magnitude, and that magnitude."""
    magnitude = np.abs(x)
    at = magnitude.argmax(axis=0)
    index = np.arange(x.shape[1])
    return x[at, index], magnitude[at, index]


def rowwise_importance(rows: Array, weights: Array, width: int) -> Array:
    """Importance of a value among its row: weight · sqrt(mean square of the row + value²), in groups of `width`."""
    n = rows.shape[1]
    squares = rows * rows
    sigma = total(np.ascontiguousarray(squares.T)) / F32(n)
    return columns_of(weights * np.sqrt(sigma[:, None] + squares), width)
