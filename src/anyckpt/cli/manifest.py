"""`anyckpt manifest PATH`: SHA-256 of every file, in the form that `sha256sum -c` reads."""

from __future__ import annotations

from functools import partial

import click

from anyckpt.cli.options import jobs_option, path_argument, verb
from anyckpt.cli.output import Output
from anyckpt.cli.progress import bar
from anyckpt.verbs.manifest import manifest


@verb("manifest")
@path_argument()
@click.option("--tensors", is_flag=True, help="A digest of each tensor's values too, which conversions keep.")
@jobs_option
def command(out: Output, path: str, tensors: bool, jobs: int | None) -> None:
    """Print the SHA-256 of every file at or under PATH.

    Inside a folder, `anyckpt manifest . > SHA256SUMS` makes what `sha256sum -c` and `anyckpt verify --deep` check.
    """
    with bar(out) as shown:
        events = partial(shown.update, "reading") if shown else None
        found = manifest(path, tensors=tensors, jobs=jobs, events=events)
    out.document(found.as_dict())
    for file in found.files:
        if file.name != "SHA256SUMS":
            out.line(f"{file.sha256}  {file.name}")
    for tensor in found.tensors:
        out.line(f"# {tensor.sha256}  {tensor.name}")
