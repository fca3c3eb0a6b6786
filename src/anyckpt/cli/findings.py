"""Findings on the terminal: the first few of each code, and how many more there are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

from anyckpt.cli.output import Output, Span
from anyckpt.finding import Finding

NOTHING: Mapping[str, int] = {}


def show_findings(
    out: Output,
    findings: Iterable[Finding],
    suppressed: Mapping[str, int] = NOTHING,
    *,
    path: str = "",
    limit: int = 3,
    show_all: bool = False,
) -> None:
    """Write findings in their order; of one code the first `limit`, and no notes, unless `show_all`.

    Places inside of `path`, which the user has just named, are told without it. `suppressed` counts those that were
    found but not kept, by code.
    """
    shown: Counter[str] = Counter()
    hidden: Counter[str] = Counter(suppressed)
    for finding in findings:
        if show_all or (finding.severity != "note" and shown[finding.code] < limit):
            out.finding(replace(finding, where=_inside(finding.where, path)))
            shown[finding.code] += 1
        else:
            hidden[finding.code] += 1
    if hidden:
        more = ", ".join(f"{n:,} {'more ' if shown[code] else ''}[{code}]" for code, n in hidden.items())
        out.line(Span(f"  and {more}" + ("" if show_all else "; --all shows them"), "dim"))


def _inside(where: str, path: str) -> str:
    """What of `where` lies inside of `path`.

    >>> _inside("a/m.pt!m/data.pkl, byte 2", "a/m.pt"), _inside("model", "model"), _inside("models", "model")
    ('m/data.pkl, byte 2', '', 'models')
    """
    rest = where.removeprefix(path)
    if not path or rest == where or (rest and rest[0] not in "!,/"):
        return where
    return rest.lstrip("!,/ ")
