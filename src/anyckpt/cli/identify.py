"""`anyckpt identify PATH…`: the format's name, one line a path; imports no numpy."""

from __future__ import annotations

import click

from anyckpt.cli.errors import FINE, NO
from anyckpt.cli.options import verb
from anyckpt.cli.output import Output, Span
from anyckpt.verbs.identify import identify


@verb("identify")
@click.argument("paths", type=click.Path(), nargs=-1, required=True, metavar="PATH…")
def command(out: Output, paths: tuple[str, ...]) -> int:
    """Name the format of each PATH, by its content.

    The exit status is 1 where one of them is no checkpoint.
    """
    found = [identify(path) for path in paths]
    out.document({"paths": [one.as_dict() for one in found]})
    out.table(
        [
            [
                one.path,
                Span(one.format or "?", "bold" if one.format else "error"),
                one.title or (one.why or "not recognised"),
            ]
            for one in found
        ]
    )
    return FINE if all(one.format for one in found) else NO
