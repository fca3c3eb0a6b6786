"""Verification: the findings of real damage, worst first, in bounded memory."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from anyckpt.errors import UsageError
from anyckpt.verbs.identify import identify
from anyckpt.verbs.manifest import manifest
from anyckpt.verbs.matrix import matrix, route
from anyckpt.verbs.verify import verify

SOUND = ("trainer/checkpoint.pt", "legacy.pth", "sharded", "bin", "adapter", "truth.safetensors")


@pytest.mark.parametrize("name", SOUND)
def test_files_of_a_real_run_are_sound(data: Path, name: str) -> None:
    found = verify(data / name, deep=True)
    assert found.ok, found.findings
    assert found.verdict == "safe"
    assert found.bytes_read > 0


def test_a_flipped_bit_in_a_storage_is_found_by_deep_alone(data: Path, tmp_path: Path) -> None:
    damaged = bytearray((data / "trainer" / "checkpoint.pt").read_bytes())
    damaged[len(damaged) // 2] ^= 1
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(damaged)
    assert verify(path).ok
    found = verify(path, deep=True)
    assert not found.ok
    assert found.findings[0].code == "crc-mismatch"


def test_a_missing_shard_is_named(data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(data / "sharded", folder)
    lost = sorted(folder.glob("*.safetensors"))[0]
    lost.unlink()
    found = verify(folder)
    assert [f.code for f in found.findings if f.severity == "error"] == ["missing-shard"]
    assert lost.name in found.findings[0].where + found.findings[0].message


def test_every_cut_of_a_file_is_an_error(data: Path, tmp_path: Path) -> None:
    whole = (data / "legacy.pth").read_bytes()
    path = tmp_path / "legacy.pth"
    for size in range(1, len(whole), len(whole) // 25):
        path.write_bytes(whole[:size])
        found = verify(path)
        assert not found.ok, size
        assert found.findings[0].severity == "error"


def test_no_such_path_is_no_finding(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        verify(tmp_path / "none")


@pytest.mark.parametrize(
    ("name", "format"),
    [
        ("trainer/checkpoint.pt", "torch"), ("legacy.pth", "torch-legacy"), ("sharded", "hf"), ("bin", "hf"),
        ("adapter", "peft"), ("truth.safetensors", "safetensors"), ("truth.json", ""),
    ],
)  # fmt: skip
def test_formats_are_identified_by_content(data: Path, name: str, format: str) -> None:
    assert identify(data / name).format == format


def test_digests_of_tensors_survive_a_change_of_container(data: Path) -> None:
    torch, safetensors = (manifest(data / name, tensors=True) for name in ("legacy.pth", "truth.safetensors"))
    assert torch.tensors == safetensors.tensors
    assert torch.files != safetensors.files


def test_every_pair_of_formats_has_a_command() -> None:
    rows = matrix()
    for source in rows:
        for target in rows:
            if target.writes:
                found = route(source.name, target.name)
                assert found.command.startswith("anyckpt convert ")
                assert found.training == (source.training and target.training)
    with pytest.raises(UsageError) as caught:
        route("torch", "npyy")
    assert caught.value.hint == "did you mean npy?"
