"""The one sink: every command writes through an `Output`, and nothing else in the package prints.

Data goes to stdout, messages to stderr. Whatever comes from a file is escaped here, not by the commands: text reaches
the terminal as spans of (text, style), the text is made printable, and only then is the style put around it.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, Literal

import click

from anyckpt.io.paths import printable

if TYPE_CHECKING:
    from anyckpt.finding import Finding

Mode = Literal["human", "json", "quiet"]
LONGEST_LINE = 4000  # characters of one line that a hostile name may fill

STYLES: Mapping[str, Mapping[str, Any]] = {
    "": {},
    "bold": {"bold": True},
    "dim": {"dim": True},
    "head": {"fg": "cyan"},
    "good": {"fg": "green"},
    "error": {"fg": "red", "bold": True},
    "warning": {"fg": "yellow"},
    "note": {"fg": "blue"},
}


@dataclass(frozen=True, slots=True)
class Span:
    """Text in one style of `STYLES`."""

    text: str
    style: str = ""


Part = str | Span


@dataclass(frozen=True, slots=True)
class Output:
    """Where a command's results go, and in which form.

    `mode`: "human" text, one "json" document, or "quiet" (errors only). `debug` shows tracebacks of what goes wrong.
    """

    verb: str
    mode: Mode = "human"
    debug: bool = False

    def line(self, *parts: Part, indent: int = 0) -> None:
        """Write one line of human output to stdout; control characters in it are escaped."""
        if self.mode == "human":
            _write(sys.stdout, parts, indent)

    def labelled(self, label: str, *parts: Part, width: int = 11) -> None:
        """Write `parts` after a label of `width` columns, broken between words where the line is full."""
        if self.mode != "human":
            return
        first: list[Part] = [Span(label.ljust(width), "head")]
        for line in broken(parts, max(40, columns() - width)):
            _write(sys.stdout, [*first, *line], 0)
            first = [" " * width]

    def text(self, text: str) -> None:
        """Write text of our own as it is, to be read by a program."""
        if self.mode != "json":
            click.echo(text, file=sys.stdout)

    def wrapped(self, text: str, *, first: str = "", style: str = "", indent: int = 0) -> None:
        """Write running text, broken at the width of the terminal, after the label `first`."""
        if self.mode == "human":
            _wrap(sys.stdout, text, first, style, indent)

    def table(self, rows: Iterable[Sequence[Part]], *, right: Sequence[int] = (), indent: int = 0) -> None:
        """Write aligned columns; those in `right` are set flush right. The last column is not padded."""
        if self.mode == "human":
            for row in aligned(rows, right=right):
                _write(sys.stdout, row, indent)

    def document(self, record: Mapping[str, Any]) -> None:
        """Write the command's JSON document, in the mode that wants one."""
        if self.mode == "json":
            whole = {"schema": f"anyckpt.{self.verb}/1", **record}
            text = json.dumps(plain(whole), indent=2, allow_nan=False)
            click.echo(text, file=sys.stdout)

    def message(self, *parts: Part) -> None:
        """Write one line for a person to stderr, unless they asked for quiet or for JSON."""
        if self.mode == "human":
            _write(sys.stderr, parts, 0)

    def finding(self, finding: Finding, *, file: IO[str] | None = None) -> None:
        """Write a finding in the error layout: what [code], at where, hint."""
        if self.mode == "human":
            trouble(file or sys.stdout, finding.severity, finding.message, finding.code, finding.where, finding.hint)


def trouble(file: IO[str], label: str, message: str, code: str = "", where: str = "", hint: str = "") -> None:
    """Write what went wrong, where, and what to do about it; fields that are empty are left out."""
    style = label if label in STYLES else "error"
    _wrap(file, message + (f" [{code}]" if code else ""), f"{label}: ", style, 0)
    for name, text in (("at", where), ("hint", hint)):
        if text:
            _wrap(file, text, f"{name}: ".rjust(len("error: ")), "dim", 0)


def aligned(rows: Iterable[Sequence[Part]], *, right: Sequence[int] = (), gap: int = 2) -> list[list[Part]]:
    """Pad the cells of a table so that its columns line up."""
    table = [[_span(cell) for cell in row] for row in rows]
    n_columns = max(map(len, table), default=0)
    widths = [max((len(row[i].text) for row in table if i < len(row)), default=0) for i in range(n_columns)]
    out: list[list[Part]] = []
    for row in table:
        line: list[Part] = []
        for i, cell in enumerate(row):
            padding = " " * (widths[i] - len(cell.text))
            if i in right:
                line += [padding, cell]
            elif i < len(row) - 1:
                line += [cell, padding]
            else:
                line.append(cell)
            if i < len(row) - 1:
                line.append(" " * gap)
        out.append(line)
    return out


def broken(parts: Iterable[Part], width: int) -> list[list[Part]]:
    """Break a line between words so that each has at most `width` columns, where words allow; styles go along."""
    lines: list[list[Part]] = [[]]
    used = 0
    for span in map(_span, parts):
        for word in re.findall(r" *[^ ]+| +$", span.text):
            if used and used + len(word) > width:
                lines.append([])
                used, word = 0, word.lstrip(" ")
            lines[-1].append(Span(word, span.style))
            used += len(word)
    return lines


def shortened(text: str, width: int) -> str:
    """`text` with its middle left out where it has more than `width` columns.

    >>> shortened("model.layers.0.weight", 12)
    'model.…eight'
    """
    if len(text) <= width:
        return text
    left = (width - 1 + 1) // 2
    return f"{text[:left]}…{text[len(text) - (width - 1 - left) :]}"


def _span(part: Part) -> Span:
    """The span with its text made printable, so that its length is what the terminal shows."""
    span = part if isinstance(part, Span) else Span(part)
    return Span(printable(span.text, limit=LONGEST_LINE), span.style)


def _write(file: IO[str], parts: Iterable[Part], indent: int) -> None:
    color = wants_color(file)
    text = "".join(
        click.style(span.text, **STYLES[span.style]) if color and span.style and span.text else span.text
        for span in map(_span, parts)
    )
    click.echo(" " * indent + text.rstrip() if not color else " " * indent + text, file=file, color=color)


def _wrap(file: IO[str], text: str, first: str, style: str, indent: int) -> None:
    shown = printable(text, limit=LONGEST_LINE)
    width = max(40, columns() - indent)
    lines = textwrap.wrap(shown, width - len(first), break_on_hyphens=False, break_long_words=False) or [""]
    for i, line in enumerate(lines):
        _write(file, [Span(first, style) if i == 0 else " " * len(first), line], indent)


def columns() -> int:
    """The width of the terminal; 100 where there is none."""
    return min(shutil.get_terminal_size((100, 24)).columns, 120)


def rows() -> int:
    """The height of the terminal; 40 where there is none."""
    return shutil.get_terminal_size((100, 40)).lines


def wants_color(file: IO[str]) -> bool:
    """Whether to colour: on a terminal, unless NO_COLOR is set (no-color.org) or the terminal is dumb."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return file.isatty()


def plain(value: Any) -> Any:
    """`value` as JSON can hold it: text keys, lists, and "NaN", "Infinity", "-Infinity" as text."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Iterable) and not isinstance(value, bytes):
        return [plain(item) for item in value]
    return str(value)
