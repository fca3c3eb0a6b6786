"""What the verbs that write have in common: their options, and what is told when they are done."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import click

from anyckpt.cli.findings import show_findings
from anyckpt.cli.options import jobs_option, size
from anyckpt.cli.output import Output, Span
from anyckpt.cli.progress import Bar, Stage, bar
from anyckpt.io.bounds import byte_count

if TYPE_CHECKING:
    from anyckpt.verbs.write import Written

MAX_FILES_SHOWN = 12


def maker_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options of every verb that writes a destination."""
    for option in (
        jobs_option,
        click.option(
            "--max-memory",
            type=size,
            metavar="SIZE",
            default="1G",
            show_default=True,
            help="Memory that buffers may take.",
        ),
        click.option("--prove", is_flag=True, help="Compare every byte written with the source afterwards."),
        click.option("--force", is_flag=True, help="Replace an existing destination, once the new one is whole."),
        click.option("-n", "--dry-run", is_flag=True, help="Show the plan and write nothing."),
    ):
        function = option(function)
    return function


def gguf_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Options that GGUF has and no other format."""
    for option in (
        click.option("--allow-lossy", is_flag=True, help="Let a step lose values that no later one can restore."),
        click.option("--base", type=click.Path(), metavar="FOLDER", help="GGUF: the model of an adapter."),
        click.option("--pre", metavar="NAME", help="GGUF: how the tokenizer cuts text (default: by its definition)."),
        click.option("--model-name", metavar="NAME", help="GGUF: the model's name (default: as its files say)."),
        click.option("--split-max-size", type=size, metavar="SIZE", help="GGUF: write a folder of such files."),
        click.option(
            "--tensor-type", multiple=True, metavar="PATTERN=TYPE", help="GGUF: the type of tensors whose name matches."
        ),
        click.option("--imatrix", type=click.Path(), metavar="FILE", help="GGUF: an importance matrix."),
        click.option("--quant", metavar="TYPE", help="GGUF: q4_k_m, q8_0, f16 … (default: 16 bits as the source has)."),
    ):
        function = option(function)
    return function


def make(out: Output, function: Callable[..., Any], source: str, destination: str, options: Mapping[str, Any]) -> None:
    """Run a verb that writes, with a bar, and tell what it wrote."""
    with bar(out) as shown:
        done = function(source, destination, events=shown and _events(shown), **options)
    describe(out, done)


def _events(shown: Bar) -> Callable[[Stage], None]:
    words = {"write": "writing", "prove": "comparing"}
    return lambda now: shown.update(words.get(now.stage, now.stage), now.done, now.total)


def describe(out: Output, done: Written) -> None:
    """Tell what was written, or would be: files, bytes, speed, what was proved, what was saved, and findings."""
    out.document(done.as_dict())
    is_meant = "bytes_saved" in done.extra  # pruning leaves state behind on purpose
    told = [f for f in done.findings if f.severity != "note" or (f.code == "lossy" and not is_meant)]
    show_findings(out, told, show_all=True)
    if len(done.files) > 1:
        shown = done.files[:MAX_FILES_SHOWN]
        out.table([[name, Span(byte_count(size), "dim")] for name, size in shown], right=(1,), indent=2)
        if len(done.files) > len(shown):
            out.line(Span(f"  and {len(done.files) - len(shown):,} more files", "dim"))
    size = byte_count(done.bytes_out)
    if done.dry_run:
        facts = (
            f"  {done.n_tensors:,} tensors, {size}, memory at most {byte_count(done.peak_bytes)}; nothing was written"
        )
        out.line(Span("would write ", "bold"), done.destination, Span(facts, "dim"))
        return
    took = f" in {done.seconds:.1f} s" if done.seconds >= 0.1 else ""
    speed = f" at {byte_count(int(done.bytes_out / done.seconds))}/s" if took else ""
    resumed = f" ({byte_count(done.resumed_bytes)} were there from an earlier run)" if done.resumed_bytes else ""
    proved = "every byte compared with the source" if done.proved else "read back and checked"
    facts = f"  {done.n_tensors:,} tensors, {size}{took}{speed}{resumed}; {proved}"
    out.line(Span("wrote ", "good"), done.destination, Span(facts, "dim"))
    saved, before = done.extra.get("bytes_saved"), done.extra.get("bytes_before")
    if saved and before:
        out.line(Span("saved ", "good"), f"{byte_count(saved)} of {byte_count(before)} ({saved * 100 // before} %)")
    out.table([[row["place"], Span(row["what"], "dim")] for row in done.extra.get("replaced", ())], indent=2)
