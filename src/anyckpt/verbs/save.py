"""Write tensors from memory, numpy's, torch's or our own, in any format that can be written."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from anyckpt.core.checkpoint import Checkpoint
from anyckpt.core.dtypes import DTYPES, of_numpy
from anyckpt.core.source import Foreign, Span
from anyckpt.core.tensor import Piece, Tensor
from anyckpt.errors import UsageError
from anyckpt.formats.table import WriteOptions
from anyckpt.names.ties import by_storage
from anyckpt.plan.run import Job, Progress
from anyckpt.verbs.convert import destination_format
from anyckpt.verbs.reading import refuse_damaged
from anyckpt.verbs.write import Written, write_checkpoint

if TYPE_CHECKING:
    import numpy as np

    from anyckpt.core.box import Box

    Array = np.ndarray[Any, Any]

WITH_METADATA = ("safetensors",)  # formats with a place for text
_numbers = count()


@dataclass(frozen=True, slots=True, eq=False)
class MemoryBlock:
    """The memory of an array or a storage as a file: read where it lies, not copied.

    Each has a name of its own, so that no journal of an earlier write takes it for the same bytes.
    """

    name: str
    data: memoryview

    @property
    def size(self) -> int:
        return self.data.nbytes

    def read(self, offset: int, length: int) -> bytes:
        return bytes(self.data[offset : offset + length])

    def readinto(self, offset: int, buffer: memoryview) -> None:
        buffer.cast("B")[:] = self.data[offset : offset + buffer.nbytes]

    def on_disk(self) -> None:
        return None

    def fileno(self) -> None:
        return None


def save(
    tensors: Mapping[str, Any] | Checkpoint,
    path: str | os.PathLike[str],
    *,
    to: str | None = None,
    metadata: Mapping[str, str] | None = None,
    max_shard_size: int = 5_000_000_000,
    tied: Literal["keep", "drop", "clone"] = "keep",
    force: bool = False,
    max_memory: int = 1 << 30,
    jobs: int | None = None,
    events: Callable[[Progress], None] | None = None,
) -> Written:
    """Write named tensors (numpy arrays, torch tensors, `anyckpt.Tensor`s, or a mixture) or a whole Checkpoint.

    The format is `to`, or what the ending of `path` says. Views of one torch storage that are the same tensor are tied.
    `metadata` is text for formats that have a place for it (safetensors). The tensors must not change until this
    returns. Raises UsageError for values that are no tensors and for types the format lacks, Refused where `path`
    exists, unless `force`.
    """
    target = Path(path)
    row = destination_format(target, to)
    if isinstance(tensors, Checkpoint):
        checkpoint = tensors
        refuse_damaged(checkpoint)
    else:
        checkpoint = from_tensors(tensors)
    if metadata:
        if row.name not in WITH_METADATA:
            raise UsageError(f"{row.title} has no place for metadata", hint=f"{', '.join(WITH_METADATA)} has")
        for key, value in metadata.items():
            if not isinstance(key, str) or not isinstance(value, str):
                raise UsageError(f"metadata is text: {key!r} or its value is not")
    training = row.training and checkpoint.is_training
    extra = {"training": training, "metadata": dict(metadata or {})}
    options = WriteOptions(target.name, max_shard_size, tied, None, extra)
    job = Job(max_memory=max_memory, jobs=jobs, force=force, events=events)
    return write_checkpoint(checkpoint, target, row, options, job)


def from_tensors(tensors: Mapping[str, Any]) -> Checkpoint:
    """A checkpoint of tensors in memory, described where they lie; nested dicts are joined with dots."""
    blocks: dict[int, MemoryBlock] = {}
    weights = {name: _described(name, value, blocks) for name, value in _flat(tensors)}
    return Checkpoint("memory", "(memory)", weights, aliases=by_storage(weights))


def _flat(tensors: Mapping[str, Any], lead: str = "") -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for name, value in tensors.items():
        if not isinstance(name, str):
            raise UsageError(f"tensor names are text: {name!r} is not")
        rows += _flat(value, f"{lead}{name}.") if isinstance(value, Mapping) else [(lead + name, value)]
    return rows


def _described(name: str, value: Any, blocks: dict[int, MemoryBlock]) -> Tensor:
    if isinstance(value, Tensor):
        return value
    import numpy as np

    if isinstance(value, np.ndarray | np.generic):
        return _of_array(name, np.asarray(value), blocks)
    if hasattr(value, "untyped_storage"):
        return _of_torch(name, value, blocks)
    raise UsageError(f"{name} is a {type(value).__name__}, no tensor", hint="save takes tensors; leave the rest out")


def _of_array(name: str, array: Array, blocks: dict[int, MemoryBlock]) -> Tensor:
    import numpy as np

    if array.dtype.byteorder == ">" or (array.dtype.byteorder == "=" and not np.little_endian):
        array = array.astype(array.dtype.newbyteorder("<"))
    try:
        dtype = of_numpy(array.dtype)
    except KeyError:
        raise UsageError(f"{name} is an array of {array.dtype}, which no checkpoint can hold") from None
    array = np.ascontiguousarray(array).reshape(array.shape)
    key = array.__array_interface__["data"][0] if array.size else -len(blocks) - 1
    block = blocks.get(key)
    if block is None or block.size != array.nbytes:
        block = blocks[key] = _block(array.reshape(-1).view(np.uint8).data)
    return Tensor(dtype, array.shape, (Piece(Span(block, 0, array.nbytes)),))


def _of_torch(name: str, value: Any, blocks: dict[int, MemoryBlock]) -> Tensor:
    value = value.detach()
    kind = str(value.dtype).removeprefix("torch.")
    dtype = DTYPES.get(kind)
    if value.is_quantized or str(value.layout) != "torch.strided" or dtype is None or hasattr(value, "device_mesh"):
        what = "sharded" if hasattr(value, "device_mesh") else f"{kind}, {value.layout}"
        raise UsageError(f"{name} is no plain tensor ({what})", hint="save what .dequantize() or .to_dense() gives")
    if value.is_meta:
        raise UsageError(f"{name} is on the meta device and has no values")
    value = value.resolve_conj().resolve_neg()
    shape = tuple(value.shape)
    if value.device.type != "cpu":
        return Tensor(dtype, shape, (Piece(Foreign(_reader(value), value.numel() * value.element_size())),))
    storage = value.untyped_storage()
    block = blocks.get(storage.data_ptr()) if storage.nbytes() else None
    if block is None:
        block = blocks[storage.data_ptr()] = _block(_bytes_of(storage))
    strides = tuple(value.stride())
    size = value.element_size()
    extent = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1 if value.numel() else 0
    span = Span(block, value.storage_offset() * size, extent * size)
    return Tensor(dtype, shape, (Piece(span, None, None if value.is_contiguous() else strides),))


def _bytes_of(storage: Any) -> memoryview:
    import torch

    data: memoryview = torch.tensor([], dtype=torch.uint8).set_(storage).numpy().data
    return data


def _reader(value: Any) -> Callable[[Box], Array]:
    """Boxes of a tensor on another device, copied to memory one at a time."""

    def read(box: Box) -> Array:
        import numpy as np
        import torch

        part = value[box.slices()].contiguous().cpu()
        raw: Array = part.reshape(-1).view(torch.uint8).numpy()
        return raw.view(np.dtype(f"V{value.element_size()}")).reshape(box.shape)

    return read


def _block(data: memoryview) -> MemoryBlock:
    return MemoryBlock(f"memory {os.getpid()}-{os.urandom(8).hex()}-{next(_numbers)}", data.cast("B"))
