"""`--json`: one document a command, its schema named, its fields stable."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anyckpt.cli.output import plain

ARRAYS = {"a.weight": np.ones((2, 3), np.float32), "a.bias": np.zeros(3, np.float32)}
FIELDS = {
    "inspect": "path format title container ok verdict findings training model parameters tensors bytes dtypes step "
    "epoch optimizer scheduler rng state topology resume ties prefixes framework about assets loading tree next",
    "verify": "path format ok verdict findings suppressed deep tensors bytes_read seconds",
    "scan": "path verdict counts files",
    "identify": "paths",
    "du": "path bytes kinds dtypes prefixes shared_bytes dead_bytes overhead_bytes compressed savings",
    "stat": "path norm nan infinite tensors",
    "manifest": "path files tensors",
}


@pytest.mark.parametrize("verb", FIELDS)
def test_the_fields_of_each_document(verb: str, anyckpt: Callable[..., Any], write: Callable[..., Path]) -> None:
    document = anyckpt(verb, "--json", write("m.safetensors", ARRAYS)).document
    assert document.pop("schema") == f"anyckpt.{verb}/1"
    assert set(document) == set(FIELDS[verb].split())


def test_documents_of_verbs_without_a_path(anyckpt: Callable[..., Any]) -> None:
    assert set(anyckpt("explain", "--json", "truncated").document) == {
        "schema", "code", "severity", "meaning", "why", "do",
    }  # fmt: skip
    row = anyckpt("formats", "--json").document["formats"][0]
    assert set(row) == {"name", "title", "kind", "reads", "writes", "training", "endings", "needs", "official"}
    pair = anyckpt("formats", "--json", "--from", "torch", "--to", "safetensors").document
    assert set(pair) == {"schema", "from", "to", "command", "official", "training", "note"}


def test_findings_have_their_five_fields(anyckpt: Callable[..., Any], write: Callable[..., Path]) -> None:
    document = anyckpt("verify", "--json", write("m.safetensors", ARRAYS, lambda data: data[:-1])).document
    assert document["ok"] is False
    for finding in document["findings"]:
        assert set(finding) == {"code", "severity", "where", "message", "hint"}
        assert finding["severity"] in ("error", "warning", "note")


def test_what_could_not_be_done_is_a_document_too(anyckpt: Callable[..., Any], tmp_path: Path) -> None:
    ran = anyckpt("verify", "--json", tmp_path / "none")
    assert ran.status == 2
    assert set(ran.document["error"]) == {"code", "message", "where", "hint"}
    assert anyckpt("verify", "--json").document["error"]["message"]


def test_values_that_json_lacks_are_text() -> None:
    value = {"nan": float("nan"), "inf": [float("inf"), -float("inf")], 3: {"x"}, "path": Path("a")}
    assert json.loads(json.dumps(plain(value), allow_nan=False)) == {
        "nan": "NaN", "inf": ["Infinity", "-Infinity"], "3": ["x"], "path": "a",
    }  # fmt: skip


def test_documents_of_verbs_with_two_paths_or_a_name(
    anyckpt: Callable[..., Any], write: Callable[..., Path], tmp_path: Path
) -> None:
    path = write("m.safetensors", ARRAYS)
    same = anyckpt("diff", "--json", path, path).document
    assert (same["schema"], same["same"]) == ("anyckpt.diff/1", True)
    shown = anyckpt("show", "--json", path, "a.weight[0]").document
    assert (shown["schema"], shown["values"]) == ("anyckpt.show/1", [1.0, 1.0, 1.0])
    for verb, *options in (["convert"], ["cast", "--dtype", "bf16"], ["prune"]):
        done = anyckpt(verb, "--json", path, tmp_path / f"{verb}.pt", *options).document
        assert done["schema"] == f"anyckpt.{verb}/1"
        assert done["tensors"] == 2
        assert done["bytes_out"] == (tmp_path / f"{verb}.pt").stat().st_size
