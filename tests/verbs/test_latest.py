"""The newest checkpoint of a run, and the newest whole one, whatever the layout."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from anyckpt.core.checkpoint import Checkpoint
from anyckpt.core.tensor import from_array
from anyckpt.verbs.convert import convert
from anyckpt.verbs.latest import latest


def test_an_unfinished_step_is_passed_over_with_why(corpus: Path) -> None:
    run = corpus / "hostile/dir_hf_trainer_half/files/run"
    assert latest(run).path == str(run / "checkpoint-20")
    found = latest(run, complete=True)
    assert (found.path, found.step, found.is_whole) == (str(run / "checkpoint-10"), 10, True)
    assert "trainer_state.json" in found.passed_over[0][1]


def test_a_file_of_zeros_is_passed_over(corpus: Path) -> None:
    run = corpus / "hostile/dir_lightning_zero_ckpt/files/run"
    assert latest(run, complete=True).path == str(run / "epoch=0.ckpt")


def save(path: Path, n: int) -> None:
    weights = {"w": from_array(np.zeros((n, 2), np.float32))}
    convert(Checkpoint("memory", "m", weights), path, to="dcp", world=2)


def test_steps_count_as_numbers_and_a_save_without_metadata_is_not_whole(tmp_path: Path) -> None:
    for step in (90, 100, 1000):
        save(tmp_path / f"step_{step}", 4)
    (tmp_path / "step_1000" / ".metadata").unlink()
    (tmp_path / "step_2000.tmp").mkdir()
    assert latest(tmp_path).step == 1000
    assert latest(tmp_path, complete=True).step == 100


def test_a_tracker_that_names_another_is_told(tmp_path: Path) -> None:
    save(tmp_path / "step_1", 4)
    save(tmp_path / "step_2", 4)
    (tmp_path / "latest").write_text("step_1\n")
    assert [f.code for f in latest(tmp_path).findings] == ["bad-tracker"]


def test_an_empty_run_has_none(tmp_path: Path) -> None:
    found = latest(tmp_path, complete=True)
    assert (found.path, found.n_candidates) == ("", 0)
    shutil.rmtree(tmp_path)
