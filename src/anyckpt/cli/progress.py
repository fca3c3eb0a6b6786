"""Progress on stderr: a bar with bytes a second and the time left, only where stderr is a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from anyckpt.cli.output import Output

QUIET_SECONDS = 0.5  # a job shorter than this shows no bar


class Stage(Protocol):
    """How far a job is: bytes done of bytes in all, and of which stage."""

    @property
    def stage(self) -> str: ...
    @property
    def done(self) -> int: ...
    @property
    def total(self) -> int: ...


class Bar:
    """A bar that appears once a job has taken a while, and moves on from stage to stage."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._shown: Any = None
        self._task: Any = None
        self._stage = ""

    def update(self, stage: str, done: int, total: int) -> None:
        """Show `done` of `total` bytes."""
        if self._shown is None:
            if time.monotonic() - self._began < QUIET_SECONDS:
                return
            self._shown = _rich_bar()
            self._shown.start()
        if stage != self._stage:
            if self._task is not None:
                self._shown.remove_task(self._task)
            self._task = self._shown.add_task(stage, total=total)
            self._stage = stage
        self._shown.update(self._task, completed=done, total=total)

    def close(self) -> None:
        """Take the bar away again."""
        if self._shown is not None:
            self._shown.stop()


@contextmanager
def bar(out: Output) -> Iterator[Bar | None]:
    """A bar for as long as a job takes; None where nobody watches."""
    shown = Bar() if out.mode == "human" and sys.stderr.isatty() else None
    try:
        yield shown
    finally:
        if shown is not None:
            shown.close()


def _rich_bar() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
