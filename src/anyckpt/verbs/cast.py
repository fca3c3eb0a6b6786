"""Floating-point weights in another dtype, in the same format."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from anyckpt.core.checkpoint import Checkpoint
from anyckpt.plan.run import Progress
from anyckpt.verbs.convert import Source, convert
from anyckpt.verbs.open import open as open_checkpoint
from anyckpt.verbs.prune import same_format
from anyckpt.verbs.write import Written


def cast(
    source: Source,
    destination: str | os.PathLike[str],
    dtype: str,
    *,
    keep: Sequence[str] = (),
    to: str | None = None,
    events: Callable[[Progress], None] | None = None,
    **job: Any,
) -> Written:
    """Write `source`'s weights as `dtype`, except those whose names match a glob of `keep` (`*norm*`).

    The format is the source's own unless the destination's ending or `to` says otherwise; other options as `convert`.
    """
    checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source)
    to = to or same_format(checkpoint, destination)
    return convert(checkpoint, destination, to=to, dtype=dtype, keep_dtype=keep, only="weights", events=events, **job)
