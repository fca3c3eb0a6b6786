"""Bare pickles: recognised by being readable as one, judged, and taken as weights where they hold arrays."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anyckpt.formats import pickled
from anyckpt.io.view import MemoryFile

ARRAYS = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.array([1.5])}


@pytest.mark.parametrize("protocol", range(6))
def test_a_dict_of_arrays_is_weights_in_every_protocol(protocol: int, tmp_path: Path, read: Any) -> None:
    (tmp_path / "w.pkl").write_bytes(pickle.dumps({**ARRAYS, "step": 3}, protocol=protocol))
    checkpoint, report = read(tmp_path / "w.pkl")
    assert report.verdict == "safe"
    assert {n: t.numpy().tolist() for n, t in checkpoint.weights.items()} == {n: a.tolist() for n, a in ARRAYS.items()}
    assert checkpoint.step == 3


@pytest.mark.parametrize(
    "text",
    [
        b"README\n\nsome text.\n",
        b"class Foo:\n    pass\n",
        b"(a list.)\n",
        b"[1, 2]",
        b'{"a": 1}',
        b"cat a\nb\n",
        b"I1",
    ],
)
def test_text_is_no_pickle(text: bytes) -> None:
    assert not pickled.matches(MemoryFile("a.pkl", text), text[:512])


def test_several_streams_in_a_row_are_all_judged(tmp_path: Path, read: Any) -> None:
    (tmp_path / "w.pkl").write_bytes(pickle.dumps([1]) + pickle.dumps([2]))
    assert read(tmp_path / "w.pkl")[1].verdict == "safe"
    evil = b"cos\nsystem\n(S'x'\ntR."
    (tmp_path / "v.pkl").write_bytes(pickle.dumps([1]) + evil)
    assert read(tmp_path / "v.pkl")[1].verdict == "dangerous"


def test_a_stream_that_ends_after_a_call_is_still_claimed() -> None:
    broken = b"cos\nsystem\n(S'x'\ntR"
    assert pickled.matches(MemoryFile("a.pkl", broken), broken)
