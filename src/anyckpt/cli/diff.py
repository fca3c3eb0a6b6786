"""`anyckpt diff A B`: what two checkpoints of any formats differ in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import click

from anyckpt.cli.errors import FINE, NO
from anyckpt.cli.options import jobs_option, path_argument, verb
from anyckpt.cli.output import Output, Part, Span
from anyckpt.cli.progress import bar
from anyckpt.verbs.compare import ValueDifference
from anyckpt.verbs.diff import Difference, Named, diff

SHOWN = 10


@verb("diff")
@path_argument("a")
@path_argument("b")
@click.option("--state", is_flag=True, help="Optimizer, step and everything else saved too.")
@click.option("--rtol", type=float, default=0.0, help="Relative error that counts as equal.")
@click.option("--atol", type=float, default=0.0, help="Absolute error that counts as equal.")
@click.option("--ignore-dtype", is_flag=True, help="Compare values after the cast to the narrower type.")
@click.option("--strip-prefixes", is_flag=True, help="Let wrapper prefixes count as no difference.")
@click.option("--names-only", is_flag=True, help="Names, shapes and dtypes only; read no values.")
@click.option("--all", "show_all", is_flag=True, help="Print every difference.")
@jobs_option
def command(
    out: Output,
    a: str,
    b: str,
    state: bool,
    rtol: float,
    atol: float,
    ignore_dtype: bool,
    strip_prefixes: bool,
    names_only: bool,
    show_all: bool,
    jobs: int | None,
) -> int:
    """Compare two checkpoints of any formats: names, shapes, dtypes, values. Bit for bit, unless a tolerance is given.

    The exit status is 1 where they differ.
    """
    with bar(out) as shown:
        found = diff(
            a,
            b,
            strip_prefixes=strip_prefixes,
            state=state,
            rtol=rtol,
            atol=atol,
            ignore_dtype=ignore_dtype,
            deep=not names_only,
            jobs=jobs,
            events=partial(shown.update, "comparing") if shown else None,
        )
    out.document(found.as_dict())
    limit = None if show_all else SHOWN
    _only(out, f"only in {a}", found.only_a, limit)
    _only(out, f"only in {b}", found.only_b, limit)
    renamed: list[list[Part]] = [[r.a, Span("is", "dim"), r.b, Span(r.why, "dim")] for r in found.renamed]
    _section(out, "renamed", renamed, limit)
    shapes = {n: (_shape(x), _shape(y)) for n, (x, y) in found.shapes.items()}
    _section(out, "shapes", _pairs(shapes, show_all), limit)
    _section(out, "dtypes", _pairs(found.dtypes, show_all), limit)
    differing = sorted((v for v in found.values if not v.is_equal), key=lambda v: -v.max_abs)
    _section(out, "values", [_value(v) for v in differing], limit)
    _section(out, "other", [[o.what, o.a, Span("→", "dim"), o.b] for o in found.other], limit)
    _close(out, found)
    return FINE if found.is_same else NO


def _only(out: Output, title: str, names: Sequence[Named], limit: int | None) -> None:
    lines: list[list[Part]] = []
    for one in names:
        near = f"nearest: {one.nearest.nearest}" if one.nearest else ""
        lines.append(
            [one.name, one.dtype, _shape(one.shape), Span(f"tied to {one.tied_to}" if one.tied_to else near, "dim")]
        )
    _section(out, title, lines, limit)


def _section(out: Output, title: str, lines: Sequence[Sequence[Part]], limit: int | None) -> None:
    if not lines:
        return
    out.line(Span(title, "head"), Span(f"  {len(lines):,}", "dim"))
    out.table(lines[:limit], indent=2)
    if limit is not None and len(lines) > limit:
        out.line(Span(f"  and {len(lines) - limit:,} more; --all shows them", "dim"))


def _pairs(changes: Mapping[str, tuple[str, str]], show_all: bool) -> list[list[Part]]:
    """A row a tensor; those that change alike in one row, unless all are asked for."""
    alike: dict[tuple[str, str], list[str]] = {}
    for name, pair in changes.items():
        alike.setdefault(pair, []).append(name)
    rows: list[list[Part]] = []
    for (before, after), names in alike.items():
        shown = names if show_all else names[:1]
        more = f"and {len(names) - 1:,} more" if len(names) > len(shown) else ""
        rows += [[before, Span("→", "dim"), after, name, Span(more, "dim")] for name in shown]
    return rows


def _value(one: ValueDifference) -> list[Part]:
    if not one.is_known:
        return [one.name, "bytes differ", Span("the values of this type are not known", "dim")]
    worst = f"at {list(one.worst[0])}: {one.worst[1]} → {one.worst[2]}" if one.worst else ""
    return [
        one.name,
        f"{one.n_different:,} of {one.n_elements:,}",
        f"max error {one.max_abs:.3g}",
        f"relative {one.max_rel:.3g}",
        Span(worst, "dim"),
    ]


def _close(out: Output, found: Difference) -> None:
    how = "values compared" if found.deep else "names, shapes and dtypes only"
    if found.is_same:
        out.line(Span("same", "good"), Span(f": {found.n_same:,} tensors, {how}", "dim"))
    else:
        n_differing = sum(not v.is_equal for v in found.values)
        rounded = [v for v in found.values if v.is_equal and v.after_cast]
        differing = f", {n_differing:,} differ in value" if found.deep else ""
        if rounded:
            largest = max(v.max_abs for v in rounded)
            differing += f", {len(rounded):,} are equal once rounded (largest error {largest:.3g})"
        out.line(Span("different", "error"), Span(f": {found.n_same:,} tensors are the same{differing}; {how}", "dim"))


def _shape(shape: Sequence[int]) -> str:
    return " × ".join(map(str, shape)) or "scalar"
