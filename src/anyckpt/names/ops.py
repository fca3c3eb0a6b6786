"""Bijections between how two families store the same weight: what a row of an architecture table carries.

`forward` makes the other family's one tensor from the Hugging Face tensors of the row, `inverse` gives those back;
applied one after the other they give every bit back. All are lazy: they build descriptions (`core.ops`).
`moves_only`: only moves elements, and so applies to optimizer moments as it does to the weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from anyckpt.core import ops
from anyckpt.core.dtypes import DTYPES
from anyckpt.core.tensor import Tensor

Config = Mapping[str, Any]
"""The Hugging Face `config.json` of the model."""


@dataclass(frozen=True, slots=True)
class Bijection:
    """`forward(tensors, config) -> tensor`, `inverse(tensor, config) -> tensors`, in the order of the row's names."""

    name: str
    forward: Callable[[Sequence[Tensor], Config], Tensor]
    inverse: Callable[[Tensor, Config], list[Tensor]]
    moves_only: bool = True


@dataclass(frozen=True, slots=True)
class Parting:
    """One Hugging Face tensor that the other family holds as several."""

    name: str
    split: Callable[[Tensor, Config], list[Tensor]]
    join: Callable[[Sequence[Tensor], Config], Tensor]


def _transposed(t: Tensor) -> Tensor:
    return ops.permute(t, (*range(t.ndim - 2), t.ndim - 1, t.ndim - 2))


SAME = Bijection("same", lambda ts, _: ts[0], lambda t, _: [t])
TRANSPOSE = Bijection("transpose", lambda ts, _: _transposed(ts[0]), lambda t, _: [_transposed(t)])


def heads_of(config: Config) -> tuple[int, int]:
    """Attention heads, and heads of keys and values."""
    n_heads = int(config["num_attention_heads"] if "num_attention_heads" in config else config["n_head"])
    return n_heads, int(config.get("num_key_value_heads") or n_heads)


def _interleaved(t: Tensor, n_heads: int) -> Tensor:
    """Rows of each head from halves (Hugging Face's rotary order) to pairs (Meta's and llama.cpp's)."""
    rest = t.shape[1:]
    halves = ops.reshape(t, (n_heads, 2, t.shape[0] // n_heads // 2, *rest))
    return ops.reshape(ops.permute(halves, (0, 2, 1, *range(3, 3 + len(rest)))), t.shape)


def _halved(t: Tensor, n_heads: int) -> Tensor:
    rest = t.shape[1:]
    pairs = ops.reshape(t, (n_heads, t.shape[0] // n_heads // 2, 2, *rest))
    return ops.reshape(ops.permute(pairs, (0, 2, 1, *range(3, 3 + len(rest)))), t.shape)


ROTARY_Q = Bijection(
    "rotary order of queries",
    lambda ts, c: _interleaved(ts[0], heads_of(c)[0]),
    lambda t, c: [_halved(t, heads_of(c)[0])],
)
ROTARY_K = Bijection(
    "rotary order of keys", lambda ts, c: _interleaved(ts[0], heads_of(c)[1]), lambda t, c: [_halved(t, heads_of(c)[1])]
)


def _plus(t: Tensor, constant: float) -> Tensor:
    """value + constant, in float32 where the type is narrower and not float16, as the official converter does."""
    wide = t if t.dtype.name in ("float16", "float32", "float64") else ops.cast(t, DTYPES["float32"])
    return Tensor(wide.dtype, wide.shape, op=ops.AddConstant(wide, constant))


PLUS_ONE = Bijection(
    "weight + 1", lambda ts, _: _plus(ts[0], 1.0), lambda t, _: [_plus(t, -1.0)], moves_only=False
)


def _stacked(ts: Sequence[Tensor]) -> Tensor:
    return ops.concat([ops.reshape(t, (1, *t.shape)) for t in ts], 0)


STACK = Bijection("experts in one", lambda ts, _: _stacked(ts), lambda t, _: [t[i] for i in range(t.shape[0])])


def _cut(t: Tensor, axis: int, sizes: Sequence[int]) -> list[Tensor]:
    """Consecutive parts along an axis."""
    out, at = [], 0
    for size in sizes:
        out.append(t[tuple([slice(None)] * axis + [slice(at, at + size)])])
        at += size
    return out


GATE_UP = Parting(
    "gate and up",
    lambda t, _: _cut(t, t.ndim - 2, [t.shape[-2] // 2] * 2),
    lambda ts, _: ops.concat(ts, ts[0].ndim - 2),
)


def _split_kv_b(t: Tensor, config: Config) -> list[Tensor]:
    n_heads, sizes = heads_of(config)[0], [int(config["qk_nope_head_dim"]), int(config["v_head_dim"])]
    k, v = _cut(ops.reshape(t, (n_heads, sum(sizes), t.shape[-1])), 1, sizes)
    return [ops.permute(k, (0, 2, 1)), v]


def _join_kv_b(ts: Sequence[Tensor], config: Config) -> Tensor:
    joined = ops.concat([ops.permute(ts[0], (0, 2, 1)), ts[1]], 1)
    return ops.reshape(joined, (joined.shape[0] * joined.shape[1], joined.shape[2]))


KV_B = Parting("MLA's keys and values", _split_kv_b, _join_kv_b)
"""kv_b_proj [heads · (nope + v), rank] ↔ k_b [heads, rank, nope] and v_b [heads, v, rank] (llama.cpp since 4871)."""


def _groups(config: Config, rows: int) -> tuple[int, int, int]:
    """Query groups, query heads in each, rows of a head, of a fused query-key-value of so many rows."""
    n_heads, n_groups = heads_of(config)
    return n_groups, n_heads // n_groups, rows // (n_heads + 2 * n_groups)


def _interleave(ts: Sequence[Tensor], config: Config) -> Tensor:
    n_groups, n_queries, size = _groups(config, sum(t.shape[0] for t in ts))
    rest = ts[0].shape[1:]
    parts = [ops.reshape(t, (n_groups, n * size, *rest)) for t, n in zip(ts, (n_queries, 1, 1), strict=True)]
    return ops.reshape(ops.concat(parts, 1), (n_groups * (n_queries + 2) * size, *rest))


def _deinterleave(t: Tensor, config: Config) -> list[Tensor]:
    n_groups, n_queries, size = _groups(config, t.shape[0])
    rest = t.shape[1:]
    grouped = ops.reshape(t, (n_groups, (n_queries + 2) * size, *rest))
    parts = _cut(grouped, 1, [n_queries * size, size, size])
    return [ops.reshape(p, (n_groups * p.shape[1], *rest)) for p in parts]


QKV = Bijection("query groups", _interleave, _deinterleave)
"""q, k, v ↔ Megatron's rows: for each query group its query heads, one key head, one value head."""

GATED = Bijection(
    "gate over up", lambda ts, _: ops.concat(ts, 0), lambda t, _: _cut(t, 0, [t.shape[0] // 2] * 2)
)
"""gate_proj, up_proj ↔ one matrix with the gate's rows first."""


def _split_thirds(t: Tensor, config: Config) -> list[Tensor]:
    return _cut(t, 0, [t.shape[0] // 3] * 3)


QKV_TRANSPOSED = Bijection(
    "fused query-key-value, transposed",
    lambda ts, c: _interleave(_split_thirds(_rows_first(ts[0]), c), c),
    lambda t, c: [_rows_first(ops.concat(_deinterleave(t, c), 0))],
)
"""GPT-2's c_attn [in, q; k; v] ↔ Megatron's rows by heads."""


def _rows_first(t: Tensor) -> Tensor:
    return _transposed(t) if t.ndim == 2 else t
