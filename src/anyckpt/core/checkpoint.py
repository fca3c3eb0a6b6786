"""A checkpoint: named tensors and the rest of what was saved, whatever form it was saved in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from anyckpt.core.source import File
from anyckpt.core.tensor import Tensor
from anyckpt.core.topology import Topology
from anyckpt.finding import Finding, Verdict

NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Optimizer:
    """Optimizer state by parameter name.

    `slots[slot][parameter]`: `exp_avg`, `exp_avg_sq`, `momentum_buffer`, `master`, `step` …; a slot has entries only
    for the parameters that have it. `groups`: hyperparameters, each with `params`, the names in the optimizer's order.
    `names_inferred`: the file gives numbers, and names were matched through the order of parameters.
    """

    slots: Mapping[str, Mapping[str, Tensor]]
    groups: tuple[Mapping[str, Any], ...] = ()
    kind: str = ""
    names_inferred: bool = False
    unmatched: Mapping[str, Any] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return sum(t.nbytes for slot in self.slots.values() for t in slot.values())


@dataclass(frozen=True, slots=True)
class Asset:
    """A file that travels along: tokenizer, config, chat template. `name` is relative to the checkpoint."""

    name: str
    file: File


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a reader found. Tensors are descriptions: nothing is read before it is asked for.

    `weights` holds the model's state under the file's own names; tied names stand there and in `aliases` (tied name ->
    the name that holds the bytes). `state` is all else that was saved, as inert data (`core.inert`). `facts` is what a
    reader knows of the container: `container`, `devices`, `imports` (of pickles), `prefix`, `root`, `storages` …
    """

    format: str
    path: str
    weights: Mapping[str, Tensor]
    aliases: Mapping[str, str] = field(default_factory=dict)
    optimizer: Optimizer | None = None
    step: int | None = None
    epoch: int | None = None
    scheduler: Any = None
    rng: Any = None
    state: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] | None = None
    topology: Topology | None = None
    assets: tuple[Asset, ...] = ()
    findings: tuple[Finding, ...] = ()
    verdict: Verdict = "safe"
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of the weights, tied ones counted once."""
        return sum(t.nbytes for name, t in self.weights.items() if name not in self.aliases)

    @property
    def is_training(self) -> bool:
        """Whether it holds training state beside the weights."""
        return self.optimizer is not None or self.scheduler is not None or self.rng is not None

    def view(self, name: str) -> Checkpoint:
        """The same checkpoint seen otherwise, lazily: `stripped`, `dense`, `merged`, `hf` …

        Raises UsageError for an unknown view or one that does not apply.
        """
        from anyckpt.verbs.views import apply_view

        return apply_view(self, name)

    def with_weights(self, weights: Mapping[str, Tensor], **changes: Any) -> Checkpoint:
        """A copy with other weights; aliases to names that are gone are dropped."""
        aliases = {a: b for a, b in self.aliases.items() if a in weights and b in weights}
        return replace(self, **{"weights": weights, "aliases": aliases, **changes})

    def __repr__(self) -> str:
        return f"Checkpoint({self.format!r}, {len(self.weights):,} tensors, {self.nbytes:,} bytes)"
