"""0 fine, 1 the answer is no, 2 could not be done; and never a traceback."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

GOOD = {"a.weight": np.arange(6, dtype=np.float32).reshape(2, 3) + 1}


def test_a_sound_file_is_0(anyckpt: Callable[..., Any], write: Callable[..., Path]) -> None:
    path = write("m.safetensors", GOOD)
    for arguments in (["verify", path], ["verify", "--deep", path], [path], ["identify", path], ["scan", path]):
        assert anyckpt(*arguments).status == 0, arguments


def test_a_file_cut_short_is_1_and_says_where(anyckpt: Callable[..., Any], write: Callable[..., Path]) -> None:
    path = write("m.safetensors", GOOD, lambda data: data[:-5])
    for arguments in (["verify", path], ["verify", "--json", path], [path]):
        assert anyckpt(*arguments).status == 1, arguments
    said = anyckpt("verify", path).out
    assert "[truncated]" in said
    assert "missing" in said


def test_no_such_path_is_2_and_one_sentence(anyckpt: Callable[..., Any], tmp_path: Path) -> None:
    for verb in ("inspect", "verify", "scan", "identify"):
        ran = anyckpt(verb, tmp_path / "none")
        assert ran.status == 2, verb
        assert ran.err.startswith("error: ")
        assert "no such file" in ran.err
        assert ran.out == ""


def test_unknown_verbs_and_options_are_2(anyckpt: Callable[..., Any], write: Callable[..., Path]) -> None:
    path = write("m.safetensors", GOOD)
    ran = anyckpt("verfy", path)
    assert ran.status == 2
    assert "did you mean 'verify'?" in ran.err
    assert anyckpt("verify", "--dep", path).status == 2
    assert anyckpt("explain", "zero-tale").err.splitlines()[1] == " hint: did you mean zero-tail?"
    assert anyckpt("convert", path, "out.bin", "--max-shard-size", "much").status == 2


def test_strict_makes_a_warning_count(anyckpt: Callable[..., Any], write: Callable[..., Path]) -> None:
    path = write("m.safetensors", {"w": np.array([1.0, np.nan], np.float32)})
    assert anyckpt("verify", "--deep", path).status == 0
    assert anyckpt("verify", "--deep", "--strict", path).status == 1


def test_quiet_prints_nothing_but_the_status(anyckpt: Callable[..., Any], write: Callable[..., Path]) -> None:
    ran = anyckpt("verify", "-q", write("m.safetensors", GOOD, lambda data: data[:-5]))
    assert (ran.status, ran.out) == (1, "")


def test_a_path_alone_is_inspected_whatever_its_options(
    anyckpt: Callable[..., Any], write: Callable[..., Path]
) -> None:
    path = write("m.safetensors", GOOD)
    assert anyckpt("--json", path).document["schema"] == "anyckpt.inspect/1"
    assert anyckpt(path, "--json").document["schema"] == "anyckpt.inspect/1"


@pytest.mark.parametrize("content", [b"", b"\0" * 100, b"PK\x03\x04", b"\x80\x02", b"{}", b"\xff" * 50, b"<html>"])
def test_no_traceback_whatever_the_bytes(anyckpt: Callable[..., Any], tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(content)
    for verb, *options in (
        ["inspect"],
        ["verify", "--deep"],
        ["verify", "--json"],
        ["scan"],
        ["identify"],
        ["du"],
        ["stat"],
    ):
        ran = anyckpt(verb, *options, path)
        assert "internal" not in ran.err + ran.out, (verb, ran.err)
        assert "Traceback" not in ran.err
        assert ran.status in ((1,) if verb in ("inspect", "verify") else (0, 1)), verb


def test_a_reader_that_goes_away_is_no_error(write: Callable[..., Path]) -> None:
    path = write("m.safetensors", {f"layer.{i}.x{i}": np.zeros(1, np.float32) for i in range(5000)})
    command = f"{sys.executable} -m anyckpt inspect --all {path} | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
