"""`anyckpt show PATH TENSOR`: the values of one tensor or a part of it."""

from __future__ import annotations

import click

from anyckpt.cli.options import path_argument, verb
from anyckpt.cli.output import Output, Span
from anyckpt.verbs.show import LIMIT, show


@verb("show")
@path_argument()
@click.argument("tensor", metavar="TENSOR[INDEX]")
@click.option("--limit", type=click.IntRange(1), default=LIMIT, show_default=True, help="Show at most so many values.")
def command(out: Output, path: str, tensor: str, limit: int) -> None:
    """Print the values of one tensor of PATH; no more is read than is shown.

    \b
    anyckpt show model.safetensors lm_head.weight
    anyckpt show checkpoint.pt "fc.weight[0:4, -1]"
    anyckpt show checkpoint.pt fc.weight/exp_avg
    """
    found = show(path, tensor, limit=limit)
    out.document(found.as_dict())
    index = f"[{found.index}]" if found.index else ""
    shape = " × ".join(map(str, found.shape)) or "scalar"
    whole = f" of {' × '.join(map(str, found.full_shape))}" if index else ""
    out.line(Span(found.name + index, "bold"), Span(f"  {found.dtype}  {shape}{whole}", "dim"))
    for line in found.text.splitlines():
        out.line(line)
    if found.is_cut:
        out.line(Span("values at the ends of each axis; --limit or an index shows more", "dim"))
