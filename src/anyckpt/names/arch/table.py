"""What an architecture table is made of, and how names are looked up in it, in both directions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from anyckpt.names.ops import SAME, Bijection, Parting
from anyckpt.sharding.tp import Partition


@dataclass(frozen=True, slots=True)
class Rule:
    """One row of a column: `hf` tensors ↔ the other family's `name`, through `op`.

    Names are patterns: `{layer}` and `{expert}` stand for numbers. A pattern of `hf` with `{expert}` beside a `name`
    without it stands for the tensors of all experts, in order. `partition` is how tensor parallelism splits `name`.
    `optional`: models may lack it (biases).

    Where one Hugging Face tensor becomes several, the others are `also` and `parting` takes the place of `op`. Rules
    of one `together` are written in the table's order when the last of their tensors has come (a layer's experts).
    """

    hf: tuple[str, ...]
    name: str
    op: Bijection = SAME
    partition: Partition = "replicated"
    optional: bool = False
    also: tuple[str, ...] = ()
    parting: Parting | None = None
    together: str = ""


@dataclass(frozen=True, slots=True)
class Setting:
    """A property of a model in both configs: Hugging Face's key, Megatron's argument.

    `default`: without the key. `also`: a second key for the same, of other releases.
    """

    hf: str
    megatron: str
    default: Any = None
    also: str = ""


@dataclass(frozen=True, slots=True)
class Architecture:
    """One model family. `model_types` and `architectures` are those of Hugging Face configs.

    `prefix` stands before all names but those of heads, and is missing where the bare model was saved. `ignored` are
    globs of tensors that GGUF does not carry: buffers, poolers, tied heads.

    `settings` are the sizes of the model in both configs (`names.settings` has those of all decoders). `implied`:
    Megatron's arguments that every such model has, by which it is also recognised; `constants`: the same of its
    Hugging Face config.
    """

    name: str
    model_types: tuple[str, ...]
    architectures: tuple[str, ...]
    gguf: tuple[Rule, ...] = ()
    megatron: tuple[Rule, ...] = ()
    prefix: str = "model."
    ignored: tuple[str, ...] = ()
    settings: tuple[Setting, ...] = ()
    implied: Mapping[str, Any] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
