"""`anyckpt set FILE KEY=VALUE …`: change the metadata of a GGUF file."""

from __future__ import annotations

import click

from anyckpt.cli.findings import show_findings
from anyckpt.cli.options import path_argument, size, verb
from anyckpt.cli.output import Output, Span
from anyckpt.io.bounds import byte_count


@verb("set")
@path_argument()
@click.argument("settings", nargs=-1, required=True, metavar="KEY=VALUE…")
@click.option("--max-memory", type=size, metavar="SIZE", default="1G", help="Memory that buffers may take.")
@click.option("-n", "--dry-run", is_flag=True, help="Show what would change and write nothing.")
def command(out: Output, path: str, settings: tuple[str, ...], dry_run: bool, max_memory: int) -> None:
    """Change metadata of the GGUF file PATH: in place where there is room, else by a streamed copy.

    KEY= takes a key out, KEY=@FILE takes a text from a file, and a token id may be given by its token.

    \b
    anyckpt set model.gguf general.name="My model"
    anyckpt set model.gguf tokenizer.chat_template=@template.jinja
    anyckpt set model.gguf tokenizer.ggml.eos_token_id="<|im_end|>"
    """
    from anyckpt.verbs.set_keys import set_keys

    done = set_keys(path, settings, dry_run=dry_run, max_memory=max_memory)
    out.document(done.as_dict())
    show_findings(out, done.findings, {})
    for key, (old, new) in done.changes.items():
        out.line(key, Span(f"  {old if old is not None else '(none)'} → {new if new is not None else '(none)'}", "dim"))
    how = "in place" if done.in_place else "by a copy of the file"
    word = "would write " if dry_run else "wrote "
    out.line(Span(word, "bold" if dry_run else "good"), path, Span(f"  {byte_count(done.bytes_written)}, {how}", "dim"))
