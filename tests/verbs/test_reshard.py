"""Resharding: what is not asked for stays, what makes no sense is told, and `verify --for` names the command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from anyckpt.errors import UsageError
from anyckpt.verbs.open import open as open_checkpoint
from anyckpt.verbs.prune import prune
from anyckpt.verbs.reshard import reshard
from anyckpt.verbs.resume import judge


@pytest.fixture
def zero2(data: Path) -> Path:
    return data / "deepspeed" / "zero2"


def test_sizes_that_are_not_given_stay(zero2: Path, tmp_path: Path) -> None:
    reshard(zero2, tmp_path / "out", dp=3)
    topology = open_checkpoint(tmp_path / "out").topology
    assert topology is not None and (topology.dp, topology.zero) == (3, 2)


def test_nothing_asked_for_is_told(zero2: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no size"):
        reshard(zero2, tmp_path / "out")


def test_a_format_that_is_not_sharded_is_told(data: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a sharded format"):
        reshard(data / "trainer" / "checkpoint.pt", tmp_path / "out", dp=2)


def test_a_zero_stage_makes_deepspeed_of_a_training_loop(data: Path, tmp_path: Path) -> None:
    written = reshard(data / "trainer" / "checkpoint.pt", tmp_path / "out", dp=2, zero=3)
    assert written.format == "deepspeed"


def test_pruned_of_training_state_it_is_an_ordinary_model(zero2: Path, tmp_path: Path) -> None:
    assert prune(zero2, tmp_path / "out").format == "hf"


@pytest.mark.parametrize(
    ("asked", "can", "command"),
    [
        ("deepspeed dp=2 zero=2", True, ""),
        ("deepspeed zero=1", True, ""),
        ("deepspeed dp=8", False, "--dp 8 --zero 2"),
        ("deepspeed dp=2 zero=3", False, "--dp 2 --zero 3"),
        ("deepspeed world=6", False, "--dp 6"),
    ],
)
def test_whether_deepspeed_resumes_is_answered(zero2: Path, asked: str, can: bool, command: str) -> None:
    answer = judge(open_checkpoint(zero2), asked)
    assert answer.can is can
    assert command in answer.command


def test_the_command_line_tells_the_same(zero2: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "anyckpt", "reshard", str(zero2), str(tmp_path / "out")]
    done = subprocess.run([*command, *"--dp 5 --zero 3 --json".split()], capture_output=True, text=True, check=True)
    document = json.loads(done.stdout)
    assert document["format"] == "deepspeed"
    assert sum(file["name"].endswith("_optim_states.pt") for file in document["files"]) == 5
