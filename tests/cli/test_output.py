"""The sink: nothing from a file acts on the terminal, colour only where it is wanted, columns that line up."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anyckpt.cli.numbers import count, percent
from anyckpt.cli.options import size
from anyckpt.cli.output import Output, Span, aligned, wants_color

EVIL = "x\x1b[2Jy\u202ez\n.weight"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_names_from_a_file_are_escaped_everywhere(anyckpt: Callable[..., Any], write: Callable[..., Path]) -> None:
    path = write("m.safetensors", {EVIL: np.array([np.nan], np.float32)})
    for verb in ("inspect", "verify", "scan"):
        options = ["--deep"] if verb == "verify" else []
        said = anyckpt(verb, "--all", *options, path).out
        assert "\x1b" not in said
        assert "\u202e" not in said
    assert "\\x1b" in anyckpt("inspect", path).out
    assert "\x1b" not in anyckpt("inspect", "--json", path).out


def test_style_stays_around_escaped_text(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    Output("inspect").line(Span("a\x1b[1m", "good"))
    assert terminal.getvalue() == "\x1b[32ma\\x1b[1m\x1b[0m\n"


def test_no_color_where_nobody_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert wants_color(Terminal())
    assert not wants_color(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not wants_color(Terminal())


def test_columns_line_up_by_what_is_shown() -> None:
    rows = aligned([["a", "1"], [Span("b\x1b", "good"), "22"]], right=(1,))
    text = ["".join(p.text if isinstance(p, Span) else p for p in row) for row in rows]
    assert text == ["a       1", "b\\x1b  22"]


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [("5GB", 5_000_000_000), ("128M", 128 << 20), ("1.5GiB", 3 << 29), ("1000", 1000), ("2 tb", 2 * 10**12)],
)
def test_sizes(text: str, n_bytes: int) -> None:
    assert size(text) == n_bytes


def test_numbers_for_people() -> None:
    assert [count(n) for n in (0, 999, 1000, 124_439_808, 999_999, 7_241_732_096)] == [
        "0", "999", "1 K", "124 M", "1 M", "7.24 B",
    ]  # fmt: skip
    assert [percent(1, 1000), percent(1, 2), percent(0, 1)] == ["<1 %", "50 %", "0 %"]


def test_version_and_identify_import_neither_numpy_nor_rich(write: Callable[..., Path]) -> None:
    path = write("m.safetensors", {"a": np.ones(2, np.float32)})
    for arguments in (["--version"], ["identify", str(path)], ["explain", "truncated"]):
        code = (
            "import sys; from anyckpt.cli import main; main(sys.argv[1:]); "
            "print(sorted({'numpy', 'rich', 'ml_dtypes'} & set(sys.modules)), file=sys.stderr)"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60, env=os.environ
        )
        assert done.stderr.strip() == "[]", (arguments, done.stderr)
