"""Encoders of the 32-value types, of the ternary ones and of the one- and two-bit ones; layouts are in `unpack.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from anyckpt.core.ggml.pack import (
    F32,
    away,
    columns_of,
    extreme,
    fifth_bits,
    halves,
    inverse,
    join_nibbles,
    rowwise_importance,
    total,
)
from anyckpt.core.ggml.search import scale_and_minimum_weighted, symmetric
from anyckpt.core.ggml.unpack import e8m0_half

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]


def _done(rows: Array, *fields: Array) -> Array:
    """Blocks put together from their fields, as rows."""
    return np.concatenate(fields, axis=1).reshape(len(rows), -1)


def _symmetric(rows: Array, weights: Array | None, levels: int) -> tuple[Array, Array]:
    """Scales and quants [blocks, 32] of Q4_0 (8 levels a side) and Q5_0 (16): d = extreme / -levels."""
    x = columns_of(rows, 32)
    if weights is not None:
        found = symmetric(x, levels, rowwise_importance(rows, weights, 32))
        return found.scale, found.quants().T.astype(np.uint8)
    value, _ = extreme(x)
    d = value / F32(-levels)
    q = np.minimum(np.trunc(x * inverse(d) + F32(levels + 0.5)), 2 * levels - 1)
    return d, q.T.astype(np.int8).view(np.uint8)


def _with_minimum(rows: Array, weights: Array | None, n_max: int) -> tuple[Array, Array, Array]:
    """Scales, minima and quants of Q4_1 (15) and Q5_1 (31)."""
    x = columns_of(rows, 32)
    if weights is not None:
        found = scale_and_minimum_weighted(x, rowwise_importance(rows, weights, 32), n_max)
        return found.scale, -found.minimum, found.quants().T.astype(np.uint8)
    low, high = x.min(axis=0), x.max(axis=0)
    d = (high - low) / F32(n_max)
    q = np.trunc((x - low) * inverse(d) + F32(0.5))
    if n_max == 15:
        q = np.minimum(q, 15)
    return d, low, q.T.astype(np.int16).astype(np.uint8)


def q4_0(rows: Array, weights: Array | None) -> Array:
    d, q = _symmetric(rows, weights, 8)
    return _done(rows, halves(d), join_nibbles(q))


def q5_0(rows: Array, weights: Array | None) -> Array:
    d, q = _symmetric(rows, weights, 16)
    return _done(rows, halves(d), fifth_bits(q), join_nibbles(q & 15))


def q4_1(rows: Array, weights: Array | None) -> Array:
    d, low, q = _with_minimum(rows, weights, 15)
    return _done(rows, halves(d), halves(low), join_nibbles(q))


def q5_1(rows: Array, weights: Array | None) -> Array:
    d, low, q = _with_minimum(rows, weights, 31)
    return _done(rows, halves(d), halves(low), fifth_bits(q), join_nibbles(q & 15))


def q8_0(rows: Array, weights: Array | None) -> Array:
    x = rows.reshape(-1, 32)
    d = np.abs(x).max(axis=1) / F32(127)
    q = away(x * inverse(d)[:, None]).astype(np.int8).view(np.uint8)
    return _done(rows, halves(d), q)


def q1_0(rows: Array, weights: Array | None) -> Array:
    x = columns_of(rows, 128)
    return _done(rows, halves(total(np.abs(x)) / F32(128)), np.packbits((x >= 0).T, axis=1, bitorder="little"))


def q2_0(rows: Array, weights: Array | None) -> Array:
    x = rows.reshape(-1, 64)
    d = np.abs(x).max(axis=1)
    q = np.clip(away(x * inverse(d)[:, None]) + 1, 0, 3).astype(np.uint8).reshape(-1, 16, 4)
    return _done(rows, halves(d), q[..., 0] | q[..., 1] << 2 | q[..., 2] << 4 | q[..., 3] << 6)


def _trits(rows: Array) -> tuple[Array, Array]:
    x = rows.reshape(-1, 256)
    d = np.abs(x).max(axis=1)
    return d, (away(x * inverse(d)[:, None]).astype(np.int8) + np.int8(1)).view(np.uint8)


def tq1_0(rows: Array, weights: Array | None) -> Array:
    d, q = _trits(rows)
    parts = []
    for start, stop, n in ((0, 160, 5), (160, 240, 5), (240, 256, 4)):
        digits = q[:, start:stop].reshape(len(q), n, -1).astype(np.uint16)
        byte = np.zeros((len(q), digits.shape[2]), np.uint16)
        for i in range(n):
            byte = byte * 3 + digits[:, i]
        if n == 4:
            byte = byte * 3
        parts.append(((byte * 256 + 242) // 243).astype(np.uint8))
    return _done(rows, *parts, halves(d))


def tq2_0(rows: Array, weights: Array | None) -> Array:
    d, q = _trits(rows)
    q = (q & 3).reshape(-1, 2, 4, 32)
    byte = q[:, :, 0] | q[:, :, 1] << 2 | q[:, :, 2] << 4 | q[:, :, 3] << 6
    return _done(rows, byte.reshape(-1, 64), halves(d))


_FP4 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], F32)


def mxfp4(rows: Array, weights: Array | None) -> Array:
    x = rows.reshape(-1, 32)
    largest = np.abs(x).max(axis=1)
    exponent = np.floor(np.log2(largest.astype(np.float64)).astype(F32)) + F32(125)
    e = np.where(largest > 0, exponent, F32(0)).astype(np.int32).astype(np.uint8)
    d = e8m0_half(e)[:, None]
    best = np.zeros(x.shape, np.uint8)
    least = np.abs(_FP4[0] * d - x)
    for i in range(1, 16):
        error = np.abs(_FP4[i] * d - x)
        better = error < least
        best[better] = i
        least = np.minimum(least, error)
    return _done(rows, e[:, None], join_nibbles(best))
