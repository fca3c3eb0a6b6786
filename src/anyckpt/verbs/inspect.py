"""Everything worth knowing about a checkpoint, from its headers alone."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from shlex import quote
from typing import Any

from anyckpt import formats
from anyckpt.core.checkpoint import Checkpoint, Optimizer
from anyckpt.finding import Finding, Report, Verdict
from anyckpt.formats import table
from anyckpt.io.place import Place
from anyckpt.names import prefixes, versions
from anyckpt.verbs.fold import Fold, fold
from anyckpt.verbs.loading import Loading, loading
from anyckpt.verbs.resume import Answer, own
from anyckpt.verbs.telling import most_telling_first
from anyckpt.verbs.tensors import other_tensors

PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes by kind. `rest` is what lies on disk beside tensors: containers, configs, tokenizers."""

    on_disk: int
    weights: int
    optimizer: int
    other_tensors: int

    @property
    def rest(self) -> int:
        return max(0, self.on_disk - self.weights - self.optimizer - self.other_tensors)

    def as_dict(self) -> dict[str, int]:
        """The record as `--json` prints it."""
        return {
            "on_disk": self.on_disk,
            "weights": self.weights,
            "optimizer": self.optimizer,
            "other_tensors": self.other_tensors,
            "rest": self.rest,
        }


@dataclass(frozen=True, slots=True)
class OptimizerFacts:
    """What an optimizer's state is: its kind, bytes per slot, and the first group's plain settings."""

    kind: str
    slots: Mapping[str, int]
    n_groups: int
    n_parameters: int
    settings: Mapping[str, Any]
    names_inferred: bool

    def as_dict(self) -> dict[str, Any]:
        """The record as `--json` prints it."""
        return {
            "kind": self.kind,
            "slots": dict(self.slots),
            "groups": self.n_groups,
            "parameters": self.n_parameters,
            "settings": dict(self.settings),
            "names_inferred": self.names_inferred,
        }


@dataclass(frozen=True, slots=True)
class Inspection:
    """The answer to `anyckpt PATH`. `dtypes` is bytes by dtype; `next_steps` are (command, what for).

    `about`: (label, text) of what only this format has to say.
    """

    path: str
    format: str
    title: str
    container: str
    verdict: Verdict
    findings: tuple[Finding, ...]
    is_training: bool
    sizes: Sizes
    n_parameters: int
    n_tensors: int
    dtypes: Mapping[str, int]
    tree: tuple[Fold, ...]
    loading: Loading
    model: str = ""
    optimizer: OptimizerFacts | None = None
    step: int | None = None
    epoch: int | None = None
    has_scheduler: bool = False
    has_rng: bool = False
    state: Mapping[str, str] = field(default_factory=dict)
    topology: str = ""
    ties: Mapping[str, str] = field(default_factory=dict)
    prefixes: tuple[str, ...] = ()
    framework: str = ""
    assets: tuple[str, ...] = ()
    next_steps: tuple[tuple[str, str], ...] = ()
    about: tuple[tuple[str, str], ...] = ()
    resume: Answer | None = None

    @property
    def ok(self) -> bool:
        """No error finding, and nothing dangerous."""
        return self.verdict != "dangerous" and not any(f.severity == "error" for f in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """The record as `--json` prints it."""
        return {
            "path": self.path,
            "format": self.format,
            "title": self.title,
            "container": self.container,
            "ok": self.ok,
            "verdict": self.verdict,
            "findings": [f.as_dict() for f in self.findings],
            "training": self.is_training,
            "model": self.model,
            "parameters": self.n_parameters,
            "tensors": self.n_tensors,
            "bytes": self.sizes.as_dict(),
            "dtypes": dict(self.dtypes),
            "step": self.step,
            "epoch": self.epoch,
            "optimizer": self.optimizer.as_dict() if self.optimizer else None,
            "scheduler": self.has_scheduler,
            "rng": self.has_rng,
            "state": dict(self.state),
            "topology": self.topology,
            "resume": self.resume.as_dict() if self.resume else None,
            "ties": dict(self.ties),
            "prefixes": list(self.prefixes),
            "framework": self.framework,
            "assets": list(self.assets),
            "loading": self.loading.as_dict(),
            "tree": [row.as_dict() for row in self.tree],
            "about": dict(self.about),
            "next": [{"command": command, "what": what} for command, what in self.next_steps],
        }


def inspect(path: str | os.PathLike[str]) -> Inspection:
    """Describe the checkpoint at `path` from its headers; no tensor data is read.

    Raises CheckpointError where nothing can be described, UsageError where there is no such path.
    """
    place = Place.at(path)
    report = Report()
    checkpoint = formats.read(place, report)
    row = table.row_named(checkpoint.format)
    wrappers = prefixes.find(checkpoint.weights)
    about_names = [*prefixes.note(wrappers, len(checkpoint.weights)), *versions.note(checkpoint.weights)]
    findings = tuple(most_telling_first([*checkpoint.findings, *about_names]))
    dtypes, n_parameters = _weights(checkpoint)
    sizes = _sizes(place, checkpoint, sum(dtypes.values()))
    how = loading(checkpoint)
    return Inspection(
        path=os.fspath(path),
        format=checkpoint.format,
        title=row.title if row else checkpoint.format,
        container=str(checkpoint.facts.get("container", "")),
        verdict=checkpoint.verdict,
        findings=findings,
        is_training=checkpoint.is_training,
        sizes=sizes,
        n_parameters=n_parameters,
        n_tensors=len(checkpoint.weights),
        dtypes=dtypes,
        tree=tuple(fold(checkpoint.weights)),
        loading=how,
        model=_model(checkpoint.config or {}),
        optimizer=_optimizer(checkpoint.optimizer),
        step=checkpoint.step,
        epoch=checkpoint.epoch,
        has_scheduler=checkpoint.scheduler is not None,
        has_rng=checkpoint.rng is not None,
        state={str(k): _kind(v) for k, v in checkpoint.state.items()},
        topology=str(checkpoint.topology) if checkpoint.topology else "",
        ties=dict(checkpoint.aliases),
        prefixes=tuple(str(w) for w in wrappers if w.where != "asked"),
        framework=str(checkpoint.facts.get("framework", "")),
        assets=tuple(a.name for a in checkpoint.assets),
        resume=own(checkpoint),
        about=_about(row, checkpoint),
        next_steps=tuple(_next_steps(os.fspath(path), checkpoint, sizes, how, findings)),
    )


def _about(row: table.Format | None, checkpoint: Checkpoint) -> tuple[tuple[str, str], ...]:
    """What only this format says of a model, where its module tells it."""
    describe = getattr(row.load(), "describe", None) if row is not None else None
    return tuple(describe(checkpoint)) if describe is not None else ()


def _sizes(place: Place, checkpoint: Checkpoint, weights: int) -> Sizes:
    on_disk = sum(size for _, size in place.sizes())
    optimizer = checkpoint.optimizer.nbytes if checkpoint.optimizer else 0
    others = sum(tensor.nbytes for tensor in other_tensors(checkpoint).values())
    return Sizes(on_disk, weights, optimizer, others)


def _weights(checkpoint: Checkpoint) -> tuple[dict[str, int], int]:
    """Bytes by dtype, the largest first, and elements; tied ones once."""
    n_bytes: dict[str, int] = {}
    n_elements = 0
    for name, tensor in checkpoint.weights.items():
        if name not in checkpoint.aliases:
            dtype = tensor.dtype.name
            n_bytes[dtype] = n_bytes.get(dtype, 0) + tensor.nbytes
            n_elements += tensor.size
    return dict(sorted(n_bytes.items(), key=lambda row: -row[1])), n_elements


def _optimizer(optimizer: Optimizer | None) -> OptimizerFacts | None:
    if optimizer is None:
        return None
    groups = optimizer.groups
    first = groups[0] if groups else {}
    return OptimizerFacts(
        kind=optimizer.kind,
        slots={slot: sum(t.nbytes for t in held.values()) for slot, held in optimizer.slots.items()},
        n_groups=len(groups),
        n_parameters=sum(len(_listed(g.get("params"))) for g in groups),
        settings={str(k): v for k, v in first.items() if isinstance(v, PLAIN) or _is_pair(v)},
        names_inferred=optimizer.names_inferred,
    )


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else []


def _is_pair(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) <= 4 and all(isinstance(v, int | float) for v in value)


def _model(config: Mapping[str, Any]) -> str:
    """What the config says the model is: its class, else its type."""
    architectures = config.get("architectures")
    if isinstance(architectures, list) and architectures and isinstance(architectures[0], str):
        return architectures[0]
    kind = config.get("model_type") or config.get("peft_type")
    return kind if isinstance(kind, str) else ""


def _kind(value: Any) -> str:
    """A few words on a saved value: a number as it is, else what it is and how large."""
    if isinstance(value, PLAIN):
        return repr(value)[:80]
    if isinstance(value, Mapping | list | tuple | set):
        return f"{type(value).__name__.lower()} of {len(value):,}".replace("mapping", "dict")
    return getattr(value, "class_name", "") or type(value).__name__.lower()


def _next_steps(
    path: str, checkpoint: Checkpoint, sizes: Sizes, how: Loading, findings: Iterable[Finding]
) -> list[tuple[str, str]]:
    """What most people want to do next with such a checkpoint."""
    shown = quote(path)
    worst = next((f for f in findings if f.severity == "error"), None)
    if checkpoint.verdict == "dangerous":
        return [
            (f"anyckpt scan {shown}", "what a loader would run"),
            (f"anyckpt convert {shown} clean.safetensors", "the tensors alone, without running anything"),
        ]
    if worst is not None:
        return [(f"anyckpt explain {worst.code}", "what this means and what to do")]
    steps: list[tuple[str, str]] = []
    if how.weights_only is False:
        steps.append((f"anyckpt sanitize {shown} clean.pt", "a file that weights_only=True takes"))
    saved = sizes.on_disk - sizes.weights
    if checkpoint.is_training and saved > sizes.on_disk // 10:
        steps.append(
            (
                f"anyckpt prune {shown} weights.safetensors",
                f"without training state: {saved * 100 // sizes.on_disk} % smaller",
            )
        )
    if checkpoint.format == "peft":
        steps.append((f"anyckpt convert BASE merged --to hf --merge-adapter {shown}", "merge it into its base"))
    elif checkpoint.format not in ("safetensors", "hf") and len(steps) < 2:
        steps.append((f"anyckpt convert {shown} model.safetensors", "weights that load without a pickle"))
    steps.append((f"anyckpt verify --deep {shown}", "read every value: checksums, NaN, zeros"))
    return steps[:3]
