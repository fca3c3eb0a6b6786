"""`anyckpt du PATH`: where the bytes are, and what could be saved."""

from __future__ import annotations

from collections.abc import Sequence

import click

from anyckpt.cli.numbers import percent
from anyckpt.cli.options import path_argument, verb
from anyckpt.cli.output import Output, Part, Span
from anyckpt.io.bounds import byte_count
from anyckpt.verbs.du import DiskUse, Use, du

SHOWN = 16


@verb("du")
@path_argument()
@click.option(
    "--depth", type=click.IntRange(1, 20), default=2, show_default=True, help="Segments of names to sum up by."
)
@click.option("--all", "show_all", is_flag=True, help="Print every row.")
def command(out: Output, path: str, depth: int, show_all: bool) -> None:
    """Show where the bytes of a checkpoint are: by kind, by dtype and by part of the model. Only headers are read."""
    found = du(path, depth=depth)
    out.document(found.as_dict())
    out.line(Span(found.path, "bold"), Span(f"  {byte_count(found.total_bytes)}", "dim"))
    kinds = [_row(use, found.total_bytes) for use in found.kinds]
    kinds += [_extra(found, "dead storage", found.dead_bytes), _extra(found, "the rest", found.overhead_bytes)]
    _section(out, "by kind", [row for row in kinds if row], None)
    _section(out, "by dtype", [_row(use, found.total_bytes) for use in found.dtypes], None)
    _section(out, "weights", [_row(use, found.total_bytes) for use in found.prefixes], None if show_all else SHOWN)
    if found.shared_bytes:
        out.line(Span(f"{byte_count(found.shared_bytes)} more would be needed without sharing (ties, views)", "dim"))
    if found.savings:
        out.line()
        out.line(Span("to save", "head"))
        out.table(
            [[byte_count(s.n_bytes), s.what, Span(s.command, "dim")] for s in found.savings], right=(0,), indent=2
        )


def _section(out: Output, title: str, rows: Sequence[Sequence[Part]], limit: int | None) -> None:
    if not rows:
        return
    out.line()
    out.line(Span(title, "head"))
    out.table(rows[:limit], right=(1, 2, 3), indent=2)
    if limit is not None and len(rows) > limit:
        out.line(Span(f"  and {len(rows) - limit:,} more; --all shows them", "dim"))


def _row(use: Use, total: int) -> list[Part]:
    share = percent(use.n_bytes, total or 1)
    return [use.name, byte_count(use.n_bytes), share, Span(f"{use.n_tensors:,} tensors", "dim")]


def _extra(found: DiskUse, name: str, n_bytes: int) -> list[Part]:
    return [name, byte_count(n_bytes), percent(n_bytes, found.total_bytes or 1), ""] if n_bytes else []
