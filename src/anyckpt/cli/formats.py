"""`anyckpt formats`: the matrix of formats, or with --from and --to the one command for a pair."""

from __future__ import annotations

import click

from anyckpt.cli.options import verb
from anyckpt.cli.output import Output, Part, Span
from anyckpt.errors import UsageError
from anyckpt.verbs.matrix import matrix, route


@verb("formats")
@click.option("--from", "source", metavar="FORMAT", help="The format you have.")
@click.option("--to", "target", metavar="FORMAT", help="The format you want.")
def command(out: Output, source: str | None, target: str | None) -> None:
    """List what is read and written, or show the command from one format to another."""
    if (source is None) != (target is None):
        raise UsageError("--from and --to go together")
    if source is not None and target is not None:
        _pair(out, source, target)
        return
    rows = matrix()
    out.document({"formats": [row.as_dict() for row in rows]})
    yes, no = Span("yes", "good"), Span("–", "dim")
    table: list[list[Part]] = [[Span(word, "dim") for word in ("format", "reads", "writes", "training state", "what")]]
    for row in rows:
        marks = [yes if has else no for has in (row.reads, row.writes, row.training)]
        table.append([Span(row.name, "bold"), *marks, row.title])
    out.table(table)
    missing = [row for row in rows if row.needs]
    for row in missing:
        out.line(Span(f"{row.name} needs: {row.needs}", "dim"))


def _pair(out: Output, source: str, target: str) -> None:
    found = route(source, target)
    out.document(found.as_dict())
    out.line(Span(found.command, "bold"), Span(f"  {found.note}", "dim"))
    if found.official:
        out.line(Span("the framework's own way: ", "dim"), found.official)
