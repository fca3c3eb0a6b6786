"""Metadata of a GGUF file is changed in place where it fits, and no tensor moves."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import anyckpt
from anyckpt.errors import UsageError
from anyckpt.verbs.set_keys import set_keys


@pytest.fixture
def model(official: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(official / "llama" / "model.gguf", tmp_path / "m.gguf"))


def test_a_number_is_set_in_place_and_back_to_the_same_bytes(model: Path) -> None:
    before = model.read_bytes()
    done = set_keys(model, ["llama.context_length=512"])
    assert done.in_place
    assert done.changes["llama.context_length"] == ("256", "512")
    assert anyckpt.open(model).facts["gguf"]["llama.context_length"] == 512
    set_keys(model, ["llama.context_length=256"])
    assert model.read_bytes() == before
    assert [p.name for p in model.parent.iterdir()] == ["m.gguf"]


def test_what_does_not_fit_is_written_to_a_copy_that_takes_its_place(model: Path) -> None:
    want = {n: t.tobytes() for n, t in anyckpt.open(model).weights.items()}
    done = set_keys(model, ["tokenizer.chat_template=" + "{{ messages }}" * 50, "general.name="])
    assert not done.in_place
    found = anyckpt.open(model)
    assert found.facts["gguf"]["tokenizer.chat_template"] == "{{ messages }}" * 50
    assert "general.name" not in found.facts["gguf"]
    assert {n: t.tobytes() for n, t in found.weights.items()} == want


def test_a_special_id_may_be_given_by_its_token(model: Path) -> None:
    set_keys(model, ["tokenizer.ggml.eos_token_id=<s>"])
    assert anyckpt.open(model).facts["gguf"]["tokenizer.ggml.eos_token_id"] == 1


@pytest.mark.parametrize(
    "setting", ["llama.context_length=many", "llama.context_length=-1", "general.alignment=64", "nothing"]
)
def test_a_value_that_makes_no_sense_changes_nothing(setting: str, model: Path) -> None:
    before = model.read_bytes()
    with pytest.raises(UsageError):
        set_keys(model, [setting])
    assert model.read_bytes() == before


def test_a_dry_run_writes_nothing(model: Path) -> None:
    before = model.read_bytes()
    assert set_keys(model, ["llama.context_length=512"], dry_run=True).changes
    assert model.read_bytes() == before


def test_a_job_killed_while_the_header_was_written_is_undone(model: Path) -> None:
    before = model.read_bytes()
    from anyckpt.finding import Report
    from anyckpt.formats.gguf.header import read_header
    from anyckpt.io.local import open_local

    start = read_header(open_local(model), Report()).data_start
    model.with_name(model.name + ".anyckpt-header").write_bytes(before[:start])
    model.write_bytes(before[:40] + bytes(100) + before[140:])
    set_keys(model, ["llama.context_length=512"])
    set_keys(model, ["llama.context_length=256"])
    assert model.read_bytes() == before
