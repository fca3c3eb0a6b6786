"""`anyckpt completion SHELL`: the script that completes verbs and options in a shell."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from anyckpt.cli.options import verb
from anyckpt.cli.output import Output


@verb("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(out: Output, shell: str) -> None:
    """Print the completion script of SHELL.

    \b
    bash:  eval "$(anyckpt completion bash)"      in ~/.bashrc
    zsh:   eval "$(anyckpt completion zsh)"       in ~/.zshrc
    fish:  anyckpt completion fish | source       in ~/.config/fish/config.fish
    """
    from anyckpt.cli.app import cli

    kind = get_completion_class(shell)
    if kind is None:
        raise click.UsageError(f"no completion for {shell}")
    script = kind(cli, {}, "anyckpt", "_ANYCKPT_COMPLETE").source()
    out.document({"shell": shell, "script": script})
    out.text(script)
