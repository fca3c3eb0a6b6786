"""No hostile or damaged file brings any verb down: one answer, no traceback, nothing executed, nothing left behind."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

VERBS: tuple[tuple[str, ...], ...] = (
    ("verify", "--deep", "--json"),
    ("inspect", "--all"),
    ("scan",),
    ("identify",),
    ("du",),
)


@pytest.fixture
def cases(corpus: Path) -> list[tuple[str, Path]]:
    """(name, path) of each case that lies there as it is; those with links and pipes need setting up."""
    found = []
    for file in sorted(corpus.glob("hostile/*/case.json")):
        case = json.loads(file.read_text())
        if not case["setup"]:
            found.append((file.parent.name, file.parent / case["path"]))
    return found


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_no_case_brings_a_verb_down(
    verb: tuple[str, ...],
    anyckpt: Callable[..., Any],
    cases: list[tuple[str, Path]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    faults = []
    for name, path in cases:
        ran = anyckpt(*verb, path)
        if ran.status not in (0, 1) or "internal" in ran.err or "Traceback" in ran.err:
            faults.append((name, ran.status, ran.err[:200]))
        if any(ord(c) < 32 and c != "\n" for c in ran.out + ran.err):
            faults.append((name, ran.status, "control characters printed"))
        if "31337.25" in ran.out + ran.err:
            faults.append((name, ran.status, "read outside of the checkpoint"))
    assert not faults
    assert list(tmp_path.iterdir()) == []


def test_the_same_in_a_process_of_its_own(cases: list[tuple[str, Path]], tmp_path: Path) -> None:
    chosen = {"pkl_os_system_global", "pt_evil_data_pkl", "ptl_evil_tar", "st_header_len_max", "pkl_billion_laughs"}
    for name, path in cases:
        if name in chosen:
            command = [sys.executable, "-m", "anyckpt", "verify", "--deep", str(path)]
            done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60)
            assert done.returncode in (0, 1), (name, done.stderr)
            assert done.stderr == "", name
            assert list(tmp_path.iterdir()) == [], name
