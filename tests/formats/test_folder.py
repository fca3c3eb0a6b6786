"""Folders of no family: the one checkpoint in them, or the one that the rule takes, or a word on why none."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from anyckpt.errors import CheckpointError, NotACheckpoint


def test_the_one_checkpoint_of_a_folder_is_read_with_the_config_beside_it(data: Path, read: Any) -> None:
    checkpoint, report = read(data / "trainer")
    alone, _ = read(data / "trainer/checkpoint.pt")
    assert set(checkpoint.weights) == set(alone.weights)
    assert checkpoint.step == alone.step == 40
    for one in (checkpoint, alone):
        assert one.config["model_type"] == "llama"
        assert {a.name for a in one.assets} == {"config.json", "tokenizer.json", "tokenizer_config.json"}
    assert not report.errors


def test_of_several_files_the_latest_is_read_and_told(data: Path, tmp_path: Path, read: Any) -> None:
    for step in (9, 10):
        shutil.copy(data / "legacy.pth", tmp_path / f"step_{step}.pth")
    checkpoint, report = read(tmp_path)
    assert checkpoint.facts["file"] == "step_10.pth"
    assert "ambiguous" in [f.code for f in report.findings]


def test_of_a_runs_folders_the_latest_whole_one_is_read(data: Path, tmp_path: Path, read: Any, codes: Any) -> None:
    for step in (5, 10, 20):
        shutil.copytree(data / "sharded", tmp_path / f"checkpoint-{step}")
    (tmp_path / "checkpoint-20/tokenizer.json").unlink()
    checkpoint, report = read(tmp_path)
    assert checkpoint.facts["folder"] == "checkpoint-10"
    assert ["incomplete", "checkpoint-20"] in [[f.code, f.where] for f in report.findings]
    assert "incomplete" in codes(tmp_path)


def test_where_no_rule_decides_none_is_read(data: Path, tmp_path: Path, read: Any) -> None:
    for name in ("actor", "critic"):
        shutil.copytree(data / "sharded", tmp_path / name)
    with pytest.raises(NotACheckpoint, match="several checkpoints: actor, critic"):
        read(tmp_path)


def test_a_folder_of_nothing_is_no_checkpoint(tmp_path: Path, read: Any) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(NotACheckpoint):
        read(tmp_path)


def test_a_link_that_dangles_is_told_as_what_it_is(tmp_path: Path, read: Any) -> None:
    (tmp_path / "weights.pt").symlink_to("gone.pt")
    with pytest.raises(CheckpointError) as caught:
        read(tmp_path)
    assert caught.value.finding.code == "broken-link"


def test_a_dangerous_file_beside_the_checkpoint_counts(data: Path, tmp_path: Path, read: Any) -> None:
    shutil.copy(data / "legacy.pth", tmp_path / "model.pth")
    (tmp_path / "scheduler.bin").write_bytes(b"\x80\x02cos\nsystem\nX\x01\0\0\0x\x85R.")
    assert read(tmp_path)[1].verdict == "dangerous"
