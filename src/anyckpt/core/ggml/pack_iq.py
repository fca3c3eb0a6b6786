"""Encoders of IQ4_NL, IQ4_XS and IQ3_S: quants chosen from a table or a code book; layouts in `unpack.py`."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from anyckpt.core.ggml.grids import codes, grid
from anyckpt.core.ggml.pack import (
    F32,
    columns_of,
    extreme,
    halves,
    inverse,
    join_nibbles,
    nearest,
    spread,
    total,
)
from anyckpt.core.ggml.search import EPSILON
from anyckpt.core.ggml.unpack import IQ4_VALUES

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]

VALUES = IQ4_VALUES.astype(F32)
MIDDLES = (VALUES[1:] + VALUES[:-1]) / F32(2)  # exact: sums of two small integers, halved
N_TRIES = 7


def _index(x: Array) -> Array:
    """Index of the table's value next to each x; a tie goes to the larger."""
    return np.searchsorted(MIDDLES, x, side="right").astype(np.uint8)


def _search_table(x: Array, w: Array) -> Array:
    """Scale per group for the non-linear table; 0 where the group is zeros."""
    value, magnitude = extreme(x)
    empty = magnitude < EPSILON

    def sums(reciprocal: Array) -> tuple[Array, Array]:
        q = VALUES[_index(reciprocal * x)]
        wq = w * q
        return total(wq * x), total(wq * q)

    sum_qx, sum_qq = sums(F32(1) / (-value / VALUES[0]))
    d = np.where(sum_qq > 0, sum_qx / sum_qq, F32(0))
    best = d * sum_qx
    for i in range(-N_TRIES, N_TRIES + 1):
        sum_qx, sum_qq = sums((F32(i) + VALUES[0]) / value)
        better = (sum_qq > 0) & (sum_qx * sum_qx > best * sum_qq)
        found = sum_qx / sum_qq
        d = np.where(better, found, d)
        best = np.where(better, found * sum_qx, best)
    return np.where(empty, F32(0), d)


def _importance(rows: Array, weights: Array | None, block: int) -> Array:
    """Per group of 32: squares, or weight · sqrt(2 · mean square of the block + value²)."""
    x = columns_of(rows, 32)
    if weights is None:
        return x * x
    blocks = columns_of(rows, block)
    sigma = total(blocks * blocks) * F32(2.0 / block)
    column_weights = spread(weights, rows, 32)
    return np.asarray(column_weights * np.sqrt(np.repeat(sigma, block // 32) + x * x))


def iq4_nl(rows: Array, weights: Array | None) -> Array:
    x = columns_of(rows, 32)
    d = _search_table(x, _importance(rows, weights, 32))
    q = _index(inverse(d) * x)
    return np.concatenate([halves(d), join_nibbles(np.ascontiguousarray(q.T))], axis=1).reshape(len(rows), -1)


def iq4_xs(rows: Array, weights: Array | None) -> Array:
    x = columns_of(rows, 32)
    scales = _search_table(x, _importance(rows, weights, 256)).reshape(-1, 8)
    at = np.abs(scales).argmax(axis=1)
    d = -scales[np.arange(len(scales)), at] / F32(32)
    steps = np.clip(nearest(inverse(d)[:, None] * scales), -32, 31)
    q = _index(inverse((d[:, None] * steps).reshape(-1)) * x)
    s = (steps + 32).astype(np.uint16)
    low = (s & 15).astype(np.uint8).reshape(-1, 4, 2)
    high = ((s >> 4) << np.arange(0, 16, 2, dtype=np.uint16)).sum(axis=1, dtype=np.uint16)
    quants = join_nibbles(np.ascontiguousarray(q.T)).reshape(-1, 128)
    fields = (halves(d), high.astype("<u2").view(np.uint8).reshape(-1, 2), low[..., 0] | low[..., 1] << 4, quants)
    return np.concatenate(fields, axis=1).reshape(len(rows), -1)


@cache
def _neighbours() -> tuple[Array, Array]:
    """For each of the 4096 codes of four 3-bit levels: its index on the grid or -1, and the grid points near it.

    Near are those of the three smallest distances, by distance, then index; rows are filled up with their last entry.
    """
    on_grid = np.full(4096, -1, np.int32)
    on_grid[codes("iq3s")] = np.arange(512)
    points = grid("iq3s").astype(np.int32)
    levels = 2 * (np.arange(4096)[:, None] >> np.array([0, 3, 6, 9]) & 7) + 1
    distances = ((levels[:, None, :] - points[None, :, :]) ** 2).sum(axis=2)
    order = np.argsort(distances * 512 + np.arange(512), axis=1)
    ranked = np.take_along_axis(distances, order, axis=1)
    shell = np.concatenate([np.zeros((4096, 1), int), np.cumsum(ranked[:, 1:] != ranked[:, :-1], axis=1)], axis=1)
    counts = (shell < 3).sum(axis=1)
    width = int(counts[on_grid < 0].max())
    near = order[:, :width].astype(np.int32)
    last = np.take_along_axis(near, np.minimum(counts - 1, width - 1)[:, None], axis=1)
    near = np.where(np.arange(width)[None, :] < counts[:, None], near, last)
    return on_grid, near


def _to_grid(level: Array, x: Array, root: Array, scale: Array) -> tuple[Array, Array]:
    """Levels [groups, 8, 4] moved onto the grid: (grid index [groups, 8], whether they were on it)."""
    on_grid, near = _neighbours()
    shifts = np.array([0, 3, 6, 9])
    code = (level.astype(np.int32) << shifts).sum(axis=2)
    index = on_grid[code]
    off = index < 0
    if off.any():
        group, _ = np.nonzero(off)
        options = near[code[off]]
        points = grid("iq3s")[options].astype(F32)
        difference = scale[group][:, None, None] * points - x[off][:, None, :]
        terms = root[off][:, None, :] * difference * difference
        cost = ((terms[..., 0] + terms[..., 1]) + terms[..., 2]) + terms[..., 3]
        index[off] = options[np.arange(len(options)), cost.argmin(axis=1)]
    return index, ~off


def iq3_s(rows: Array, weights: Array | None) -> Array:
    x = rows.reshape(-1, 32)
    negative = ~(x >= 0)
    size = np.where(negative, -x, x)
    w = np.ascontiguousarray(_importance(rows, weights, 256).T)
    root = np.sqrt(w).reshape(-1, 8, 4)
    by_four, flat = size.reshape(-1, 8, 4), columns_of(size, 32)
    w_flat = np.ascontiguousarray(w.T)
    high = size.max(axis=1)
    empty = high == 0
    points = grid("iq3s").astype(F32)

    def fit(index: Array) -> tuple[Array, Array]:
        q = np.ascontiguousarray(points[index].reshape(-1, 32).T)
        wq = w_flat * q
        return total(w_flat * flat * q), total(wq * q)

    def levels(reciprocal: Array) -> Array:
        found = nearest(F32(0.5) * (reciprocal[:, None, None] * by_four - F32(1)))
        return np.asarray(np.fmin(np.fmax(found, F32(0)), F32(7)))  # NaN, of groups of zeros, becomes 0

    best, scale = np.zeros(len(x), F32), high / F32(15)
    chosen, all_on = np.zeros((len(x), 8), np.int32), np.zeros(len(x), bool)
    for i in range(-9, 10):
        step = (F32(15) + F32(i) * F32(0.2)) / high
        index, on = _to_grid(levels(step), by_four, root, F32(1) / step)
        sum_qx, sum_qq = fit(index)
        better = (sum_qq > 0) & (sum_qx * sum_qx > best * sum_qq)
        found = sum_qx / sum_qq
        scale = np.where(better, found, scale)
        best = np.where(better, found * sum_qx, best)
        chosen[better] = index[better]
        all_on[better] = on[better].all(axis=1)
    again = ~all_on & (scale > 0) & ~empty
    if again.any():
        index, _ = _to_grid(levels(F32(1) / scale), by_four, root, scale)
        chosen[again] = index[again]
        sum_qx, sum_qq = fit(chosen)
        scale = np.where(again & (sum_qq > 0), sum_qx / sum_qq, scale)
    chosen[empty], scale = 0, np.where(empty, F32(0), scale)
    return _iq3_s_blocks(len(rows), chosen.reshape(-1, 64), negative.reshape(-1, 256), empty, scale.reshape(-1, 8))


def _iq3_s_blocks(n_rows: int, index: Array, negative: Array, empty: Array, scales: Array) -> Array:
    """Put blocks together from grid indices, signs and scales; groups of zeros leave their bytes zero."""
    negative = negative & ~np.repeat(empty.reshape(-1, 8), 32, axis=1)
    largest = scales.max(axis=1)
    d = largest / F32(31)
    s = np.clip(nearest(F32(0.5) * ((F32(1) / d)[:, None] * scales - F32(1))), 0, 15)
    nothing = largest == 0
    s = np.where(nothing[:, None], F32(0), s).astype(np.uint8).reshape(-1, 4, 2)
    fields = (
        halves(np.where(nothing, F32(0), d * F32(1.033))), (index & 255).astype(np.uint8),
        np.packbits((index >> 8).astype(np.uint8), axis=1, bitorder="little"),
        np.packbits(negative, axis=1, bitorder="little"), s[..., 0] | s[..., 1] << 4,
    )  # fmt: skip
    return np.concatenate(fields, axis=1).reshape(n_rows, -1)
