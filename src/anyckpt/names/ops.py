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
from anyckpt.core.tensor import Tensor

Config = Mapping[str, Any]
"""The Hugging Face `config.json` of the model."""


@dataclass(frozen=True, slots=True)
class Bijection:
    """`forward(tensors, config) -> tensor` and `inverse(tensor, config) -> tensors`, in the order of the row's names."""

    name: str
    forward: Callable[[Sequence[Tensor], Config], Tensor]
    inverse: Callable[[Tensor, Config], list[Tensor]]
    moves_only: bool = True


def _transposed(t: Tensor) -> Tensor:
    return ops.permute(t, (*range(t.ndim - 2), t.ndim - 1, t.ndim - 2))


SAME = Bijection("same", lambda ts, _: ts[0], lambda t, _: [t])
TRANSPOSE = Bijection("transpose", lambda ts, _: _transposed(ts[0]), lambda t, _: [_transposed(t)])
