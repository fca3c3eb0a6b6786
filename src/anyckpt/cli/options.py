"""Options that many commands share, and the decorator that makes a function a command."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import update_wrapper
from typing import Any

import click

from anyckpt.cli import errors
from anyckpt.cli.output import Output

Function = Callable[..., Any]
_UNITS = {
    "": 1,
    "b": 1,
    **{f"{u}b": 1000**i for i, u in enumerate("kmgt", 1)},
    **{spelling: 1024**i for i, u in enumerate("kmgt", 1) for spelling in (u, f"{u}ib")},
}


def size(text: str) -> int:
    """A number of bytes: `5GB` (decimal, as shard sizes are), `128M` and `128MiB` (binary, as memory is).

    >>> size("5GB"), size("128M")
    (5000000000, 134217728)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if match is None or match[2] not in _UNITS:
        raise click.BadParameter(f"{text!r} is not a size; write it as 5GB, 128M or 2GiB")
    return int(float(match[1]) * _UNITS[match[2]])


def verb(name: str, **settings: Any) -> Callable[[Function], click.Command]:
    """Make `function(out, …) -> exit status or None` the command `name`, with the options that every command has.

    Faults that are foreseen are told in the form the user asked for, and become the exit status.
    """

    def decorate(function: Function) -> click.Command:
        def run(as_json: bool, quiet: bool, debug: bool, **options: Any) -> None:
            out = Output(name, "json" if as_json else "quiet" if quiet else "human", debug)
            try:
                status = function(out, **options)
            except (click.exceptions.Exit, click.ClickException, BrokenPipeError):
                raise
            except BaseException as error:
                status = errors.tell(error, out)
            click.get_current_context().exit(status or errors.FINE)

        update_wrapper(run, function)  # the help text, and the options that stand below the decorator
        for option in (
            click.option("--debug", is_flag=True, help="Show the traceback of what goes wrong."),
            click.option("-q", "--quiet", is_flag=True, help="Print errors only; the exit status tells."),
            click.option("--json", "as_json", is_flag=True, help="Print one JSON document."),
        ):
            option(run)
        return click.command(name, cls=click.Command, **settings)(run)

    return decorate


def path_argument(name: str = "path") -> Callable[[Function], Function]:
    """A file or folder that is read."""
    return click.argument(name, type=click.Path(), metavar=name.upper())


def jobs_option(function: Function) -> Function:
    """How many threads may work at once."""
    return click.option("-j", "--jobs", type=click.IntRange(1, 256), help="Threads (default: as the machine has).")(
        function
    )
