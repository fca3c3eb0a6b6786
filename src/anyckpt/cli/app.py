"""The command table. A command's module is imported only when it is run, so that `--version` starts in milliseconds."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import Any

import click

from anyckpt import __version__
from anyckpt.cli import errors
from anyckpt.cli.output import Output

SECTIONS: dict[str, dict[str, str]] = {
    "Look": {
        "inspect": "What it is, whether it is whole and safe, what is in it, how to load it (the default).",
        "identify": "Name the format, by content.",
        "verify": "Check that it is whole and sound; --deep reads every value.",
        "scan": "Say what a loader would have to import, for every file under a path.",
        "diff": "Compare two checkpoints of any formats: names, shapes, values.",
        "stat": "Statistics of the values of each tensor.",
        "du": "Where the bytes are.",
        "show": "Print the values of one tensor or a part of it.",
        "latest": "The newest checkpoint of a run; --complete: the newest whole one.",
        "manifest": "List files and tensors with their digests.",
    },
    "Make": {
        "convert": "Write it in another format.",
        "reshard": "Write its training state for another number of ranks.",
        "cast": "Write it in another dtype.",
        "prune": "Keep the weights, leave training state out.",
        "sanitize": "Write a file that loads with weights_only=True.",
        "set": "Change the metadata of a GGUF file.",
    },
    "Learn": {
        "explain": "What a finding's code means and what to do about it.",
        "formats": "What is read and written, and the command for a pair of formats.",
        "completion": "Print the completion script for bash, zsh or fish.",
    },
}
COMMANDS = {name: line for section in SECTIONS.values() for name, line in section.items()}


class Commands(click.Group):
    """The group of all verbs; `anyckpt PATH` is `anyckpt inspect PATH`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command: click.Command = import_module(f"anyckpt.cli.{name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for section, commands in SECTIONS.items():
            with formatter.section(section):
                formatter.write_dl(list(commands.items()))

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        first = next((a for a in args if not a.startswith("-")), None)
        if first is not None and first not in COMMANDS:
            if not _is_path(first) and (near := get_close_matches(first, COMMANDS, 1)):
                raise click.UsageError(f"there is no verb or path {first!r}; did you mean {near[0]!r}?", ctx)
            args = ["inspect", *args]
        return super().parse_args(ctx, args)

    def main(self, args: Sequence[str] | None = None, *_: Any, **settings: Any) -> Any:
        """Run and exit with the status; every exception that no command told about is told here."""
        given = list(sys.argv[1:] if args is None else args)
        out = Output("error", "json" if "--json" in given else "human", "--debug" in given)
        settings["standalone_mode"] = False
        try:
            status = super().main(given, **settings)
            sys.stdout.flush()
        except (BrokenPipeError, SystemExit):  # click itself turns a broken pipe into SystemExit
            _discard_output()
            status = 128 + 13  # as a program that SIGPIPE ended
        except click.exceptions.Exit as done:
            status = done.exit_code
        except BaseException as error:
            status = errors.tell(error, out)
        sys.exit(status if isinstance(status, int) else 0)


def _is_path(word: str) -> bool:
    return os.path.lexists(word) or "/" in word or os.sep in word or "." in word


def _discard_output() -> None:
    """Point stdout at nothing, so that the interpreter's last flush does not complain about the pipe again."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):
        pass


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    no_args_is_help=True,
    epilog="Exit status: 0 fine, 1 the answer is no, 2 could not be done.",
)
@click.version_option(__version__, "-V", "--version", prog_name="anyckpt", message="%(prog)s %(version)s")
def cli() -> None:
    """Look at, check, compare and convert model checkpoints of every format.

    Nothing from a checkpoint is ever executed or imported.

    anyckpt PATH shows all there is to know about it on one screen.
    """


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    gc.set_threshold(200_000, 20, 50)  # descriptions of a million tensors hold no cycles worth looking for every time
    try:
        cli.main(arguments, prog_name="anyckpt")
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else 0
    return 0
