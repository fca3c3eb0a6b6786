"""Everything in a bare pickle file: one stream after another, then zeros or something that does not belong there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from anyckpt.finding import Finding, Report, Verdict
from anyckpt.pickle.machine import run
from anyckpt.pickle.result import DEFAULT_LIMITS, Import, Limits, Result
from anyckpt.pickle.sweep import swept

_MAX_STREAMS = 1000
_CHUNK = 1 << 16


@dataclass(frozen=True, slots=True)
class Streams:
    """The complete streams of a buffer in order (a broken one ends them), and what was found over all of it."""

    results: tuple[Result, ...]
    end: int
    findings: tuple[Finding, ...]
    verdict: Verdict

    @property
    def imports(self) -> tuple[Import, ...]:
        """The imports of all streams."""
        return tuple(item for result in self.results for item in result.imports)


def run_all(
    data: bytes | memoryview,
    *,
    persistent: Callable[[Any], Any] | None = None,
    where: str = "",
    limits: Limits = DEFAULT_LIMITS,
) -> Streams:
    """Interpret every stream of a file that should hold nothing but pickles. The worst verdict counts."""
    report = Report()
    results: list[Result] = []
    pos = 0
    while len(results) < _MAX_STREAMS:
        result = run(data, persistent=persistent, where=where, limits=limits, start=pos)
        if results and not result.complete and not result.imports:
            break  # no stream at all: what follows the last one is something else
        results.append(result)
        report.extend(result.findings)
        report.worsen(result.verdict)
        pos = result.end
        if not result.complete or pos >= len(data) or _only_zeros(data, pos):
            break
    if results[-1].complete and pos < len(data):
        _describe_rest(data, pos, where, limits, report)
    return Streams(tuple(results), pos, tuple(report.findings), report.verdict)


def _describe_rest(data: bytes | memoryview, pos: int, where: str, limits: Limits, report: Report) -> None:
    n = len(data) - pos
    place = f"{where}, byte {pos}" if where else f"byte {pos}"
    report.add("trailing-data", f"{n:,} bytes follow the last pickle", where=place)
    for item in swept(data, pos, limits.sweep_bytes):
        report.worsen(item.verdict)
        code = "dangerous-code" if item.verdict == "dangerous" else "unknown-code"
        place = f"{where}, byte {item.position}" if where else f"byte {item.position}"
        report.add(code, f"behind the last pickle stands {item.path[:200]}, which {item.reason}", where=place)


def _only_zeros(data: bytes | memoryview, pos: int) -> bool:
    return all(not any(bytes(data[at : at + _CHUNK])) for at in range(pos, len(data), _CHUNK))
