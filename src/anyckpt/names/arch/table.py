"""What an architecture table is made of, and how names are looked up in it, in both directions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from anyckpt.names.ops import SAME, Bijection

Partition = Literal["replicated", "column", "row", "vocab", "qkv", "gate_up", "expert_column", "expert_row"]


@dataclass(frozen=True, slots=True)
class Rule:
    """One row of a column: `hf` tensors ↔ the other family's `name`, through `op`.

    Names are patterns: `{layer}` and `{expert}` stand for numbers. A pattern of `hf` with `{expert}` beside a `name`
    without it stands for the tensors of all experts, in order. `partition` is how tensor parallelism splits `name`.
    `optional`: models may lack it (biases).
    """

    hf: tuple[str, ...]
    name: str
    op: Bijection = SAME
    partition: Partition = "replicated"
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Architecture:
    """One model family. `model_types` and `architectures` are those of Hugging Face configs."""

    name: str
    model_types: tuple[str, ...]
    architectures: tuple[str, ...]
    gguf: tuple[Rule, ...] = ()
    megatron: tuple[Rule, ...] = ()
