"""One file a rank: parts placed by their own pickles, ranks that are missing told, replicas told from parts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import anyckpt
from anyckpt.core.checkpoint import Checkpoint
from anyckpt.core.tensor import from_array
from anyckpt.errors import CheckpointError, UsageError
from anyckpt.formats.ranks import rank_sets
from anyckpt.io.place import Place
from anyckpt.verbs.convert import convert

DTENSOR, SHARDED = "torch/fsdp2_rank_files_w2/ckpt", "torch/fsdp1_sharded_rank_files_w2/ckpt"
LOCAL = "torch/fsdp1_local_w2"


def shapes_of(case: Path) -> dict[str, list[int]]:
    layout = json.loads((case / "case.json").read_text())["extra"]["flat_layout"]
    return {
        (f"{unit}." if unit else "") + name: shape
        for unit, one in layout.items()
        for name, shape in zip(one["fqns"], one["shapes"])
    }


@pytest.mark.parametrize("source", [DTENSOR, SHARDED])
def test_a_rank_that_is_missing_is_told_and_stops_a_conversion(corpus: Path, tmp_path: Path, source: str) -> None:
    shutil.copytree(corpus / source, tmp_path / "ckpt")
    next(p for p in (tmp_path / "ckpt").iterdir() if "rank0" in p.name).unlink()
    checkpoint = anyckpt.open(tmp_path / "ckpt")
    assert "missing-shard" in {f.code for f in checkpoint.findings if f.severity == "error"}
    with pytest.raises(CheckpointError):
        convert(checkpoint, tmp_path / "out.safetensors")


def test_files_may_be_renamed_for_a_dtensor_knows_its_place(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "ckpt").mkdir()
    for a, b in ((0, 1), (1, 0)):
        shutil.copy(corpus / DTENSOR / f"rank{a}.pt", tmp_path / "ckpt" / f"model_world_size_2_rank_{b}.pt")
    read, truth = anyckpt.open(tmp_path / "ckpt"), anyckpt.open(corpus / DTENSOR)
    assert {n: t.tobytes() for n, t in read.weights.items()} == {n: t.tobytes() for n, t in truth.weights.items()}


def test_sets_are_told_apart_by_kind_and_step(tmp_path: Path) -> None:
    names = ["model_0000100.rank_0.pth", "model_0000200.rank_0.pth", "model_0000200.rank_1.pth"]
    names += ["optim_world_size_2_rank_0.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt", "rng_state_rank_0.pt"]
    for name in names:
        (tmp_path / name).write_bytes(b"x")
    found = [(s.stem, tuple(s.files)) for s in rank_sets(Place.at(tmp_path))]
    assert found == [("model_0000200", (0, 1)), ("model_0000100", (0,)), ("optim_world_size_2", (0,))]


def write(path: Path, value: float) -> None:
    weights = {"w": from_array(np.full((3, 2), value, np.float32)), "b": from_array(np.zeros(3, np.float32))}
    convert(Checkpoint("memory", "m", weights), path)


def test_replicas_are_one_and_parts_that_nothing_joins_are_an_error(tmp_path: Path) -> None:
    for rank in range(2):
        write(tmp_path / f"model_world_size_2_rank_{rank}.pt", 1.0)
    assert not [f for f in anyckpt.open(tmp_path).findings if f.severity == "error"]
    write(tmp_path / "other.pt", 2.0)
    shutil.move(tmp_path / "other.pt", tmp_path / "model_world_size_2_rank_1.pt")
    errors = [f for f in anyckpt.open(tmp_path).findings if f.severity == "error"]
    assert [f.code for f in errors] == ["inconsistent"]


def test_a_single_rank_that_says_so_in_its_name_is_read(tmp_path: Path) -> None:
    write(tmp_path / "model_world_size_1_rank_0.pt", 1.0)
    checkpoint = anyckpt.open(tmp_path)
    assert (checkpoint.format, sorted(checkpoint.weights)) == ("ranks", ["b", "w"])


def test_flat_parameters_are_read_with_names_and_shapes_alone(corpus: Path, tmp_path: Path) -> None:
    shapes = shapes_of(corpus / LOCAL)
    (tmp_path / "like.json").write_text(json.dumps(shapes))
    checkpoint = anyckpt.open(corpus / LOCAL / "ckpt", like=tmp_path / "like.json")
    assert {n: list(checkpoint.weights[n].shape) for n in shapes} == shapes
    assert checkpoint.optimizer is not None
    assert set(checkpoint.optimizer.slots["exp_avg"]) == set(shapes)


def test_a_reference_of_another_model_is_refused(corpus: Path, tmp_path: Path) -> None:
    shapes = shapes_of(corpus / LOCAL)
    shapes["pos"] = [12, 16]
    (tmp_path / "like.json").write_text(json.dumps(shapes))
    with pytest.raises(UsageError, match="another model"):
        anyckpt.open(corpus / LOCAL / "ckpt", like=tmp_path / "like.json")


def test_a_reference_is_refused_where_the_format_has_names(corpus: Path) -> None:
    with pytest.raises(UsageError, match="names"):
        anyckpt.open(corpus / "torch/dcp_fsdp2_w2/ckpt", like=corpus / "torch/train_adamw")
