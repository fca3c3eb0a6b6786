"""Real FSDP and DDP save, we convert to another world and form, and they go on with the losses they would have had."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import anyckpt
from anyckpt.verbs.convert import convert

pytestmark = pytest.mark.frameworks

SCRIPT = Path(__file__).with_name("distributed.py")
KINDS = ("fsdp2", "fsdp2_flat", "fsdp2_ranks", "fsdp1_full", "fsdp1_sharded", "fsdp1_local", "fsdp1_local_orig", "ddp")
FILES = ("fsdp1_full", "ddp")
FLAT = ("fsdp1_local", "fsdp1_local_orig")
SAVED_BY, PORT = 2, 29700


def run(world: int, actions: list[dict[str, str]], folder: Path) -> list[list[float]]:
    todo, out = folder / f"todo-{world}.json", folder / f"out-{world}.json"
    todo.write_text(json.dumps(actions))
    command = [sys.executable, str(SCRIPT), str(world), str(todo), str(out), str(PORT + world)]
    done = subprocess.run(command, timeout=240, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    losses: list[list[float]] = json.loads(out.read_text())
    return losses


class Saved:
    """The checkpoints of all kinds, and the losses of each run that was not interrupted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.paths = {kind: folder / f"{kind}{'.pt' if kind in FILES else ''}" for kind in KINDS}
        actions = [{"do": "save", "kind": kind, "path": str(path)} for kind, path in self.paths.items()]
        self.losses = dict(zip(KINDS, run(SAVED_BY, actions, folder), strict=True))

    def open(self, kind: str) -> anyckpt.Checkpoint:
        return anyckpt.open(self.paths[kind], like=self.like if kind in FLAT else None)

    @property
    def like(self) -> Path:
        """The same model, its names in its order, without wrappers."""
        path = self.folder / "like.pt"
        if not path.exists():
            convert(self.paths["ddp"], path, strip_prefixes=True, only="weights")
        return path


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(tmp_path_factory.mktemp("runs"))


def same_values(a: anyckpt.Checkpoint, b: anyckpt.Checkpoint) -> None:
    assert set(a.weights) == set(b.weights)
    for name, tensor in a.weights.items():
        assert tensor.tobytes() == b.weights[name].tobytes(), name
    assert a.optimizer is not None
    assert b.optimizer is not None
    assert set(a.optimizer.slots) == set(b.optimizer.slots)
    for slot, tensors in a.optimizer.slots.items():
        assert set(tensors) == set(b.optimizer.slots[slot])
        for name, tensor in tensors.items():
            assert tensor.tobytes() == b.optimizer.slots[slot][name].tobytes(), (slot, name)


def test_every_layout_of_one_run_reads_as_the_same_weights_and_moments(saved: Saved) -> None:
    reference = saved.open("fsdp2")
    assert reference.step == 2
    for kind in KINDS:
        same_values(saved.open(kind).view("stripped") if kind == "ddp" else saved.open(kind), reference)


@pytest.mark.parametrize("world", [1, 3, 4])
def test_fsdp2_resumes_at_another_world_from_every_layout(saved: Saved, world: int, tmp_path: Path) -> None:
    actions = []
    for kind in KINDS:
        target = tmp_path / kind
        convert(saved.open(kind), target, to="dcp", world=world, strip_prefixes=kind == "ddp", prove=True)
        key = "fsdp2" if "optim" in (anyckpt.open(target).facts["keys"]["optimizers"][0][0],) else "fsdp2_optimizer"
        actions.append({"do": "resume", "kind": key, "path": str(target)})
    for kind, losses in zip(KINDS, run(world, actions, tmp_path), strict=True):
        # FSDP reduces gradients in another order at another world, so that sums differ in the last bits.
        assert losses == pytest.approx(saved.losses[kind], abs=1e-6), kind


def test_one_process_resumes_from_a_full_file_made_of_every_layout(saved: Saved, tmp_path: Path) -> None:
    actions = []
    for kind in KINDS:
        target = tmp_path / f"{kind}.pt"
        convert(saved.open(kind), target, prove=True)
        actions.append({"do": "resume", "kind": "plain", "path": str(target)})
    for kind, losses in zip(KINDS, run(1, actions, tmp_path), strict=True):
        assert losses == pytest.approx(saved.losses[kind], abs=1e-6), kind


def test_flat_parameters_without_a_reference_are_refused_with_the_way_out(saved: Saved) -> None:
    with pytest.raises(anyckpt.CheckpointError) as caught:
        anyckpt.open(saved.paths["fsdp1_local"])
    assert "like" in caught.value.hint


def test_torch_reads_the_folder_we_wrote_as_the_object_it_saved(saved: Saved, tmp_path: Path) -> None:
    import torch
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    convert(saved.paths["fsdp2"], tmp_path / "three", to="dcp", world=3)
    dcp_to_torch_save(saved.paths["fsdp2"], tmp_path / "theirs.pt")
    dcp_to_torch_save(tmp_path / "three", tmp_path / "ours.pt")
    theirs, ours = (torch.load(tmp_path / name, weights_only=False) for name in ("theirs.pt", "ours.pt"))
    assert flat(ours) == flat(theirs)


def flat(value: object, path: str = "") -> dict[str, object]:
    import torch

    if isinstance(value, dict):
        return {k: v for key, inner in value.items() for k, v in flat(inner, f"{path}/{key}").items()}
    if isinstance(value, torch.Tensor):
        return {path: (value.dtype, value.tolist())}
    return {path: (type(value), value)}
