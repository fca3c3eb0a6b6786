"""The one table of errors: what each exception says to the user, and the exit status it ends with.

0    fine, the same, safe
1    the answer is no: an error finding, a dangerous verdict, a difference
2    could not be done: usage, no such path, no room, a rule forbids it, an internal fault
130  interrupted
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click

from anyckpt.cli.output import Output, trouble
from anyckpt.errors import AnyckptError, CheckpointError, MissingDependency, OutOfSpace

FINE, NO, FAILED, INTERRUPTED = 0, 1, 2, 130


@dataclass(frozen=True, slots=True)
class Report:
    """What to say about an exception. `status` is the exit status."""

    status: int
    message: str
    code: str = ""
    where: str = ""
    hint: str = ""
    label: str = "error"


def _checkpoint(error: CheckpointError) -> Report:
    found = error.finding
    return Report(NO, found.message, found.code, found.where, found.hint)


def _ours(error: AnyckptError) -> Report:
    return Report(FAILED, str(error), hint=error.hint)


def _usage(error: click.ClickException) -> Report:
    context = getattr(error, "ctx", None)
    hint = f"run: {context.command_path} --help" if context is not None else ""
    return Report(FAILED, error.format_message(), hint=hint)


def _system(error: OSError) -> Report:
    words = {
        errno.ENOSPC: "the disk is full",
        errno.EDQUOT: "the disk quota is used up",
        errno.EROFS: "the file system is read-only",
        errno.EACCES: "permission denied",
        errno.EIO: "the disk or network reported an input/output error",
        errno.EMFILE: "too many files are open",
    }
    message = words.get(error.errno or 0) or error.strerror or str(error)
    return Report(FAILED, message, where=os.fsdecode(error.filename) if error.filename else "")


def _memory(_: MemoryError) -> Report:
    return Report(FAILED, "out of memory", hint="give less with --max-memory 256M, or close other programs")


def _dependency(error: MissingDependency) -> Report:
    return Report(FAILED, str(error), hint=error.hint)


def _interrupted(_: BaseException) -> Report:
    return Report(INTERRUPTED, "nothing at the destination was changed; the same command goes on", label="interrupted")


def _internal(error: BaseException) -> Report:
    return Report(
        FAILED,
        f"internal: {type(error).__name__}: {error}",
        hint="this is a fault of anyckpt, not yours; run again with --debug and report what it prints",
    )


TABLE: tuple[tuple[type[BaseException], Callable[[Any], Report]], ...] = (
    (CheckpointError, _checkpoint),
    (MissingDependency, _dependency),
    (OutOfSpace, _ours),
    (AnyckptError, _ours),
    (click.exceptions.Abort, _interrupted),
    (KeyboardInterrupt, _interrupted),
    (click.ClickException, _usage),
    (MemoryError, _memory),
    (OSError, _system),
    (BaseException, _internal),
)


def explain(error: BaseException) -> Report:
    """What the first fitting row of the table says about `error`."""
    return next(row(error) for kind, row in TABLE if isinstance(error, kind))


def tell(error: BaseException, out: Output) -> int:
    """Tell the user about `error`, in the form they asked for, and return the exit status."""
    if out.debug:
        import traceback

        traceback.print_exception(error, file=sys.stderr)
    said = explain(error)
    if out.mode == "json":
        fault = {"code": said.code, "message": said.message, "where": said.where, "hint": said.hint}
        out.document({"error": fault})
    else:
        trouble(sys.stderr, said.label, said.message, said.code, said.where, said.hint)
    return said.status
