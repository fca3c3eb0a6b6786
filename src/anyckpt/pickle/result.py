"""What a run of the machine gives back, and the limits it keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from anyckpt.finding import Finding, Verdict
from anyckpt.pickle.weights_only import WEIGHTS_ONLY


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on one stream. Lengths inside it are bounded by its own bytes besides.

    `line_bytes` is for names and numbers of text opcodes, `digits` Python's own limit for decimal integers,
    `spend_per_byte` how many items or bytes handlers may copy for each byte of the stream: a memoised object can be
    named again in two bytes, so copies are what would let a small file grow. `sweep_bytes` is how far beyond a fault
    import opcodes are looked for.
    """

    opcodes: int = 200_000_000
    memo: int = 20_000_000
    stack: int = 20_000_000
    marks: int = 10_000
    line_bytes: int = 64 << 10
    digits: int = 4300
    spend_per_byte: int = 4
    key_nodes: int = 10_000
    sweep_bytes: int = 64 << 20


DEFAULT_LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class Import:
    """A global that a stream names: as written, as a loader would look it up, where first, and what it means."""

    module: str
    name: str
    resolved_module: str
    resolved_name: str
    position: int
    verdict: Verdict
    reason: str
    called: bool = False

    @property
    def path(self) -> str:
        """`module.name` as the loader looks it up."""
        return f"{self.resolved_module}.{self.resolved_name}"

    @property
    def weights_only(self) -> bool:
        """Whether `torch.load(weights_only=True)` accepts it without being told to."""
        return self.path in WEIGHTS_ONLY


@dataclass(frozen=True, slots=True)
class Result:
    """One stream: its value, whether it was read to its end, and what it would have made a loader do.

    `value` of an incomplete stream is what had been put together when it broke. `end` is the offset behind STOP, or
    of the opcode that could not be read.
    """

    value: Any
    complete: bool
    end: int
    protocol: int
    imports: tuple[Import, ...]
    findings: tuple[Finding, ...]
    verdict: Verdict
