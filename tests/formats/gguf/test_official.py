"""From Hugging Face folders: the very bytes of llama.cpp's converter and quantizer."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import anyckpt
from anyckpt.core.ggml import native
from anyckpt.errors import Refused, UsageError

Case = Callable[[str], dict[str, Any]]
MODELS = "llama llama3 mistral mixtral qwen2 qwen3 qwen3moe gemma2 gemma3 phi3 gpt2 bert".split()


def _sha(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("quant", ["auto", "f32"])
def test_a_model_is_written_as_the_converter_writes_it(
    name: str, quant: str, official: Path, case: Case, tmp_path: Path
) -> None:
    extra = case(name)["extra"]
    anyckpt.convert(
        official / name / "hf", tmp_path / "m.gguf", quant=None if quant == "auto" else quant,
        model_name=extra["model_name_argument"], pre=extra.get("pre"),
    )  # fmt: skip
    want = extra["sha256"]["model.gguf" if quant == "auto" else "--outtype f32"]
    assert _sha(tmp_path / "m.gguf") == want


def test_an_adapter_is_written_as_the_converter_writes_it(official: Path, tmp_path: Path) -> None:
    anyckpt.convert(
        official / "lora_llama" / "peft", tmp_path / "a.gguf", quant="f16", base=official / "llama" / "hf"
    )
    assert (tmp_path / "a.gguf").read_bytes() == (official / "lora_llama" / "adapter.gguf").read_bytes()


@pytest.fixture(scope="module")
def imatrix(official: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The case's importances as `llama-imatrix` writes them (.dat): sums, and the number of calls they are of."""
    out = bytearray()
    entries = anyckpt.open(official / "quant_llama" / "imatrix.safetensors").weights
    out += len(entries).to_bytes(4, "little")
    for name, tensor in entries.items():
        values = np.asarray(tensor.numpy(), "<f4").ravel()
        out += len(name).to_bytes(4, "little") + name.encode() + (1).to_bytes(4, "little")
        out += len(values).to_bytes(4, "little") + values.tobytes()
    path = tmp_path_factory.mktemp("imatrix") / "i.dat"
    path.write_bytes(out)
    return path


SLOW = ("IQ1", "IQ2", "IQ3_X")
"""Types whose official encoder works out tables of neighbours first, for up to 25 seconds."""


def _types() -> list[Any]:
    """File types of the corpus case; every one that is listed there is tried."""
    path = Path(__file__).parents[4] / "shared" / "corpus" / "gguf" / "quant_llama" / "expected.json"
    names = sorted(json.loads(path.read_text())) if path.is_file() else []
    return [pytest.param(name, marks=pytest.mark.slow) if name.startswith(SLOW) else name for name in names]


@pytest.mark.parametrize("file_type", _types())
def test_a_model_is_quantized_as_the_quantizer_does_it(
    file_type: str, official: Path, imatrix: Path, tmp_path: Path
) -> None:
    want = json.loads((official / "quant_llama" / "expected.json").read_text())[file_type]
    base, _, weighted = file_type.partition("@")
    if base == "IQ1_M":
        pytest.skip("IQ1_M is read and not written")
    if native.library() is None and base.startswith(("IQ1", "IQ2", "IQ3_X")):
        pytest.skip("this type is written by libgguf only (extra `gguf`)")
    source, out = official / "quant_llama" / "source.f16.gguf", tmp_path / "q.gguf"
    if "sha256" not in want:
        with pytest.raises((Refused, UsageError), match=r"importance|no file type"):
            anyckpt.convert(source, out, quant=base.lower())
        return
    anyckpt.convert(source, out, quant=base.lower(), imatrix=imatrix if weighted else None)
    assert _sha(out) == want["sha256"]


def test_one_pass_from_hugging_face_gives_what_two_steps_give(official: Path, case: Case, tmp_path: Path) -> None:
    name = "quant_llama"
    anyckpt.convert(official / name / "source.f16.gguf", tmp_path / "two.gguf", quant="q4_k_m")
    anyckpt.convert(
        official / name / "hf", tmp_path / "one.gguf", quant="q4_k_m",
        model_name=anyckpt.open(official / name / "source.f16.gguf").facts["gguf"]["general.name"],
    )  # fmt: skip
    one, two = anyckpt.open(tmp_path / "one.gguf"), anyckpt.open(tmp_path / "two.gguf")
    assert dict_of(one) == dict_of(two)
    assert {n: t.dtype for n, t in one.weights.items()} == {n: t.dtype for n, t in two.weights.items()}


def dict_of(checkpoint: Any) -> dict[str, bytes]:
    """Metadata as bytes."""
    return {key: found.encoded() for key, found in checkpoint.facts["gguf"].fields.items()}


@pytest.mark.parametrize("rule", ["split_n7", "whole"])
def test_split_sets_read_as_the_one_file_they_were(rule: str, official: Path) -> None:
    whole = anyckpt.open(official / "split_n7" / "whole.gguf")
    first = "split_n7/model-00001-of-00003.gguf" if rule == "split_n7" else "split_nofirst/model-00001-of-00004.gguf"
    parts = anyckpt.open(official / first)
    assert list(parts.weights) == list(whole.weights)
    for name, tensor in whole.weights.items():
        assert parts.weights[name].tobytes() == tensor.tobytes()


def test_a_set_is_split_by_size_and_joined_again_to_the_same_bytes(official: Path, tmp_path: Path) -> None:
    whole = official / "split_n7" / "whole.gguf"
    limit = whole.stat().st_size // 3
    anyckpt.convert(whole, tmp_path / "set", to="gguf-folder", split_max_size=limit)
    files = sorted((tmp_path / "set").iterdir())
    assert [f.name for f in files] == [f"set-{i:05d}-of-{len(files):05d}.gguf" for i in range(1, len(files) + 1)]
    assert len(files) > 2
    for path in files:
        assert sum(t.nbytes for t in _alone(path, tmp_path).values()) <= limit
    anyckpt.convert(files[0], tmp_path / "again.gguf")
    assert (tmp_path / "again.gguf").read_bytes() == whole.read_bytes()


def _alone(path: Path, tmp_path: Path) -> dict[str, Any]:
    from anyckpt.finding import Report
    from anyckpt.formats.gguf.header import read_header
    from anyckpt.io.local import open_local

    return {info.name: _Sized(info.n_bytes) for info in read_header(open_local(path), Report()).infos}


class _Sized:
    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes


def test_a_missing_part_of_a_set_is_named(official: Path, tmp_path: Path) -> None:
    shutil.copytree(official / "split_n7", tmp_path / "s")
    (tmp_path / "s" / "model-00002-of-00003.gguf").unlink()
    found = anyckpt.verify(tmp_path / "s" / "model-00001-of-00003.gguf")
    assert [(f.code, f.where) for f in found.findings] == [("missing-shard", "model-00002-of-00003.gguf")]
