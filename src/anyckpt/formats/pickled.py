r"""Bare pickles of any protocol, joblib's among them: one stream, or several in a row.

    \x80 P …  STOP                protocols 2 to 5
    opcodes … STOP                protocols 0 and 1 have no head of their own
    joblib: NumpyArrayWrapper objects, each followed by its array's bytes inside of the stream

Nothing says that a file is a pickle of protocol 0 but that it can be read as one, so that is tried: a text file breaks
off at once.
"""

from __future__ import annotations

from typing import Any

from anyckpt.core.checkpoint import Checkpoint
from anyckpt.core.source import File
from anyckpt.finding import Report, fail
from anyckpt.formats.torch.state import read_state
from anyckpt.io.bounds import byte_count
from anyckpt.pickle.machine import run
from anyckpt.pickle.result import Result
from anyckpt.pickle.streams import run_all

MAX_BYTES = 1 << 30
_TRIED_BYTES = 64 << 10
_NAMES = (".pkl", ".pickle", ".joblib")
_FIRST_OPCODES = frozenset(b"(]}ci)lNdIFSVXKJMGLTUBgjhpqr0e\x8a\x8b\x8c\x8d\x8e\x8f\x95\x96")


def matches(file: File, head: bytes) -> bool:
    """Whether the file begins as a pickle: by its head, or by being readable as one."""
    if head[:1] == b"\x80":  # of a later protocol, or cut off right here, only its name makes it a pickle
        return b"\0" <= head[1:2] <= b"\5" or file.name.lower().endswith(_NAMES)
    if len(head) < 2 or head[0] not in _FIRST_OPCODES:
        return False
    n = min(file.size, _TRIED_BYTES)
    result = run(file.read(0, n))
    # A stream that broke but had called something by then has been executed by a loader up to there.
    return result.complete or result.end >= n < file.size or any(item.called for item in result.imports)


def read(file: File, report: Report) -> Checkpoint:
    """Judge every stream, and take the arrays and tensors of the first as weights where they are a model.

    Raises [limit-exceeded] for a pickle that does not fit in memory.
    """
    if file.size > MAX_BYTES:
        raise fail(
            "limit-exceeded", f"is a pickle of {byte_count(file.size)}; up to {byte_count(MAX_BYTES)} are read",
            where=file.name,
        )
    streams = run_all(file.read(0, file.size), where=file.name)
    report.extend(streams.findings)
    report.worsen(streams.verdict)
    values = [result.value for result in streams.results]
    joblib = any(item.path.startswith("joblib.") for item in streams.imports)
    facts = {"container": "joblib" if joblib else "pickle", "results": streams.results}
    return read_state(_root(values, streams.results), format="pickle", path=file.name, report=report, facts=facts)


def _root(values: list[Any], results: tuple[Result, ...]) -> Any:
    """The saved object; of several streams in a row, a list of theirs."""
    whole = [value for value, result in zip(values, results, strict=True) if result.complete]
    return values[0] if len(values) == 1 else whole
