"""Pickles as torch.distributed.checkpoint writes its `.metadata`, made by CPython's pickler without torch.

Classes of the right names stand in for torch's while the pickle is made; what they share is shared in the pickle.
"""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

_METADATA, _FILES = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
CLASSES = {
    _METADATA: "Metadata MetadataIndex ChunkStorageMetadata TensorStorageMetadata BytesStorageMetadata "
    "TensorProperties",
    _FILES: "_StorageInfo",
}


class _DType:
    __module__ = "torch"

    def __reduce__(self) -> str:
        return "float32"


def _size_reduce(self: Any) -> Any:
    return type(self), (tuple(self),)


class Stand:
    """The stand-ins, installed for the length of a test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        torch = ModuleType("torch")
        size = type("Size", (tuple,), {"__module__": "torch", "__reduce__": _size_reduce})
        torch.Size, torch.float32 = size, _DType()  # type: ignore[attr-defined]
        for name in ("torch", "torch.distributed", "torch.distributed.checkpoint"):
            monkeypatch.setitem(sys.modules, name, torch if name == "torch" else ModuleType(name))
        self.size, self.float32 = size, torch.float32  # type: ignore[attr-defined]
        for module, names in CLASSES.items():
            made = ModuleType(module)
            monkeypatch.setitem(sys.modules, module, made)
            for name in names.split():
                cls = type(name, (), {"__module__": module})
                setattr(made, name, cls)
                setattr(self, name, cls)

    def new(self, name: str, **state: Any) -> Any:
        made = getattr(self, name)()
        made.__dict__.update(state)
        return made


def metadata(stand: Stand, n_tensors: int, n_ranks: int, seed: int, *, sharing: bool) -> bytes:
    """A `.metadata` of 2-D tensors sharded along axis 0; with `sharing`, sizes, texts and entries shared at random."""
    draw = random.Random(seed)
    tensors: dict[str, Any] = {}
    storage: dict[Any, Any] = {}
    sizes: dict[tuple[int, ...], Any] = {}
    files = [f"__{rank}_0.distcp" for rank in range(n_ranks)]

    def size(*shape: int) -> Any:
        if sharing and draw.random() < 0.5:
            return sizes.setdefault(shape, stand.size(shape))
        return stand.size(shape)

    def text(value: str) -> str:
        return value if sharing and draw.random() < 0.5 else str(value.encode(), "utf-8")

    for t in range(n_tensors):
        name = f"model.layer{t}.{'é' if t % 17 == 3 else 'w'}"
        chunks = []
        for rank in range(n_ranks):
            start, rows = size(rank * 300, 0), draw.choice((300, 70_000, 3))
            chunks.append(stand.new("ChunkStorageMetadata", offsets=start, sizes=size(rows, 5_000_000_000)))
            offset = start if sharing and draw.random() < 0.5 else stand.size(start)
            index = stand.new("MetadataIndex", fqn=text(name), index=None if t % 13 == 5 else rank, offset=offset)
            extra = {"transform_descriptors": ["stream.zstd/1"]} if t % 19 == 7 else {}
            where = {"offset": draw.choice((0, 2_000_000, 1 << 40)), "length": draw.randrange(70_000)}
            storage[index] = stand.new("_StorageInfo", relative_path=text(files[rank]), **where, **extra)
        properties = stand.new("TensorProperties", dtype=stand.float32)
        tensors[name] = stand.new(
            "TensorStorageMetadata", properties=properties, size=size(n_ranks * 300, 5_000_000_000), chunks=chunks
        )
    tensors["step"] = stand.new("BytesStorageMetadata")
    again = draw.choice(list(storage.values())) if sharing else None  # an object named again at the end
    storage[stand.new("MetadataIndex", fqn="step", index=None, offset=None)] = again or stand.new(
        "_StorageInfo", relative_path=files[0], offset=1, length=2
    )
    paths = {name: ("model", name) for name in tensors}
    made = stand.new("Metadata", state_dict_metadata=tensors, planner_data=paths, storage_data=storage, version="1.0.0")
    return pickle.dumps(made, protocol=4)


Make = Callable[..., bytes]


@pytest.fixture
def torch_metadata(monkeypatch: pytest.MonkeyPatch) -> Make:
    """`torch_metadata(n_tensors, n_ranks, seed, sharing=…)`: the bytes of a `.metadata`."""

    def make(n_tensors: int, n_ranks: int, seed: int, *, sharing: bool) -> bytes:
        with monkeypatch.context() as patch:
            return metadata(Stand(patch), n_tensors, n_ranks, seed, sharing=sharing)

    return make
