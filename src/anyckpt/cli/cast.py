"""`anyckpt cast SOURCE DESTINATION --dtype DTYPE`: the same checkpoint in another dtype."""

from __future__ import annotations

from functools import partial
from typing import Any

import click

from anyckpt.cli.making import make, maker_options
from anyckpt.cli.options import path_argument, verb
from anyckpt.cli.output import Output


@verb("cast")
@path_argument("source")
@path_argument("destination")
@click.option("--dtype", required=True, metavar="DTYPE", help="bf16, fp16, fp32, float8_e4m3fn …")
@click.option(
    "--except", "keep", multiple=True, metavar="GLOB", help="Leave the dtype of these tensors alone, such as '*norm*'."
)
@click.option("--to", metavar="FORMAT", help="What to write (default: as the ending says, else as SOURCE is).")
@maker_options
def command(out: Output, source: str, destination: str, dtype: str, keep: tuple[str, ...], **options: Any) -> None:
    """Write SOURCE to DESTINATION with its floating-point weights in another dtype."""
    from anyckpt.verbs.cast import cast

    make(out, partial(cast, dtype=dtype, keep=keep), source, destination, options)
