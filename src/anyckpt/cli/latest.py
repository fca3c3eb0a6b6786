"""`anyckpt latest DIR`: the path of the newest checkpoint, alone on stdout."""

from __future__ import annotations

import click

from anyckpt.cli.errors import FINE, NO
from anyckpt.cli.findings import show_findings
from anyckpt.cli.options import path_argument, verb
from anyckpt.cli.output import Output
from anyckpt.finding import Finding
from anyckpt.verbs.latest import latest


@verb("latest")
@path_argument("folder")
@click.option("--complete", is_flag=True, help="Only one that is whole: what was cut short is passed over.")
def command(out: Output, folder: str, complete: bool) -> int:
    """Print the newest checkpoint below FOLDER, of any layout.

    The exit status is 1 where there is none.
    """
    found = latest(folder, complete=complete)
    out.document(found.as_dict())
    passed = (Finding("incomplete", "warning", why, path) for path, why in found.passed_over)
    show_findings(out, (*passed, *found.findings), show_all=True)
    if found.path:
        out.line(found.path)
    return FINE if found.path else NO
