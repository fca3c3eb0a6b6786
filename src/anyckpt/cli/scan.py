"""`anyckpt scan PATH`: what a loader would have to import, for every file."""

from __future__ import annotations

from itertools import islice

import click

from anyckpt.cli.errors import FINE, NO
from anyckpt.cli.options import path_argument, verb
from anyckpt.cli.output import Output, Part, Span
from anyckpt.finding import VERDICTS
from anyckpt.verbs.scan import Scanned, scan

STYLE = {"safe": "good", "unknown": "warning", "dangerous": "error"}
SHOWN = 5


@verb("scan")
@path_argument()
@click.option("--all", "show_all", is_flag=True, help="Print safe files and harmless names too.")
def command(out: Output, path: str, show_all: bool) -> int:
    """Say of every file at or under PATH whether loading it would run code.

    The exit status is 0 only where everything is safe. What was not looked at is unknown, never safe.
    """
    found = scan(path)
    out.document(found.as_dict())
    files = sorted(found.files, key=lambda f: -VERDICTS.index(f.verdict))
    shown = [f for f in files if show_all or f.verdict != "safe" or len(files) == 1]
    width = max((len(f.what) for f in shown), default=0)
    for file in shown:
        parts: list[Part] = [
            Span(file.verdict.ljust(9), STYLE[file.verdict]),
            "  ",
            file.what.ljust(width),
            "  ",
            Span(file.name, "bold"),
            Span(f"  {file.why}", "dim"),
        ]
        out.line(*parts)
        _show_imports(out, file, show_all)
    counts = [f"{sum(f.verdict == word for f in files):,} {word}" for word in reversed(VERDICTS)]
    out.line(Span(found.verdict, STYLE[found.verdict]), Span(f" · {len(files):,} files: {', '.join(counts)}", "dim"))
    return FINE if found.verdict == "safe" else NO


def _show_imports(out: Output, file: Scanned, show_all: bool) -> None:
    wanted = [row for row in file.imports if show_all or row[1] != "safe"]
    limit = len(wanted) if show_all else SHOWN
    for name, verdict, reason in islice(wanted, limit):
        out.line(" " * 11, Span(name, STYLE[verdict]), Span(f"  {reason}", "dim"))
    if len(wanted) > limit:
        out.line(" " * 11, Span(f"and {len(wanted) - limit:,} more names; --all shows them", "dim"))
    for finding in file.findings[: None if show_all else 2]:
        out.line(
            " " * 11,
            Span(f"{finding.severity}: ", finding.severity),
            finding.message,
            Span(f" [{finding.code}]", "dim"),
        )
