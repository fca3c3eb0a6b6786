"""Digests that a folder carries: names checked on reading, bytes on a deep check."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def folder(data: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(data / "sharded", tmp_path / "m"))


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


ONE = "model-00001-of-00002.safetensors"


@pytest.mark.parametrize(
    "line", ["{hex}  {name}\n", "{hex} *./{name}\n", "SHA256 ({name}) = {hex}\n", "# x\n{HEX}  {name}\n"]
)
def test_sums_in_every_style_hold_until_a_bit_changes(line: str, folder: Path, codes: Any) -> None:
    digest = sha256(folder / ONE)
    (folder / "SHA256SUMS").write_text(line.format(hex=digest, HEX=digest.upper(), name=ONE))
    assert not {"checksum-mismatch", "bad-manifest"} & set(codes(folder))
    flip(folder / ONE)
    assert "checksum-mismatch" in codes(folder)


def test_a_lone_digest_is_of_the_file_beside_it(folder: Path, codes: Any) -> None:
    (folder / f"{ONE}.sha256").write_text(sha256(folder / ONE))
    assert "checksum-mismatch" not in codes(folder)
    flip(folder / ONE)
    assert "checksum-mismatch" in codes(folder)


@pytest.mark.parametrize(
    ("line", "code"),
    [("0" * 64 + "  gone.bin", "missing-shard"), ("0" * 64 + "  ../x", "path-escape"), ("hello", "bad-manifest")],
)
def test_names_are_judged_before_anything_is_hashed(line: str, code: str, folder: Path, read: Any) -> None:
    (folder / "SHA256SUMS").write_text(line + "\n")
    assert code in [f.code for f in read(folder)[1].findings]


@pytest.mark.parametrize("kind", ["sha256", "git"])
def test_download_records_of_the_hub_hold_until_a_bit_changes(kind: str, folder: Path, codes: Any) -> None:
    raw = (folder / ONE).read_bytes()
    etag = sha256(folder / ONE) if kind == "sha256" else hashlib.sha1(b"blob %d\0" % len(raw) + raw).hexdigest()
    record = folder / ".cache/huggingface/download" / f"{ONE}.metadata"
    record.parent.mkdir(parents=True)
    record.write_text(f"{'0' * 40}\n{etag}\n1760000000.0\n")
    assert "checksum-mismatch" not in codes(folder)
    flip(folder / ONE)
    assert "checksum-mismatch" in codes(folder)


def test_blobs_of_a_hub_cache_are_called_by_their_digest(folder: Path, tmp_path: Path, codes: Any) -> None:
    repository = tmp_path / "models--a--b"
    snapshot, blobs = repository / "snapshots/0f", repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for path in folder.iterdir():
        blob = blobs / sha256(path)
        shutil.copy(path, blob)
        (snapshot / path.name).symlink_to(Path("../../blobs") / blob.name)
    assert not {"checksum-mismatch", "path-escape"} & set(codes(snapshot))
    flip((snapshot / ONE).resolve())
    assert "checksum-mismatch" in codes(snapshot)


def sign(folder: Path) -> None:
    """What model signing writes, less the signature itself."""
    resources = [
        {"name": p.name, "algorithm": "sha256", "digest": sha256(p)}
        for p in sorted(folder.iterdir())
        if p.name != "model.sig"
    ]
    root = hashlib.sha256(b"".join(bytes.fromhex(r["digest"]) for r in resources)).hexdigest()
    statement = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": "m", "digest": {"sha256": root}}],
        "predicateType": "https://model_signing/signature/v1.0",
        "predicate": {"resources": resources, "serialization": {"method": "files", "ignore_paths": ["model.sig"]}},
    }
    payload = base64.b64encode(json.dumps(statement).encode()).decode()
    (folder / "model.sig").write_text(json.dumps({"dsseEnvelope": {"payload": payload, "signatures": []}}))


def test_a_signed_folder_is_held_against_its_list(folder: Path, codes: Any) -> None:
    sign(folder)
    words = {"checksum-mismatch", "extra-file", "bad-signature", "missing-shard"}
    assert not words & set(codes(folder))
    (folder / "added.bin").write_text("x")
    assert "extra-file" in codes(folder)
    (folder / "added.bin").unlink()
    flip(folder / ONE)
    assert "checksum-mismatch" in codes(folder)
    (folder / ONE).unlink()
    assert "missing-shard" in codes(folder)


def test_an_edited_list_no_longer_fits_its_own_digest(folder: Path, codes: Any) -> None:
    sign(folder)
    bundle = json.loads((folder / "model.sig").read_text())
    statement = json.loads(base64.b64decode(bundle["dsseEnvelope"]["payload"]))
    statement["predicate"]["resources"][0]["digest"] = "0" * 64
    bundle["dsseEnvelope"]["payload"] = base64.b64encode(json.dumps(statement).encode()).decode()
    (folder / "model.sig").write_text(json.dumps(bundle))
    assert "bad-signature" in codes(folder)
    (folder / "model.sig").write_text('{"x": 1}')
    assert "bad-signature" in codes(folder)
