"""Whether training can go on from a checkpoint at a size, and if not, the one command that makes it possible.

`--for "fsdp world=8"`: a framework and its parallel sizes. One table, framework -> judge; a family adds a row:

    judge(checkpoint, wanted: Wanted) -> Answer
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from shlex import quote
from types import MappingProxyType
from typing import Any

from anyckpt.core.checkpoint import Checkpoint
from anyckpt.core.topology import Topology
from anyckpt.errors import UsageError
from anyckpt.finding import Finding

JUDGES: Mapping[str, str] = MappingProxyType(
    {
        "fsdp": "anyckpt.verbs.resume:fsdp",
        "dcp": "anyckpt.verbs.resume:fsdp",
        "ddp": "anyckpt.verbs.resume:ddp",
        "lightning": "anyckpt.verbs.resume:lightning",
        "trainer": "anyckpt.verbs.resume:trainer",
        "deepspeed": "anyckpt.verbs.resume_deepspeed:deepspeed",
        "megatron": "anyckpt.verbs.resume_megatron:megatron",
    }
)
"""Loaded on first use."""

OWN: Mapping[str, str] = MappingProxyType(
    {
        "dcp": "fsdp", "ranks": "fsdp", "accelerate": "fsdp", "lightning-sharded": "lightning",
        "deepspeed": "deepspeed", "deepspeed-universal": "deepspeed",
        "megatron": "megatron", "megatron-dist": "megatron",
    }
)
"""Formats and the framework whose own they are; a family adds its rows."""

_SIZES = tuple(Topology.__dataclass_fields__)
_SIZE = re.compile(r"([a-z]+)=(\d{1,7})")
ANY_WORLD = ("dcp", "lightning-sharded", "accelerate")


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is asked for: a framework and its sizes; `given` are the names of those that were named."""

    framework: str
    topology: Topology
    given: tuple[str, ...] = ()

    @property
    def world(self) -> int:
        """The number of processes, as far as it is told; 0 where it is not."""
        t = self.topology
        return t.world or (t.dp * t.tp * t.pp * t.cp if set(self.given) & {"dp", "tp", "pp", "cp"} else 0)

    def __str__(self) -> str:
        return " ".join([self.framework, *(f"{name}={getattr(self.topology, name)}" for name in self.given)])


@dataclass(frozen=True, slots=True)
class Answer:
    """Whether it can, in a sentence why, and the command to run where not ("" where none helps).

    `lost`: what is not carried over to that size, each in a few words.
    """

    wanted: str
    can: bool
    why: str
    command: str = ""
    lost: tuple[str, ...] = field(default=())

    def as_dict(self) -> dict[str, Any]:
        """The record as `--json` prints it."""
        return {
            "for": self.wanted, "resumes": self.can, "why": self.why, "command": self.command, "lost": list(self.lost),
        }

    def findings(self) -> list[Finding]:
        """The answer as findings: an error where it can't, a warning for what is lost."""
        found = []
        if not self.can:
            hint = f"run: {self.command}" if self.command else ""
            found.append(Finding("wrong-topology", "error", f"{self.wanted}: {self.why}", "", hint))
        found += [Finding("lossy", "warning", f"{self.wanted}: {what}") for what in self.lost]
        return found


Judge = Callable[[Checkpoint, Wanted], Answer]


def parse(text: str) -> Wanted:
    """`"fsdp world=8"` as what is wanted. Raises UsageError for a framework or size that is not known."""
    name, *sizes = text.split()
    if name not in JUDGES:
        raise UsageError(f"nothing is known of resuming with {name!r}", hint=f"known are: {', '.join(sorted(JUDGES))}")
    found: dict[str, int] = {}
    for size in sizes:
        match = _SIZE.fullmatch(size)
        if match is None or match[1] not in _SIZES:
            raise UsageError(f"{size!r} is no size", hint=f"for example: {name} world=8; sizes: {', '.join(_SIZES)}")
        found[match[1]] = int(match[2])
    return Wanted(name, Topology(**found), tuple(found))


def judge(checkpoint: Checkpoint, text: str) -> Answer:
    """Answer `text` for a checkpoint. Raises UsageError as `parse`."""
    wanted = parse(text)
    module, _, function = JUDGES[wanted.framework].partition(":")
    judge_: Judge = getattr(import_module(module), function)
    damaged = next((f for f in checkpoint.findings if f.severity == "error" and f.code != "dangerous-code"), None)
    if damaged is not None:
        return Answer(str(wanted), False, f"it is not whole ({damaged.message})")
    return judge_(checkpoint, wanted)


def own(checkpoint: Checkpoint) -> Answer | None:
    """Whether its own framework can train on from it, at the size it was saved by; None for those without a judge."""
    framework = OWN.get(checkpoint.format)
    if framework is None or not checkpoint.is_training:
        return None
    sizes = [
        f"{name}={size}" for name in _SIZES if (size := getattr(checkpoint.topology or Topology(), name)) not in (0, 1)
    ]
    return judge(checkpoint, " ".join([framework, *sizes]))


def no_training_state(checkpoint: Checkpoint, wanted: Wanted) -> Answer | None:
    """The answer for a checkpoint that training can't go on from at any size; None where it can."""
    if checkpoint.optimizer is None:
        return Answer(str(wanted), False, "it holds weights only: there is no optimizer state to go on with")
    if checkpoint.optimizer.unmatched and not checkpoint.optimizer.slots:
        why = "its optimizer state is kept by number, and what the numbers mean is not known"
        return Answer(str(wanted), False, why)
    return None


def rng_lost(checkpoint: Checkpoint, world: int) -> tuple[str, ...]:
    """What is said of generators' states that were saved by another number of processes."""
    saved = checkpoint.topology.world if checkpoint.topology else 1
    if checkpoint.rng is None or not world or world == max(saved, 1):
        return ()
    return (f"the generators' states are those of {max(saved, 1)} processes; {world} can't take them over",)


def to_dcp(checkpoint: Checkpoint, wanted: Wanted, *options: str) -> str:
    """The command that writes it for FSDP at the size asked for."""
    size = f" --world {wanted.world}" if wanted.world else ""
    return " ".join(["anyckpt convert", quote(checkpoint.path), "OUT --to dcp" + size, *options])


def fsdp(checkpoint: Checkpoint, wanted: Wanted) -> Answer:
    """FSDP1 and FSDP2 through torch.distributed.checkpoint."""
    if (answer := no_training_state(checkpoint, wanted)) is not None:
        return answer
    world, lost = wanted.world, rng_lost(checkpoint, wanted.world)
    if checkpoint.format in ANY_WORLD:
        return Answer(str(wanted), True, "torch.distributed.checkpoint loads it at any world size", lost=lost)
    if checkpoint.format == "ranks":
        saved = checkpoint.topology.world if checkpoint.topology else 1
        if world in (0, saved):
            return Answer(str(wanted), True, f"every rank loads its own file, at the same world of {saved}")
        why = f"every rank saved a file of its own: only the same world of {saved} can load them"
        return Answer(str(wanted), False, why, to_dcp(checkpoint, wanted), lost)
    if checkpoint.format in ("torch", "torch-legacy", "folder"):
        why = "a full state dict: set_state_dict with full_state_dict=True takes it at any world size"
        if not checkpoint.optimizer or not checkpoint.optimizer.names_inferred:
            return Answer(str(wanted), True, why, lost=lost)
        why = "its optimizer state is numbered, and FSDP wants names"
        return Answer(str(wanted), False, why, to_dcp(checkpoint, wanted), lost)
    return Answer(
        str(wanted), False, f"FSDP can't read {checkpoint.format} checkpoints", to_dcp(checkpoint, wanted), lost
    )


def ddp(checkpoint: Checkpoint, wanted: Wanted) -> Answer:
    """Plain torch: one file that every process loads."""
    if (answer := no_training_state(checkpoint, wanted)) is not None:
        return answer
    lost = rng_lost(checkpoint, wanted.world)
    if checkpoint.format in ("torch", "torch-legacy", "folder"):
        return Answer(str(wanted), True, "one file that every process loads", lost=lost)
    command = f"anyckpt convert {quote(checkpoint.path)} OUT.pt"
    return Answer(str(wanted), False, f"torch.load can't read {checkpoint.format} checkpoints", command, lost)


def lightning(checkpoint: Checkpoint, wanted: Wanted) -> Answer:
    """Trainer.fit(ckpt_path=…)."""
    if (answer := no_training_state(checkpoint, wanted)) is not None:
        return answer
    lost = rng_lost(checkpoint, wanted.world)
    if checkpoint.format == "lightning-sharded" or "pytorch-lightning_version" in checkpoint.state:
        return Answer(str(wanted), True, "Trainer.fit(ckpt_path=…) takes it", lost=lost)
    command = f"anyckpt convert {quote(checkpoint.path)} OUT.ckpt --to lightning"
    return Answer(str(wanted), False, "it is no Lightning checkpoint", command, lost)


def trainer(checkpoint: Checkpoint, wanted: Wanted) -> Answer:
    """transformers' Trainer(resume_from_checkpoint=…)."""
    if (answer := no_training_state(checkpoint, wanted)) is not None:
        return answer
    if checkpoint.format in ("hf", "accelerate", "peft") and "trainer_state.json" in checkpoint.state:
        return Answer(str(wanted), True, "resume_from_checkpoint takes it", lost=rng_lost(checkpoint, wanted.world))
    return Answer(str(wanted), False, "it is no folder of the Trainer, and those are not written here yet")
