"""Views give torch's own values, bit for bit, and leave alone what is not known."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from anyckpt.core.box import Box
from anyckpt.core.checkpoint import Checkpoint
from anyckpt.core.inert import Global, TensorSubclass
from anyckpt.core.tensor import from_array
from anyckpt.errors import UsageError
from anyckpt.verbs.diff import diff
from anyckpt.verbs.open import open

EXOTIC = {
    **{n: f"{n}/dense" for n in ("coo", "coo_uncoalesced", "csr", "csc", "bsr", "bsc")},
    **{n: f"{n}/dequantized" for n in ("q_tensor", "q_int8", "q_int32", "q_channel", "q_4bit")},
    **{n: n for n in ("nested/0", "nested/1", "nested_jagged/values", "parameter", "parameter_with_attr")},
}


def test_an_unknown_view_lists_those_there_are() -> None:
    with pytest.raises(UsageError, match=r"no view 'x'; there are: stripped, .*dense"):
        Checkpoint("m", "m", {}).view("x")


def test_sparse_and_quantized_tensors_have_torchs_values(corpus: Path) -> None:
    folder = corpus / "torch" / "zip_exotic"
    dense, truth = open(folder / "exotic.pt").view("dense"), open(folder / "truth.safetensors").weights
    for name, true in EXOTIC.items():
        got, want = dense.weights[name], truth[true]
        assert (got.dtype, got.shape) == (want.dtype, want.shape), name
        assert got.tobytes() == want.tobytes(), name
    part = dense.weights["q_4bit"].numpy(Box((1, 3), (4, 6)))
    np.testing.assert_array_equal(part, truth["q_4bit/dequantized"].numpy()[1:4, 3:6])
    part = dense.weights["nested/1"].numpy(Box((1, 1), (3, 3)))
    np.testing.assert_array_equal(part, truth["nested/1"].numpy()[1:3, 1:3])
    assert not {n for n in dense.weights if n.startswith("csr/")}


def test_torchao_weights_are_dequantized(corpus: Path) -> None:
    folder = corpus / "torch" / "torchao_int8"
    found = diff(open(folder / "model.pt").view("dense"), folder / "truth.safetensors")
    assert not found.only_a
    assert {n.name for n in found.only_b} == {f"{i}.weight/{part}" for i in (0, 2) for part in ("qdata", "scale")}
    assert not found.values


def test_an_unknown_subclass_stays_as_its_parts() -> None:
    one = from_array(np.float32([1]))
    unknown = TensorSubclass(Global("their.module", "Secret"), None, {"q": one})
    checkpoint = Checkpoint("torch", "m", {"w/q": one}, facts={"subclasses": {"w": unknown}})
    dense = checkpoint.view("dense")
    assert list(dense.weights) == ["w/q"]
    assert dense.facts["subclasses"] == {"w": unknown}


def test_stripped_keeps_the_optimizer_in_step(corpus: Path) -> None:
    folder = corpus / "torch" / "ddp_prefixes"
    plain = open(folder / "ckpt.pt").view("stripped")
    assert diff(plain, folder / "truth.safetensors").is_same
    truth = open(folder / "truth_optim.safetensors").weights
    assert plain.optimizer is not None
    got = {f"{p}/{slot}": t for slot, by in plain.optimizer.slots.items() for p, t in by.items()}
    assert set(got) == set(truth)
    assert all(got[n].tobytes() == truth[n].tobytes() for n in truth)


def test_merged_needs_an_adapter_and_its_base_beside_it(data: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="only an adapter"):
        open(data / "truth.safetensors").view("merged")
    for named in ("/etc", "../../somewhere", None, 3, ""):
        folder = tmp_path / "adapter"
        shutil.copytree(data / "adapter", folder, dirs_exist_ok=True)
        config = json.loads((folder / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": named}))
        with pytest.raises(UsageError, match="is not beside it"):
            open(folder).view("merged")


def test_merged_is_the_base_with_the_adapter_in_it(data: Path, tmp_path: Path) -> None:
    shutil.copytree(data / "adapter", tmp_path / "adapter")
    shutil.copytree(data / "sharded", tmp_path / "base")
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "base_model_name_or_path": "../base"}))
    merged = open(tmp_path / "adapter").view("merged")
    truth = open(data / "truth_merged.safetensors").weights
    assert truth
    for name, want in truth.items():
        np.testing.assert_allclose(merged.weights[name].numpy(), want.numpy(), rtol=1e-5, atol=1e-6)
