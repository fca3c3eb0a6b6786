"""The verdict of each kind of file; what was not looked at is never safe."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from anyckpt.verbs.scan import Scanned, scan

SENTENCEPIECE = b"".join(
    b"\x0a" + bytes([len(p) + 7]) + b"\x0a" + bytes([len(p)]) + p + b"\x15\0\0\0\0"
    for p in (b"<unk>", b"<s>", b"</s>", b"a", b"b", b"c", b"d", b"e")
)


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        import os

        return os.system, ("true",)


def one(tmp_path: Path, name: str, data: bytes) -> Scanned:
    (tmp_path / name).write_bytes(data)
    return scan(tmp_path / name).files[0]


@pytest.mark.parametrize(
    ("name", "data", "verdict"),
    [
        ("config.json", b'{"hidden_size": 8}', "safe"),
        ("config.json", b'{"auto_map": {"AutoModel": "m.M"}}', "unknown"),
        ("modeling.py", b"import os", "unknown"),
        ("run", b"#!/bin/sh\n", "unknown"),
        ("a.yaml", b"a: 1", "safe"),
        ("a.yaml", b"a: !!python/object/apply:os.system [true]", "dangerous"),
        ("README.md", "Größe: 1".encode(), "safe"),
        ("logo.png", b"\x89PNG\r\n\x1a\n\0\0\0", "safe"),
        ("tokenizer.model", SENTENCEPIECE, "safe"),
        ("weights.unknown", b"\x13\x37" + bytes(range(256)), "unknown"),
        ("empty", b"", "unknown"),
        ("model.tar.gz", b"\x1f\x8b\x08" + bytes(40), "unknown"),
        ("plain.pkl", pickle.dumps({"a": [1, 2]}), "safe"),
        ("evil.pkl", pickle.dumps(Evil()), "dangerous"),
        ("cut.pkl", pickle.dumps({"a": list(range(999))})[:-9], "unknown"),
    ],
)
def test_verdicts(tmp_path: Path, name: str, data: bytes, verdict: str) -> None:
    assert one(tmp_path, name, data).verdict == verdict


def test_what_would_be_imported_is_named(tmp_path: Path) -> None:
    found = one(tmp_path, "evil.pkl", pickle.dumps(Evil()))
    (name, verdict, _), *_ = found.imports
    assert name in ("posix.system", "os.system")
    assert verdict == "dangerous"


def test_the_worst_file_counts_and_links_are_not_followed(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "a.txt").write_text("text")
    assert scan(folder).verdict == "safe"
    (folder / "out").symlink_to("/etc/passwd")
    found = scan(folder)
    assert found.verdict == "unknown"
    assert {f.name: f.verdict for f in found.files} == {"a.txt": "safe", "out": "unknown"}


def test_a_real_training_run_is_safe(data: Path) -> None:
    for name in ("trainer/checkpoint.pt", "legacy.pth", "sharded", "bin", "adapter"):
        assert scan(data / name).verdict == "safe", name
