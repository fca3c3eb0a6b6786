"""`anyckpt PATH`: everything worth knowing about a checkpoint, on one screen."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import click

from anyckpt.cli.errors import FINE, NO
from anyckpt.cli.findings import show_findings
from anyckpt.cli.numbers import count, percent
from anyckpt.cli.options import path_argument, verb
from anyckpt.cli.output import Output, Part, Span, columns, rows, shortened
from anyckpt.io.bounds import byte_count
from anyckpt.io.paths import printable
from anyckpt.verbs.fold import Fold
from anyckpt.verbs.inspect import Inspection, inspect

MIN_TREE_ROWS = 6
LABEL = 11  # columns of the labels on the left
VERDICT = {
    "safe": ("good", "nothing in it asks for code"),
    "unknown": ("warning", "it names classes that are not known to be harmless"),
    "dangerous": ("error", "it would run code in whatever loads it"),
}


@verb("inspect")
@path_argument()
@click.option("--all", "show_all", is_flag=True, help="Print every tensor, finding and note.")
def command(out: Output, path: str, show_all: bool) -> int:
    """Show what PATH is, whether it is whole and safe, what is in it, and how to load it.

    Only headers are read. Layers that repeat are folded. The exit status is 1 where there is an error or the verdict is
    dangerous.
    """
    found = inspect(path)
    out.document(found.as_dict())
    head, tail = _head(found), _tail(found)
    wanted = [f for f in found.findings if show_all or f.severity != "note"]
    out.line(Span(found.path, "bold"), "  ", found.title, Span(f"  {byte_count(found.sizes.on_disk)}", "dim"))
    for label, *parts in head:
        out.labelled(label, *parts)
    room = rows() - 4 - len(head) - len(tail) - 3 * len({f.code for f in wanted})
    _show_tree(out, found.tree, None if show_all else max(room, MIN_TREE_ROWS))
    if wanted:
        out.line()
        show_findings(out, wanted, path=found.path, limit=1, show_all=show_all)
    out.line()
    for label, *parts in tail:
        out.labelled(label, *parts)
    _show_next(out, found.next_steps)
    return FINE if found.ok else NO


Row = tuple[Any, ...]  # (label, part, part, …)


def _head(found: Inspection) -> list[Row]:
    rows: list[Row] = [("holds", *_holds(found)), ("state", *_state(found)), ("bytes", *_bytes(found))]
    rows += found.about
    if found.is_training:
        rows.append(("training", *_training(found)))
    if found.resume is not None:
        can = Span("yes", "good") if found.resume.can else Span("no", "warning")
        command = f"; {found.resume.command}" if found.resume.command else ""
        rows.append(("resumes", can, Span(f": {found.resume.why}{command}", "dim")))
    if found.prefixes:
        rows.append(("wrapped", ", ".join(found.prefixes), Span("  --strip-prefixes takes them off", "dim")))
    if found.ties:
        tied, kept = next(iter(found.ties.items()))
        more = f" and {len(found.ties) - 1} more" if len(found.ties) > 1 else ""
        rows.append(("tied", f"{tied} is {kept}", Span(more, "dim")))
    return rows


def _state(found: Inspection) -> Iterable[Part]:
    n_errors = sum(f.severity == "error" and f.code != "dangerous-code" for f in found.findings)
    if n_errors:
        yield Span(f"not whole: {n_errors} error{'s' * (n_errors > 1)}", "error")
        yield ", "
    else:
        yield Span("whole", "good")
        yield " by its headers, "
    style, why = VERDICT[found.verdict]
    yield Span(found.verdict, style)
    yield Span(f": {why}", "dim")


def _holds(found: Inspection) -> Iterable[Part]:
    yield f"{count(found.n_parameters)} parameters in {found.n_tensors:,} tensors"
    if found.model:
        yield f" of {found.model}"
    dtypes = list(found.dtypes.items())
    total = sum(n for _, n in dtypes) or 1
    shown = [name if len(dtypes) == 1 else f"{name} {percent(n, total)}" for name, n in dtypes[:3]]
    if shown:
        yield ", " + ", ".join(shown)
    yield Span(" · training state" if found.is_training else " · weights", "dim")
    if found.framework:
        yield Span(f" of {found.framework}", "dim")
    if found.topology:
        yield Span(f", saved by {found.topology}", "dim")


def _bytes(found: Inspection) -> Iterable[Part]:
    sizes = found.sizes
    total = sizes.on_disk or 1
    parts = [
        ("weights", sizes.weights),
        ("optimizer", sizes.optimizer),
        ("other tensors", sizes.other_tensors),
        ("the rest", sizes.rest),
    ]
    shown = [f"{name} {byte_count(n)} ({percent(n, total)})" for name, n in parts if n]
    yield " · ".join(shown)


def _training(found: Inspection) -> Iterable[Part]:
    words: list[str] = []
    if found.step is not None:
        words.append(f"step {found.step:,}")
    if found.epoch is not None:
        words.append(f"epoch {found.epoch:,}")
    if found.optimizer is not None:
        opt = found.optimizer
        settings = [f"{k} {opt.settings[k]}" for k in ("lr", "weight_decay") if k in opt.settings]
        words.append(f"{opt.kind or 'optimizer'} ({', '.join([*opt.slots, *settings])})")
    if found.has_scheduler:
        words.append("scheduler")
    if found.has_rng:
        words.append("RNG state")
    yield " · ".join(words)
    if found.optimizer is not None and found.optimizer.names_inferred:
        yield Span("  its names are inferred from order and shape", "dim")


def _show_tree(out: Output, tree: tuple[Fold, ...], limit: int | None) -> None:
    """The folded tensors; without a limit all of them with their names in full."""
    if not tree:
        return
    out.line()
    shown = tree if limit is None or len(tree) <= limit else tree[: limit - 1]
    cells = [
        (
            f"×{row.count:,}" if row.count > 1 else "",
            " × ".join(map(str, row.shape)) or "scalar",
            row.dtype,
            byte_count(row.nbytes),
        )
        for row in shown
    ]
    beside = sum(max((len(row[i]) for row in cells), default=0) + 2 for i in range(4)) + 2
    width = max(24, columns() - beside) if limit is not None else None
    lines: list[list[Part]] = []
    for row, (times, shape, dtype, size) in zip(shown, cells, strict=True):
        name = printable(row.name)
        name = shortened(name, width) if width else name
        lines.append([name, Span(times, "good"), shape, Span(dtype, "dim"), Span(size, "dim")])
    out.table(lines, right=(1, 4), indent=2)
    if len(shown) < len(tree):
        rest = tree[len(shown) :]
        n_tensors = sum(row.count for row in rest)
        out.line(Span(f"  and {n_tensors:,} more tensors in {len(rest):,} rows; --all shows them", "dim"))


def _tail(found: Inspection) -> list[Row]:
    how = found.loading
    rows: list[Row] = [("load" if i == 0 else "", code) for i, code in enumerate(how.snippet) if found.ok]
    if how.weights_only is False:
        stands = _some(how.stands_in_the_way, 3) or "the container"
        label = "" if found.ok else "load"
        rows.append((label, Span("weights_only=True refuses it", "warning"), f" for {stands}"))
    elif how.weights_only:
        rows.append(("", Span("weights_only=True takes it", "good")))
    if how.oldest_torch:
        rows.append(("needs", f"torch {how.oldest_torch} or later", Span(f", for {how.because}", "dim")))
    if how.device_note:
        rows.append(("devices", f"saved from {_some(how.devices, 4)}", Span(f": {how.device_note}", "dim")))
    return rows


def _show_next(out: Output, steps: tuple[tuple[str, str], ...]) -> None:
    """Commands in full, to be copied; what each is for beside it, or above it where the line is too long for both."""
    width = max((len(command) for command, _ in steps), default=0)
    beside = all(LABEL + width + 2 + len(what) <= columns() for _, what in steps)
    for i, (command, what) in enumerate(steps):
        label = Span(("next" if i == 0 else "").ljust(LABEL), "head")
        if beside:
            out.line(label, command.ljust(width), Span(f"  {what}", "dim"))
        else:
            out.line(label, Span(f"# {what}", "dim"))
            out.line(" " * LABEL, command)


def _some(names: tuple[str, ...], limit: int) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
