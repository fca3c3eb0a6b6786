"""What the DeepSpeed tests share: the project's two real runs, copies to damage, and checkpoints made up in memory."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anyckpt import formats
from anyckpt.core.checkpoint import Checkpoint, Optimizer
from anyckpt.core.dtypes import DTYPES
from anyckpt.core.ops import cast
from anyckpt.core.tensor import Tensor, from_array
from anyckpt.core.topology import Topology
from anyckpt.finding import Report
from anyckpt.io.place import Place

Open = Callable[[Path], Checkpoint]
Build = Callable[..., Checkpoint]


@pytest.fixture(scope="session")
def open_at() -> Open:
    """Open a path; the findings are in the checkpoint."""

    def open_at(path: Path) -> Checkpoint:
        return formats.read(Place.at(path), Report())

    return open_at


@pytest.fixture(scope="session")
def zero2(data: Path) -> Path:
    """Stage 2, bf16, 2 ranks: two groups, a tied head, a frozen layer, buffers of two types."""
    return data / "deepspeed" / "zero2"


@pytest.fixture(scope="session")
def zero3(data: Path) -> Path:
    """Stage 3, fp32, 3 ranks, the same model."""
    return data / "deepspeed" / "zero3"


@pytest.fixture
def run2(zero2: Path, tmp_path: Path) -> Path:
    """A copy of `zero2` to damage."""
    shutil.copytree(zero2, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def run3(zero3: Path, tmp_path: Path) -> Path:
    """A copy of `zero3` to damage."""
    shutil.copytree(zero3, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture(scope="session")
def build() -> Build:
    """A training checkpoint in memory: parameters of given shapes by group, random values, Adam's moments."""

    def build(
        groups: Sequence[dict[str, tuple[int, ...]]],
        *,
        dtype: str = "float32",
        options: Sequence[dict[str, Any]] = (),
        frozen: dict[str, tuple[int, ...]] | None = None,
        state: dict[str, Any] | None = None,
        slots: Sequence[str] = ("exp_avg", "exp_avg_sq"),
        topology: Topology | None = None,
        facts: dict[str, Any] | None = None,
    ) -> Checkpoint:
        random = np.random.default_rng(len(groups))

        def values(shape: tuple[int, ...]) -> Tensor:
            return from_array(random.standard_normal(shape).astype(np.float32))

        masters = {name: values(shape) for group in groups for name, shape in group.items()}
        weights = {name: cast(tensor, DTYPES[dtype]) for name, tensor in masters.items()}
        weights |= {name: cast(values(shape), DTYPES[dtype]) for name, shape in (frozen or {}).items()}
        found = {slot: {name: values(t.shape) for name, t in masters.items()} for slot in slots}
        found["step"] = {name: from_array(np.array(5, np.float32)) for name in masters}
        named = tuple(
            {"lr": 0.1 + i, **(options[i] if i < len(options) else {}), "params": list(group)}
            for i, group in enumerate(groups)
        )
        return Checkpoint(
            "memory", "(memory)", weights, optimizer=Optimizer({"master": masters, **found}, named), step=5,
            state=state or {}, topology=topology, facts=facts or {},
        )

    return build


def assert_same(got: Checkpoint, want: Checkpoint) -> None:
    """Weights, slots and groups are equal, bit for bit."""
    assert list(got.weights) == list(want.weights) or set(got.weights) == set(want.weights)
    for name, tensor in want.weights.items():
        assert (got.weights[name].dtype, got.weights[name].shape) == (tensor.dtype, tensor.shape), name
        assert got.weights[name].tobytes() == tensor.tobytes(), name
    assert got.optimizer is not None and want.optimizer is not None
    assert set(got.optimizer.slots) == set(want.optimizer.slots)
    for slot, tensors in want.optimizer.slots.items():
        assert set(got.optimizer.slots[slot]) == set(tensors), slot
        for name, tensor in tensors.items():
            assert got.optimizer.slots[slot][name].tobytes() == tensor.tobytes(), (slot, name)
    assert [list(g["params"]) for g in got.optimizer.groups] == [list(g["params"]) for g in want.optimizer.groups]
    assert got.step == want.step


@pytest.fixture(scope="session")
def same() -> Callable[[Checkpoint, Checkpoint], None]:
    """Hold two checkpoints against each other."""
    return assert_same
