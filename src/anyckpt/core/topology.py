"""Parallel layouts: how many ranks of each kind a checkpoint was saved by, or is to be written for."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class Topology:
    """Parallel sizes: tensor, pipeline, virtual pipeline, expert, expert-tensor, context and data; 1 where unused.

    `zero` is DeepSpeed's stage (0 where none). `world` is the number of processes where only that is known.
    """

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int = 1
    cp: int = 1
    dp: int = 1
    zero: int = 0
    world: int = 0

    def __str__(self) -> str:
        shown = [f"{f.name} {getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) not in (0, 1)]
        return ", ".join(shown) or "one process"
