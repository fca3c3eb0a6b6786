"""`anyckpt prune SOURCE DESTINATION`: the weights alone."""

from __future__ import annotations

from typing import Any

import click

from anyckpt.cli.making import make, maker_options
from anyckpt.cli.options import path_argument, verb
from anyckpt.cli.output import Output


@verb("prune")
@path_argument("source")
@path_argument("destination")
@click.option("--to", metavar="FORMAT", help="What to write (default: as the ending says, else as SOURCE is).")
@maker_options
def command(out: Output, source: str, destination: str, **options: Any) -> None:
    """Write the weights of SOURCE to DESTINATION and leave optimizer and other training state out."""
    from anyckpt.verbs.prune import prune

    make(out, prune, source, destination, options)
