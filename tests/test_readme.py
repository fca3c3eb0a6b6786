"""The README's commands do what they say, in a folder with the files that they name."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

import anyckpt
from anyckpt.cli import main

README = (Path(__file__).parent.parent / "README.md").read_text()
BLOCKS = re.findall(r"<!-- run -->\n```sh\n(.*?)```", README, re.DOTALL)
DIFFERENT = {"anyckpt verify ./zero --for 'deepspeed dp=8'": 1}
"""Commands whose answer is no: that checkpoint is of 2 ranks."""


@pytest.fixture
def folder(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a user with a training checkpoint, its Hugging Face folder and a DeepSpeed run would be."""
    for path in (data / "trainer").iterdir():
        shutil.copy(path, tmp_path)
    anyckpt.convert(tmp_path / "checkpoint.pt", tmp_path / "model", to="hf")
    anyckpt.convert(tmp_path / "checkpoint.pt", tmp_path / "zero", to="deepspeed", world=2)
    shutil.copytree(tmp_path / "zero", tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("block", range(len(BLOCKS)))
def test_every_command_of_the_readme_runs(block: int, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line.partition("  #")[0].strip() for line in BLOCKS[block].splitlines() if line.strip()]
    assert lines
    for line in lines:
        words = shlex.split(line)
        assert words[0] == "anyckpt"
        assert main(words[1:]) == DIFFERENT.get(shlex.join(words), 0), f"{line}\n{capsys.readouterr()}"


def test_the_python_of_the_readme_gives_what_it_says(data: Path) -> None:
    checkpoint = anyckpt.open(data / "trainer" / "checkpoint.pt")
    assert checkpoint.step == 40
    weight = checkpoint.weights["model.embed_tokens.weight"]
    assert (weight.shape, weight.dtype.name) == ((96, 16), "float32")
    assert weight[:2].numpy().shape == (2, 16)
    assert checkpoint.optimizer is not None
    assert "model.norm.weight" in checkpoint.optimizer.slots["exp_avg"]
