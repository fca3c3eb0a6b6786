"""Searches for the scale (and minimum) that a group of values is best quantized with, as ggml's `make_*_quants`.

Each tries a few scales and keeps the one of least weighted error. Arrays are (elements, groups). The quants themselves
are wanted only for the few groups whose scale vanishes later, so they are worked out again from what was best.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from anyckpt.core.ggml.pack import F32, extreme, nearest, total

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]

EPSILON = F32(1e-15)  # GROUP_MAX_EPS: groups of less than that are zeros
SMALL = F32(4e6)  # nearest() is plain rounding below


@dataclass(slots=True)
class Symmetric:
    """Scale without a minimum; quants are `offset` + round(x / step), or all `empty` where the group is zeros."""

    x: Array
    scale: Array
    step: Array  # the reciprocal that was best
    n_max: int
    is_empty: Array

    def quants(self, chosen: Array | slice = slice(None)) -> Array:
        """Quants [elements, groups], 0 … 2·n_max - 1, as float32."""
        q = np.clip(nearest(self.step[chosen] * self.x[:, chosen]), -self.n_max, self.n_max - 1) + F32(self.n_max)
        return np.asarray(np.where(self.is_empty[chosen], F32(0), q))


def symmetric(x: Array, n_max: int, weights: Array | None) -> Symmetric:
    """`make_qx_quants` of rmse type 1: without weights, the squares are the weights."""
    value, magnitude = extreme(x)
    empty = magnitude < EPSILON
    w = x * x if weights is None else weights
    wx = w * x
    step = F32(-n_max) / value

    def sums(reciprocal: Array) -> tuple[Array, Array]:
        q = np.multiply(reciprocal, x)
        np.rint(q, out=q)
        np.clip(q, -n_max, n_max - 1, out=q)
        wq = w * q
        np.multiply(wq, q, out=wq)
        np.multiply(wx, q, out=q)
        return total(q), total(wq)

    sum_xq, sum_qq = sums(step)
    scale = np.where(sum_qq != 0, sum_xq / sum_qq, F32(0))
    best = scale * sum_xq
    for i in range(-9, 10):
        if i == 0:
            continue
        reciprocal = -(F32(n_max) + F32(0.1) * F32(i)) / value
        sum_xq, sum_qq = sums(reciprocal)
        better = (sum_qq > 0) & (sum_xq * sum_xq > best * sum_qq)
        if better.any():
            found = sum_xq / sum_qq
            scale = np.where(better, found, scale)
            best = np.where(better, found * sum_xq, best)
            step = np.where(better, reciprocal, step)
    return Symmetric(x, np.where(empty, F32(0), scale), step, n_max, empty)


@dataclass(slots=True)
class WithMinimum:
    """Scale and minimum (as a positive number to subtract); quants are round((x - low) · step)."""

    x: Array
    scale: Array
    minimum: Array
    step: Array
    low: Array
    n_max: int
    is_flat: Array

    def quants(self, chosen: Array | slice = slice(None)) -> Array:
        """Quants [elements, groups], 0 … n_max, as float32."""
        t = self.step[chosen] * (self.x[:, chosen] - self.low[chosen])
        q = np.clip(nearest(t, small=False), 0, self.n_max)
        return np.where(self.is_flat[chosen], F32(0), q)


def scale_and_minimum(
    x: Array, w: Array, n_max: int, r_min: float, r_delta: float, n_steps: int, *, by_magnitude: bool = False
) -> WithMinimum:
    """`make_qkx2_quants`. `by_magnitude`: errors count by their size, not their square."""
    return _search(x, w, n_max, (r_min, r_delta, n_steps), by_magnitude=by_magnitude, careful=False)


def scale_and_minimum_weighted(x: Array, w: Array, n_max: int) -> WithMinimum:
    """`make_qkx3_quants` with the settings that every type gives it."""
    return _search(x, w, n_max, (-0.9, 0.05, 36), by_magnitude=False, careful=True)


def _search(
    x: Array, w: Array, n_max: int, steps: tuple[float, float, int], *, by_magnitude: bool, careful: bool
) -> WithMinimum:
    lowest, high = x.min(axis=0), x.max(axis=0)
    low = np.minimum(lowest, F32(0))
    sum_w = total(w)
    wx = w * x
    sum_x = total(wx)
    flat = high <= low if careful else high == low
    step = F32(n_max) / (high - low)
    scale = F32(1) / step
    q, scratch = np.empty_like(x), np.empty_like(x)
    first_step, first_low = step, low

    def quantize(reciprocal: Array, base: Array) -> None:
        np.subtract(x, base, out=q)
        np.multiply(reciprocal, q, out=q)
        if careful:  # v > 0 ? nearest(min(v, n_max)) : 0
            np.fmin(q, F32(n_max), out=q)
            np.fmax(q, F32(0), out=q)
            np.rint(q, out=q)
            return
        reach = np.abs(reciprocal) * np.maximum(np.abs(high - base), np.abs(lowest - base))
        q[...] = nearest(q, small=bool((reach < SMALL).all()))
        np.clip(q, 0, n_max, out=q)

    def error(with_scale: Array, with_low: Array) -> Array:
        np.multiply(with_scale, q, out=scratch)
        np.add(scratch, with_low, out=scratch)
        np.subtract(scratch, x, out=scratch)
        if by_magnitude:
            np.abs(scratch, out=scratch)
        else:
            np.multiply(scratch, scratch, out=scratch)
        np.multiply(w, scratch, out=scratch)
        return total(scratch)

    if careful:  # the first pass has no care: plain rounding, then clipped
        np.subtract(x, low, out=q)
        np.multiply(step, q, out=q)
        np.rint(q, out=q)
        np.clip(q, 0, n_max, out=q)
    else:
        quantize(step, low)
    best = error(scale, low)
    best_step, best_low, base = first_step, first_low, low
    r_min, r_delta, n_steps = steps
    for i in range(n_steps + 1):
        reciprocal = (F32(r_min) + F32(r_delta) * F32(i) + F32(n_max)) / (high - base)
        quantize(reciprocal, base)
        wq = np.multiply(w, q, out=scratch)
        sum_q = total(wq)
        sum_qx = total(wq * x)
        sum_qq = total(np.multiply(wq, q, out=scratch))
        d = sum_w * sum_qq - sum_q * sum_q
        this_scale = (sum_w * sum_qx - sum_x * sum_q) / d
        this_low = (sum_qq * sum_x - sum_q * sum_qx) / d
        positive = this_low > 0
        if positive.any():
            this_scale = np.where(positive, sum_qx / sum_qq, this_scale)
            this_low = np.where(positive, F32(0), this_low)
        found = error(this_scale, this_low)
        better = (d > 0) & (found < best)
        if better.any():
            best = np.where(better, found, best)
            best_step = np.where(better, reciprocal, best_step)
            best_low = np.where(better, base, best_low)
            scale = np.where(better, this_scale, scale)
            base = np.where(better, this_low, base)
    minimum = np.where(flat, -low, -base)
    return WithMinimum(x, np.where(flat, F32(0), scale), minimum, best_step, best_low, n_max, flat)


def descent(x: Array, n_max: int) -> tuple[Array, Array]:
    """`make_q3_quants`: scale, and quants [elements, groups] as float32, bettered one element at a time."""
    value, magnitude = extreme(x)
    empty = magnitude < EPSILON
    q = np.clip(nearest((F32(-n_max) / value) * x), -n_max, n_max - 1)
    w = x * x
    wx = w * x
    sum_xq, sum_qq = total(wx * q), total(w * q * q)
    for _ in range(5):
        changed = False
        for i in range(len(x)):
            rest = sum_xq - wx[i] * q[i]
            rest_qq = sum_qq - w[i] * q[i] * q[i]
            new = np.clip(nearest(x[i] * rest_qq / rest, small=False), -n_max, n_max - 1)
            with_new = rest + wx[i] * new
            with_new_qq = rest_qq + w[i] * new * new
            better = (rest > 0) & (new != q[i]) & (with_new_qq > 0)
            better &= with_new * with_new * sum_qq > sum_xq * sum_xq * with_new_qq
            if better.any():
                changed = True
                q[i] = np.where(better, new, q[i])
                sum_xq = np.where(better, with_new, sum_xq)
                sum_qq = np.where(better, with_new_qq, sum_qq)
        if not changed:
            break
    scale = np.where((sum_qq > 0) & ~empty, sum_xq / sum_qq, F32(0))
    return scale, np.where(empty, F32(0), q + F32(n_max))


def positive(x: Array, n_max: int, w: Array) -> tuple[Array, Array]:
    """`make_qp_quants` for scales that can't be negative: scale, and quants as float32."""
    high = np.maximum(x.max(axis=0), F32(0))
    empty = high < EPSILON
    step = F32(n_max) / high

    def error(reciprocal: Array, scale: Array, *, clipped: bool) -> Array:
        q = nearest(reciprocal * x)
        if clipped:
            q = np.minimum(q, n_max)
        difference = x - scale * q
        return total(w * difference * difference)

    best = error(step, F32(1) / step, clipped=False)
    for i in range(-4, 5):
        if i == 0:
            continue
        reciprocal = (F32(0.1) * F32(i) + F32(n_max)) / high
        found = error(reciprocal, F32(1) / reciprocal, clipped=True)
        better = found < best
        best = np.where(better, found, best)
        step = np.where(better, reciprocal, step)
    q = np.minimum(nearest(step * x), n_max)
    wx = w * x
    sum_xq, sum_qq = total(wx * q), total(w * q * q)
    for _ in range(5):
        changed = False
        for i in range(len(x)):
            rest = sum_xq - wx[i] * q[i]
            rest_qq = sum_qq - w[i] * q[i] * q[i]
            new = np.minimum(nearest(x[i] * rest_qq / rest, small=False), n_max)
            with_new = rest + wx[i] * new
            with_new_qq = rest_qq + w[i] * new * new
            better = (rest > 0) & (rest_qq > 0) & (new != q[i])
            better &= with_new * with_new * sum_qq > sum_xq * sum_xq * with_new_qq
            if better.any():
                changed = True
                q[i] = np.where(better, new, q[i])
                sum_xq = np.where(better, with_new, sum_xq)
                sum_qq = np.where(better, with_new_qq, sum_qq)
        if not changed:
            break
    scale = np.where((sum_qq > 0) & ~empty, sum_xq / sum_qq, F32(0))
    return scale, np.where(empty, F32(0), q)
