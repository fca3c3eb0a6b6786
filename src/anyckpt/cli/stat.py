"""`anyckpt stat PATH`: how the values of each tensor are spread."""

from __future__ import annotations

from functools import partial

import click

from anyckpt.cli.options import jobs_option, path_argument, verb
from anyckpt.cli.output import Output, Part, Span
from anyckpt.cli.progress import bar
from anyckpt.verbs.stat import TensorStatistics, stat

HEAD = ("tensor", "dtype", "min", "max", "mean", "std", "norm", "zeros", "")


@verb("stat")
@path_argument()
@click.argument("names", nargs=-1, metavar="[GLOB]…")
@click.option("--state", is_flag=True, help="Optimizer slots and other saved tensors too.")
@jobs_option
def command(out: Output, path: str, names: tuple[str, ...], state: bool, jobs: int | None) -> None:
    """Read every value once and print, for each tensor, least, largest, mean, deviation, norm and zeros.

    GLOBs choose tensors by name, such as '*.norm.weight'.
    """
    with bar(out) as shown:
        events = partial(shown.update, "reading") if shown else None
        found = stat(path, names=names, state=state, jobs=jobs, events=events)
    out.document(found.as_dict())
    out.table([[Span(word, "dim") for word in HEAD], *map(_row, found.tensors)], right=(2, 3, 4, 5, 6, 7))
    odd = f", {found.n_nan:,} NaN, {found.n_infinite:,} infinite" if found.n_nan or found.n_infinite else ""
    out.line(Span(f"{len(found.tensors):,} tensors, norm {found.norm:.6g}{odd}", "dim"))


def _row(one: TensorStatistics) -> list[Part]:
    odd = [f"{n:,} {what}" for n, what in ((one.n_nan, "NaN"), (one.n_infinite, "infinite")) if n]
    zeros = f"{one.n_zeros * 100 / one.n_elements:.3g} %" if one.n_elements else ""
    values = [_number(v) for v in (one.min, one.max, one.mean, one.std, one.norm)]
    if not one.is_read:
        odd = ["values not known"]
    return [one.name, Span(one.dtype, "dim"), *values, zeros if one.is_read else "", Span(", ".join(odd), "warning")]


def _number(value: float | int | None) -> str:
    return "–" if value is None else f"{value:.4g}"
