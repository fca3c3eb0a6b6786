"""`anyckpt verify PATH`: the answer in one line, then the findings, the worst first."""

from __future__ import annotations

from functools import partial

import click

from anyckpt.cli.errors import FINE, NO
from anyckpt.cli.findings import show_findings
from anyckpt.cli.options import jobs_option, path_argument, verb
from anyckpt.cli.output import Output, Span
from anyckpt.cli.progress import bar
from anyckpt.io.bounds import byte_count
from anyckpt.verbs.verify import Verification, verify


@verb("verify")
@path_argument()
@click.option("--deep", is_flag=True, help="Read every value too: checksums, NaN and infinity, runs of zeros.")
@click.option("--strict", is_flag=True, help="Let warnings count as errors.")
@click.option("--for", "resume", metavar="LAYOUT", help='Can training go on from it there? For example "fsdp world=8".')
@click.option("--all", "show_all", is_flag=True, help="Print every finding.")
@jobs_option
def command(
    out: Output, path: str, deep: bool, strict: bool, resume: str | None, show_all: bool, jobs: int | None
) -> int:
    """Check that a checkpoint is whole, sound and safe.

    Without --deep only headers, sizes and indexes are read, which takes a moment whatever the size. The exit status is
    1 where there is an error or the verdict is dangerous.
    """
    with bar(out) as shown:
        events = partial(shown.update, "reading") if shown else None
        found = verify(path, deep=deep, strict=strict, resume=resume, jobs=jobs, events=events)
    out.document(found.as_dict())
    _answer(out, found)
    if found.resume is not None and found.resume.can:
        out.line(Span("resumes", "good"), f" as {found.resume.wanted}", Span(f": {found.resume.why}", "dim"))
    show_findings(out, found.findings, found.suppressed, path=path, show_all=show_all)
    return FINE if found.ok else NO


def _answer(out: Output, found: Verification) -> None:
    verdict_style = {"safe": "good", "unknown": "warning", "dangerous": "error"}[found.verdict]
    facts = [f"{found.n_tensors:,} tensors" if found.format else "not a checkpoint", found.format or "unknown format"]
    if found.deep:
        facts.append(f"{byte_count(found.bytes_read)} read in {found.seconds:.1f} s")
    elif found.ok:
        facts.append("headers only; --deep reads the values too")
    head = Span("sound", "good") if found.ok else Span("not sound", "error")
    if found.verdict == "dangerous":
        head = Span("do not load", "error")
    out.line(head, ", ", Span(found.verdict, verdict_style), Span(" · " + " · ".join(facts), "dim"))
