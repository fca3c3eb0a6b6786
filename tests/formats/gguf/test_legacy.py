"""GGML, GGMF and GGJT: files of 2023, read and upgraded."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

import anyckpt
from anyckpt.errors import CheckpointError, UsageError

FILES = (
    "ggml_f16.bin", "ggmf_v1_f16.bin", "ggjt_v1_f16.bin", "ggjt_v3_q4_0.bin", "gguf_v1_f16.gguf", "gguf_v2_f16.gguf",
)  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_every_container_before_gguf_3_gives_the_true_values(name: str, official: Path, tmp_path: Path) -> None:
    anyckpt.convert(official / "legacy" / name, tmp_path / "hf", to="hf")
    got = anyckpt.open(tmp_path / "hf").weights
    want = anyckpt.open(official / "legacy" / "truth.safetensors").weights
    allowed = 0.15 if "q4_0" in name else 0
    for tensor in want:
        if tensor in got:
            a, b = got[tensor].numpy().astype(np.float32), want[tensor].numpy().astype(np.float32)
            b = b if b.ndim == 1 else b.astype(np.float16).astype(np.float32)
            assert np.abs(a - b).max() <= allowed * np.abs(b).max(), tensor
    assert set(want) - set(got) <= {"lm_head.weight"}


@pytest.mark.parametrize("name", FILES[:4])
def test_they_are_upgraded_to_gguf(name: str, official: Path, tmp_path: Path) -> None:
    anyckpt.convert(official / "legacy" / name, tmp_path / "m.gguf", to="gguf")
    found = anyckpt.open(tmp_path / "m.gguf")
    keys = found.facts["gguf"]
    assert keys["general.architecture"] == "llama"
    assert keys["llama.block_count"] == 1 + max(int(n.split(".")[1]) for n in found.weights if n.startswith("blk."))
    assert len(keys["tokenizer.ggml.tokens"]) == found.weights["token_embd.weight"].shape[0]


def _ggjt(version: int, kind: int, block: bytes) -> bytes:
    """One tensor of 32 values and one token."""
    head = struct.pack("<II7i", 0x67676A74, version, 1, 32, 32, 1, 1, 32, 2) + struct.pack("<I1sf", 1, b"a", 0.0)
    name = b"tok_embeddings.weight"
    head += struct.pack("<iii2i", 2, len(name), kind, 32, 1) + name
    return head + bytes(-len(head) % 32) + block


NEIGHBOURS = bytes((2 * j) % 16 | (2 * j + 1) % 16 << 4 for j in range(16))  # a byte holds values 2j and 2j + 1
HALVES = bytes(j | j << 4 for j in range(16))  # a byte holds values j and j + 16
AROUND_ZERO = [(i % 16 - 8) / 2 for i in range(32)]
OLD = {
    (1, 2): (struct.pack("<f", 0.5) + NEIGHBOURS, AROUND_ZERO),
    (2, 2): (struct.pack("<f", 0.5) + HALVES, AROUND_ZERO),
    (2, 3): (struct.pack("<ff", 0.5, 1.0) + HALVES, [i % 16 / 2 + 1 for i in range(32)]),
    (3, 2): (np.float16(0.5).tobytes() + HALVES, AROUND_ZERO),
}


@pytest.mark.parametrize(("version", "kind"), OLD)
def test_blocks_of_older_versions_are_not_taken_for_todays(version: int, kind: int, tmp_path: Path) -> None:
    block, want = OLD[version, kind]
    path = tmp_path / "m.bin"
    path.write_bytes(_ggjt(version, kind, block))
    found = anyckpt.open(path).weights["tok_embeddings.weight"]
    assert found.numpy().ravel().tolist() == want


def test_a_cut_file_is_said_to_be_cut(official: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.bin"
    path.write_bytes((official / "legacy" / "ggjt_v1_f16.bin").read_bytes()[:-100])
    with pytest.raises((CheckpointError, UsageError)):
        anyckpt.convert(path, tmp_path / "m.gguf", to="gguf")
