"""`anyckpt formats`: the matrix of formats, or with --from and --to the one command for a pair."""

from __future__ import annotations

from collections.abc import Sequence

import click

from anyckpt.cli.options import verb
from anyckpt.cli.output import Output, Part, Span
from anyckpt.errors import UsageError
from anyckpt.verbs.matrix import Row, matrix, route

HEADINGS = ("format", "reads", "writes", "training state", "what")
YES, NO = "yes", "–"


@verb("formats")
@click.option("--from", "source", metavar="FORMAT", help="The format you have.")
@click.option("--to", "target", metavar="FORMAT", help="The format you want.")
@click.option("--markdown", is_flag=True, help="Print the table as Markdown.")
def command(out: Output, source: str | None, target: str | None, markdown: bool) -> None:
    """List what is read and written, or show the command from one format to another."""
    if (source is None) != (target is None):
        raise UsageError("--from and --to go together")
    if source is not None and target is not None:
        _pair(out, source, target)
        return
    rows = matrix()
    out.document({"formats": [row.as_dict() for row in rows]})
    if markdown:
        for line in as_markdown(rows):
            out.line(line)
        return
    table: list[list[Part]] = [[Span(word, "dim") for word in HEADINGS]]
    for row in rows:
        marks = [Span(mark, "dim" if mark == NO else "good") for mark in _marks(row)]
        table.append([Span(row.name, "bold"), *marks, row.title])
    out.table(table)
    missing = [row for row in rows if row.needs]
    for row in missing:
        out.line(Span(f"{row.name} needs: {row.needs}", "dim"))


def as_markdown(rows: Sequence[Row]) -> list[str]:
    """The table of the README, line by line."""
    lines = [" | ".join(HEADINGS), " | ".join("---" for _ in HEADINGS)]
    lines += [" | ".join((f"`{row.name}`", *_marks(row), row.title)) for row in rows]
    return [f"| {line} |" for line in lines]


def _marks(row: Row) -> tuple[str, str, str]:
    training = NO if not row.training else "read, written" if row.writes else "read"
    return YES if row.reads else NO, YES if row.writes else NO, training


def _pair(out: Output, source: str, target: str) -> None:
    found = route(source, target)
    out.document(found.as_dict())
    out.line(Span(found.command, "bold"), Span(f"  {found.note}", "dim"))
    if found.official:
        out.line(Span("the framework's own way: ", "dim"), found.official)
