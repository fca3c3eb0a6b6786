"""Converting: what is asked for is what is written, and what makes no sense is refused before anything is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import anyckpt
from anyckpt.errors import CheckpointError, Refused, UsageError
from anyckpt.verbs.cast import cast
from anyckpt.verbs.prune import prune


@pytest.fixture
def training(data: Path) -> Path:
    return data / "trainer" / "checkpoint.pt"


def test_a_training_file_becomes_safetensors_with_equal_values(training: Path, tmp_path: Path) -> None:
    written = anyckpt.convert(training, tmp_path / "m.safetensors", prove=True)
    assert written.proved
    assert any(f.code == "lossy" for f in written.findings)
    got, want = anyckpt.open(tmp_path / "m.safetensors"), anyckpt.open(training)
    assert set(got.weights) == set(want.weights)
    for name, tensor in want.weights.items():
        assert got.weights[name].tobytes() == tensor.tobytes()


def test_training_state_survives_a_way_through_torch(training: Path, tmp_path: Path) -> None:
    anyckpt.convert(training, tmp_path / "again.pt")
    got, want = anyckpt.open(tmp_path / "again.pt"), anyckpt.open(training)
    assert (got.step, got.epoch) == (want.step, want.epoch)
    assert got.optimizer is not None
    assert want.optimizer is not None
    assert got.aliases == want.aliases
    for slot, by_parameter in want.optimizer.slots.items():
        assert {n: t.tobytes() for n, t in got.optimizer.slots[slot].items()} == {
            n: t.tobytes() for n, t in by_parameter.items()
        }


def test_the_optimizer_alone_is_written_by_parameter_and_slot(training: Path, tmp_path: Path) -> None:
    anyckpt.convert(training, tmp_path / "o.safetensors", only="optimizer")
    got, want = anyckpt.open(tmp_path / "o.safetensors").weights, anyckpt.open(training).optimizer
    assert want is not None
    moment = got["model.norm.weight/exp_avg"]
    assert moment.tobytes() == want.slots["exp_avg"]["model.norm.weight"].tobytes()
    with pytest.raises(UsageError, match="no optimizer state"):
        anyckpt.convert(tmp_path / "o.safetensors", tmp_path / "p.safetensors", only="optimizer")


def test_a_cast_keeps_what_it_is_told_to_and_rounds_the_rest(training: Path, tmp_path: Path) -> None:
    cast(training, tmp_path / "b.safetensors", "bf16", keep=["*norm*"])
    got, want = anyckpt.open(tmp_path / "b.safetensors").weights, anyckpt.open(training).weights
    assert got["model.norm.weight"].dtype.name == "float32"
    down = "model.layers.0.mlp.down_proj.weight"
    rounded = want[down].numpy().astype(got[down].dtype.numpy_dtype())
    assert got[down].tobytes() == rounded.tobytes()


def test_pruning_says_what_it_saves(training: Path, tmp_path: Path) -> None:
    written = prune(training, tmp_path / "w.pt")
    before, after = training.stat().st_size, (tmp_path / "w.pt").stat().st_size
    assert written.extra == {"bytes_before": before, "bytes_saved": before - after}
    assert anyckpt.open(tmp_path / "w.pt").optimizer is None


def test_globs_choose_tensors_and_a_glob_that_matches_nothing_is_an_error(training: Path, tmp_path: Path) -> None:
    anyckpt.convert(training, tmp_path / "a.safetensors", include=["*.layers.1.*"], exclude=["*.mlp.*"])
    names = set(anyckpt.open(tmp_path / "a.safetensors").weights)
    assert names
    assert all(".layers.1." in n and ".mlp." not in n for n in names)
    with pytest.raises(UsageError, match="no tensor matches"):
        anyckpt.convert(training, tmp_path / "b.safetensors", include=["*nothing*"])


def test_shards_are_cut_at_the_size_asked_for_and_read_as_one(training: Path, tmp_path: Path) -> None:
    written = anyckpt.convert(training, tmp_path / "hf", to="hf", max_shard_size=8000)
    shards = [size for name, size in written.files if name.endswith(".safetensors")]
    assert len(shards) > 2
    assert "config.json" in {name for name, _ in written.files}
    assert anyckpt.diff(training, tmp_path / "hf").is_same


def test_a_dry_run_writes_nothing(training: Path, tmp_path: Path) -> None:
    written = anyckpt.convert(training, tmp_path / "m.safetensors", dry_run=True)
    assert written.dry_run
    assert written.bytes_out > 0
    assert not list(tmp_path.iterdir())


def test_requests_that_make_no_sense_are_refused_before_anything_is_written(training: Path, tmp_path: Path) -> None:
    for options in ({"to": "nothing"}, {"dtype": "int8"}, {"weights": "master"}, {"quant": "q8_0"}):
        with pytest.raises(UsageError):
            anyckpt.convert(training, tmp_path / "m.safetensors", **options)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="which format"):
        anyckpt.convert(training, tmp_path / "m")
    (tmp_path / "there.pt").write_bytes(b"x")
    with pytest.raises(Refused):
        anyckpt.convert(training, tmp_path / "there.pt")
    assert [p.name for p in tmp_path.iterdir()] == ["there.pt"]


def test_a_damaged_source_is_not_converted(training: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.pt"
    cut.write_bytes(training.read_bytes()[:60_000])
    with pytest.raises(CheckpointError) as caught:
        anyckpt.convert(cut, tmp_path / "m.safetensors")
    assert caught.value.finding.code == "truncated"


def test_save_and_open_keep_numpy_arrays(tmp_path: Path) -> None:
    arrays = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.array(3, np.int64)}
    anyckpt.save(arrays, tmp_path / "m.safetensors")
    got = anyckpt.open(tmp_path / "m.safetensors").weights
    np.testing.assert_array_equal(got["a"].numpy(), arrays["a"])
    assert got["b"].shape == ()
