"""The support matrix says what is so: every row that claims to write is written, read back, and compared."""

from __future__ import annotations

from pathlib import Path

import pytest

import anyckpt
from anyckpt.cli.formats import as_markdown
from anyckpt.formats.table import ROWS, Format
from anyckpt.verbs.matrix import matrix

README = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- formats: begin", "<!-- formats: end -->"


def test_the_readme_shows_the_matrix_as_it_is() -> None:
    text = README.read_text()
    shown = text[text.index(BEGIN) : text.index(END)].splitlines()[1:]
    assert [line for line in shown if line] == as_markdown(matrix()), "run: anyckpt formats --markdown"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_row_has_what_it_claims(row: Format) -> None:
    module = row.load()
    assert callable(module.matches)
    assert hasattr(module, "read") == ("read as" not in row.title)
    assert bool(row.writes) == hasattr(module, "write"), f"{row.name}: writes={row.writes!r}"


@pytest.mark.parametrize("row", [row for row in ROWS if row.writes], ids=lambda row: row.name)
def test_every_written_format_is_read_back_equal_from_a_training_checkpoint(
    row: Format, data: Path, tmp_path: Path
) -> None:
    source = data / "trainer" / "checkpoint.pt"
    out = tmp_path / ("out" if row.writes == "folder" else f"out{row.endings[0]}")
    options = CASES.get(row.name, {})
    anyckpt.convert(source, out, to=row.name, **options)
    got, want = anyckpt.open(out), anyckpt.open(source)
    if row.name in RENAMED:
        got = got.view("hf")
    for name, tensor in want.weights.items():
        found = got.weights.get(name) or got.weights[got.aliases[name]]
        assert found.tobytes() == tensor.tobytes(), name
    if row.training:
        assert got.optimizer is not None
        assert want.optimizer is not None
        for parameter, tensor in want.optimizer.slots["exp_avg"].items():
            assert got.optimizer.slots["exp_avg"][parameter].tobytes() == tensor.tobytes(), parameter


CASES: dict[str, dict[str, object]] = {"gguf": {"quant": "f32"}, "gguf-folder": {"quant": "f32"}}
"""What a format must be told beside the source."""
RENAMED: frozenset[str] = frozenset({"gguf", "gguf-folder", "megatron", "megatron-dist"})
"""Formats whose own names are not those of the source; their view `hf` gives those back."""

