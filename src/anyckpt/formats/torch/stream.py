"""Pickles that stand one after another, or before raw bytes, in a file that is too large to be read whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from anyckpt.core.inert import Global
from anyckpt.core.source import File
from anyckpt.finding import Report, fail
from anyckpt.pickle.machine import run
from anyckpt.pickle.result import Result

FIRST_BYTES = 1 << 16
MAX_PICKLE_BYTES = 256 << 20  # about two million tensors


def run_at(
    file: File, offset: int, where: str, persistent: Callable[[Any], Any] | None = None, first: int = FIRST_BYTES
) -> Result:
    """Interpret the stream that begins at `offset`, whose end nothing tells. `end` of the result counts from `offset`.

    More is read, eightfold each time, for as long as the stream turns out to be longer; it is run anew then.
    """
    n_bytes = min(first, file.size - offset)
    while True:
        result = run(file.read(offset, n_bytes), persistent=persistent, where=where)
        cut = not result.complete and any(f.code == "truncated" for f in result.findings)
        if not cut or n_bytes == file.size - offset or n_bytes >= MAX_PICKLE_BYTES:
            return result
        n_bytes = min(8 * n_bytes, file.size - offset)


def admit(result: Result, report: Report) -> Any:
    """Its value, findings and verdict passed on. Raises CheckpointError where the stream is broken."""
    report.worsen(result.verdict)
    if result.complete:
        report.extend(result.findings)
        return result.value
    report.extend(f for f in result.findings if f.code in ("dangerous-code", "unknown-code"))
    broken = next(f for f in result.findings if f.severity == "error" and f.code != "dangerous-code")
    raise fail(broken.code, broken.message, where=broken.where, hint=broken.hint)


def class_of_module_id(pid: Any, report: Report, where: str) -> Any:
    """What ('module', class, source file, source text) stands for: the class. None for any other persistent id."""
    if not isinstance(pid, tuple) or len(pid) != 4 or pid[0] not in ("module", b"module"):
        return None
    if isinstance(pid[2], str) and pid[2]:
        report.add("privacy", "it carries the path and text of the source of its module classes", where=where)
    return pid[1] if isinstance(pid[1], Global) else fail("malformed-pickle", "a module id names no class")
