"""`anyckpt explain CODE`: the page of a finding's code; without a code, the list of them."""

from __future__ import annotations

import click

from anyckpt.cli.options import verb
from anyckpt.cli.output import Output, Span
from anyckpt.finding import SEVERITIES
from anyckpt.verbs.explain import explain, pages


@verb("explain")
@click.argument("code", required=False)
def command(out: Output, code: str | None) -> None:
    """Say what the finding CODE means, how it comes about and what to do about it."""
    if code is None:
        out.document({"codes": [page.as_dict() for page in pages().values()]})
        for severity in SEVERITIES:
            out.wrapped(
                ", ".join(p.code for p in pages().values() if p.severity == severity),
                first=f"{severity}: ".rjust(9),
                style=severity,
            )
        return
    page = explain(code)
    out.document(page.as_dict())
    out.line(Span(page.code, "bold"), Span(f"  usually {_article(page.severity)}", page.severity))
    out.wrapped(page.meaning)
    out.wrapped(page.why, first="why: ", style="dim")
    out.wrapped(page.do, first=" do: ", style="dim")


def _article(severity: str) -> str:
    return f"an {severity}" if severity[0] in "aeiou" else f"a {severity}"
