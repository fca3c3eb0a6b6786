"""Encoders of the K types: blocks of 256 values with scales of their own for every 16 or 32; layouts in `unpack.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from anyckpt.core.ggml.pack import F32, columns_of, half_values, halves, nearest, spread, total
from anyckpt.core.ggml.search import (
    EPSILON,
    Symmetric,
    WithMinimum,
    descent,
    positive,
    scale_and_minimum,
    scale_and_minimum_weighted,
    symmetric,
)

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]


def _done(rows: Array, *fields: Array) -> Array:
    return np.concatenate(fields, axis=1).reshape(len(rows), -1)


def _by_block(per_group: Array, n: int) -> Array:
    """(groups,) -> (blocks, n)."""
    return per_group.reshape(-1, n)


def _quants(
    x: Array, d: Array, low: Array | None, least: int, most: int, held: Symmetric | WithMinimum | Array
) -> Array:
    """Quants [groups, elements] for final scales `d` and minima; groups whose scale vanished keep what was searched."""
    t = x + low if low is not None else x
    t = t / d
    small = bool((np.abs(t) < F32(4e6)).all())
    q = np.clip(nearest(t, small=small), least, most) - least
    gone = np.flatnonzero(d == 0)
    if gone.size:
        q[:, gone] = held[:, gone] if isinstance(held, np.ndarray) else held.quants(gone)
    return np.ascontiguousarray(q.T).astype(np.uint8)


def pack_crumbs(q: Array) -> Array:
    """(n, 256) of 2 bits -> (n, 64)."""
    q = q.reshape(-1, 2, 4, 32)
    return np.asarray(q[:, :, 0] | q[:, :, 1] << 2 | q[:, :, 2] << 4 | q[:, :, 3] << 6).reshape(-1, 64)


def _pack_halves_of_64(q: Array) -> Array:
    """(n, 256) of 4 bits -> (n, 128)."""
    q = q.reshape(-1, 4, 2, 32)
    return np.asarray(q[:, :, 0] | q[:, :, 1] << 4).reshape(-1, 128)


def _by_eighths(bits: Array) -> Array:
    """(n, 256) of one bit -> (n, 32): bit k of byte l is value 32·k + l."""
    return np.packbits(bits.reshape(-1, 8, 32), axis=1, bitorder="little").reshape(-1, 32)


def _block_importance(rows: Array, weights: Array, width: int, factor: float) -> Array:
    """weight · sqrt(factor · mean square of the block + value²), in groups."""
    blocks = rows.reshape(-1, 256)
    squares = blocks * blocks
    sums = total(np.ascontiguousarray(squares.T))
    sigma = F32(factor) * sums / F32(256)
    importance = np.broadcast_to(weights, rows.shape).reshape(-1, 256) * np.sqrt(sigma[:, None] + squares)
    return columns_of(importance, width)


def _scaled(largest: Array, values: Array, levels: int) -> Array:
    """Scales [blocks, n] in units of the largest: nearest(levels / largest · scale), 0 where there is none."""
    unit = np.where(largest > 0, F32(levels) / largest, F32(0))
    return nearest(unit[:, None] * values)


def q2_k(rows: Array, weights: Array | None) -> Array:
    x = columns_of(rows, 16)
    if weights is None:
        found = scale_and_minimum(x, np.abs(x), 3, -0.5, 0.1, 15, by_magnitude=True)
        scales, lows = _by_block(found.scale, 16), _by_block(found.minimum, 16)
        most, deepest = np.maximum(scales.max(axis=1), 0), np.maximum(lows.max(axis=1), 0)
        s, m = _scaled(most, scales, 15), _scaled(deepest, lows, 15)
        d, d_min = most / F32(15), deepest / F32(15)
    else:
        w = _block_importance(rows, weights, 16, 1)
        found = scale_and_minimum_weighted(x, w, 3)
        d, d_min, s, m = _weighted_scales(found, total(w), 16, 15)
    packed = s.astype(np.uint8) | m.astype(np.uint8) << 4
    scale = half_values(d)[:, None] * (packed & 15).astype(F32)
    low = half_values(d_min)[:, None] * (packed >> 4).astype(F32)
    q = _quants(x, scale.reshape(-1), low.reshape(-1), 0, 3, found)
    return _done(rows, packed, pack_crumbs(q), halves(d), halves(d_min))


def _weighted_scales(found: WithMinimum, sums: Array, n: int, levels: int) -> tuple[Array, Array, Array, Array]:
    """Block scale and minimum and the groups' own, each searched in turn with the groups' importance."""
    w = np.ascontiguousarray(_by_block(sums, n).T)
    d, s = positive(np.ascontiguousarray(_by_block(found.scale, n).T), levels, w)
    d_min, m = positive(np.ascontiguousarray(_by_block(found.minimum, n).T), levels, w)
    return d, d_min, s.T, m.T


def _pack_scales_q3_k(s: Array) -> Array:
    """(n, 16) of 6 bits -> (n, 12)."""
    low, high = s & 15, s >> 4
    first = low[:, :8] | low[:, 8:] << 4
    last = high.reshape(-1, 4, 4)  # [t, i]: scale 4t + i in bits 2t of byte 8 + i
    packed = last[:, 0] | last[:, 1] << 2 | last[:, 2] << 4 | last[:, 3] << 6
    return np.concatenate([first, packed], axis=1)


def q3_k(rows: Array, weights: Array | None) -> Array:
    x = columns_of(rows, 16)
    if weights is None:
        scale, held = descent(x, 4)
        scales = _by_block(scale, 16)
        at = np.abs(scales).argmax(axis=1)
        largest = scales[np.arange(len(scales)), at]
        step = F32(-32) / largest
        s = np.clip(nearest(step[:, None] * scales).astype(np.int8), -32, 31) + 32
        s = np.where(largest[:, None] != 0, s, 0)
        d = np.where(largest != 0, F32(1) / step, F32(0))
    else:
        w = _block_importance(rows, weights, 16, 2)
        searched = symmetric(x, 4, w)
        held = searched.quants()
        groups = np.ascontiguousarray(_by_block(searched.scale, 16).T)
        chosen = symmetric(groups, 32, np.ascontiguousarray(_by_block(total(w), 16).T))
        d, s = chosen.scale, chosen.quants().T
    packed = s.astype(np.uint8)
    scale = half_values(d)[:, None] * (packed.astype(np.int8) - np.int8(32)).astype(F32)
    q = _quants(x, scale.reshape(-1), None, -4, 3, held).reshape(-1, 256)
    return _done(rows, _by_eighths(q >> 2), pack_crumbs(q & 3), _pack_scales_q3_k(packed), halves(d))


def _pack_scales_q4_k(s: Array, m: Array) -> Array:
    """Eight scales and eight minima of 6 bits -> (n, 12)."""
    first = s[:, :4] | s[:, 4:] >> 4 << 6
    second = m[:, :4] | m[:, 4:] >> 4 << 6
    third = (s[:, 4:] & 15) | (m[:, 4:] & 15) << 4
    return np.concatenate([first, second, third], axis=1)


def _five_or_four(rows: Array, weights: Array | None, n_max: int, steps: tuple[float, float, int]) -> tuple[Array, ...]:
    """Scale, minimum, packed scales and quants [blocks, 256] of Q4_K (15) and Q5_K (31)."""
    x = columns_of(rows, 32)
    if weights is None:
        root = np.sqrt(total(x * x) / F32(32))
        found = scale_and_minimum(x, root + np.abs(x), n_max, *steps)
        scales, lows = _by_block(found.scale, 8), _by_block(found.minimum, 8)
        most, deepest = np.maximum(scales.max(axis=1), 0), np.maximum(lows.max(axis=1), 0)
        s, m = _scaled(most, scales, 63), _scaled(deepest, lows, 63)
        d, d_min = most / F32(63), deepest / F32(63)
    else:
        w = _block_importance(rows, weights, 32, 2)
        found = scale_and_minimum_weighted(x, w, n_max)
        d, d_min, s, m = _weighted_scales(found, total(w), 8, 63)
    s8 = np.minimum(s.astype(np.int32).astype(np.uint8), 63)
    m8 = np.minimum(m.astype(np.int32).astype(np.uint8), 63)
    scale = half_values(d)[:, None] * s8.astype(F32)
    low = half_values(d_min)[:, None] * m8.astype(F32)
    q = _quants(x, scale.reshape(-1), low.reshape(-1), 0, n_max, found).reshape(-1, 256)
    return d, d_min, _pack_scales_q4_k(s8, m8), q


def q4_k(rows: Array, weights: Array | None) -> Array:
    d, d_min, scales, q = _five_or_four(rows, weights, 15, (-1.0, 0.1, 20))
    return _done(rows, halves(d), halves(d_min), scales, _pack_halves_of_64(q))


def q5_k(rows: Array, weights: Array | None) -> Array:
    d, d_min, scales, q = _five_or_four(rows, weights, 31, (-0.5, 0.1, 15))
    return _done(rows, halves(d), halves(d_min), scales, _by_eighths(q >> 4), _pack_halves_of_64(q & 15))


def q6_k(rows: Array, weights: Array | None) -> Array:
    x = columns_of(rows, 16)
    found = symmetric(x, 32, spread(weights, rows, 16))
    scales = _by_block(found.scale, 16)
    at = np.abs(scales).argmax(axis=1)
    largest = scales[np.arange(len(scales)), at]
    empty = np.abs(largest) < EPSILON
    step = F32(-128) / largest
    d = np.where(empty, F32(0), F32(1) / step)
    s = np.minimum(nearest(step[:, None] * scales), 127)
    s8 = np.where(empty[:, None], F32(0), s).astype(np.int8)
    scale = half_values(d)[:, None] * s8.astype(F32)
    q = _quants(x, scale.reshape(-1), None, -32, 31, found).reshape(-1, 2, 4, 32)
    q[empty] = 0
    low, high = q & 15, q >> 4
    ql = np.concatenate([low[:, :, 0] | low[:, :, 2] << 4, low[:, :, 1] | low[:, :, 3] << 4], axis=2).reshape(-1, 128)
    qh = high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6
    return _done(rows, ql, qh.reshape(-1, 64), s8.view(np.uint8), halves(d))
