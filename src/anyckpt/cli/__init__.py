"""The command line: a lazy table of commands, one output sink, one table of errors. `main` is the program's entry."""

from __future__ import annotations

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0 fine, 1 the answer is no, 2 could not be done, 130 interrupted."""
    from anyckpt.cli.app import run

    return run(arguments)
