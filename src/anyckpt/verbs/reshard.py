"""The whole training state for another number of ranks, in the source's own format or another."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from anyckpt.core.checkpoint import Checkpoint
from anyckpt.core.topology import Topology
from anyckpt.errors import UsageError
from anyckpt.formats.table import row_named
from anyckpt.plan.run import Progress
from anyckpt.verbs.convert import Source, convert
from anyckpt.verbs.open import open as open_checkpoint
from anyckpt.verbs.write import Written

BY_ZERO = "deepspeed"
"""What is meant where a ZeRO stage is asked for."""

ANY_RANKS = ("deepspeed-universal",)
"""Formats that serve any number of ranks as they are; resharded, they become the ordinary one."""


def reshard(
    source: Source,
    destination: str | os.PathLike[str],
    *,
    to: str | None = None,
    tp: int | None = None,
    pp: int | None = None,
    vpp: int | None = None,
    ep: int | None = None,
    etp: int | None = None,
    cp: int | None = None,
    dp: int | None = None,
    zero: int | None = None,
    world: int | None = None,
    buffers: Sequence[str] = (),
    extra: Mapping[str, Any] | None = None,
    events: Callable[[Progress], None] | None = None,
    **options: Any,
) -> Written:
    """Write `source` for other parallel sizes; those that are not given stay as they were saved.

    `to` names the format (default: the source's own; DeepSpeed where `zero` is given). `zero`: the ZeRO stage.
    `buffers`: globs of the weights that are buffers, for sources that do not tell them from frozen parameters. `extra`
    and other options as `convert`. Raises UsageError where nothing is asked for or the format is not sharded.
    """
    checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source)
    sizes = {"tp": tp, "pp": pp, "vpp": vpp, "ep": ep, "etp": etp, "cp": cp, "dp": dp, "zero": zero, "world": world}
    asked = {name: size for name, size in sizes.items() if size is not None}
    if not asked:
        raise UsageError("no size is given to reshard to", hint="for example: anyckpt reshard SRC DST --dp 8")
    saved = checkpoint.topology or Topology()
    if tp is not None and etp is None and saved.etp == saved.tp:
        asked["etp"] = tp  # experts are split as everything else unless it is said otherwise
    topology = replace(saved, **asked)
    if to is None and (zero is not None or checkpoint.format in ANY_RANKS):
        to = BY_ZERO
    if to is None:
        row = row_named(checkpoint.format)
        to = checkpoint.format if row is not None and row.writes == "folder" and row.training else None
    if to is None:
        raise UsageError(
            f"{checkpoint.format} is not a sharded format", hint="name the one to write with --to, see: anyckpt formats"
        )
    told = {"buffers": tuple(buffers), **(extra or {})}
    return convert(checkpoint, destination, to=to, topology=topology, extra=told, events=events, **options)
