"""How the pickle machine makes plain tuples and arrays of the classes in `.metadata`, as each object is built.

    ChunkStorageMetadata    (start, size)              TensorProperties         the element type
    MetadataIndex           (name, start or None)      TensorStorageMetadata    Chunks
    _StorageInfo            Item

`index` does not take part in the equality of a MetadataIndex. `stamps` reads whole rows of them at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from anyckpt.core.box import Shape
from anyckpt.core.dtypes import DType
from anyckpt.core.inert import Opaque
from anyckpt.finding import fail
from anyckpt.formats.dcp import stamps
from anyckpt.formats.dcp.records import Chunks, Item
from anyckpt.pickle.call import UNREADABLE, Context, Row, record, unreadable

if TYPE_CHECKING:
    from anyckpt.formats.dcp.records import Ints


def _state(target: Opaque, state: Any) -> Mapping[Any, Any]:
    if not isinstance(state, dict):
        raise fail("malformed-pickle", f"{target.cls} is given a state that is no dict")
    return state


def _ints(value: Any, what: str) -> Shape:
    if type(value) is not tuple or any(type(n) is not int for n in value):
        raise fail("malformed-pickle", f"the {what} of a chunk are no tuple of integers")
    return value


def _chunk(target: Opaque, state: Any, context: Context) -> Any:
    values = _state(target, state)
    return _ints(values.get("offsets"), "offsets"), _ints(values.get("sizes"), "sizes")


def _index(target: Opaque, state: Any, context: Context) -> Any:
    values = _state(target, state)
    name, offset = values.get("fqn"), values.get("offset")
    if type(name) is not str:
        raise fail("malformed-pickle", "the name in a MetadataIndex is no text")
    return name, offset if offset is None else _ints(offset, "offsets")


def _info(target: Opaque, state: Any, context: Context) -> Any:
    values = _state(target, state)
    path, offset, length = values.get("relative_path"), values.get("offset"), values.get("length")
    transforms = values.get("transform_descriptors") or ()
    if type(path) is not str or type(offset) is not int or type(length) is not int:
        raise fail("malformed-pickle", "the place of an item is no path with two integers")
    if offset < 0 or length < 0:
        raise fail("negative-size", f"an item lies at {offset:,} with a length of {length:,}")
    if not isinstance(transforms, list | tuple) or not all(isinstance(t, str) for t in transforms):
        raise fail("malformed-pickle", "the transforms of an item are no list of names")
    return Item(path, offset, length, tuple(transforms))


def _properties(target: Opaque, state: Any, context: Context) -> Any:
    values = tuple(state.values()) if isinstance(state, dict) else state
    dtype = values[0] if isinstance(values, tuple) and values else None
    if not isinstance(dtype, DType):
        raise fail("unknown-dtype", f"a tensor has the element type {dtype!r:.60}")
    return dtype


def _tensor(target: Opaque, state: Any, context: Context) -> Any:
    values = _state(target, state)
    dtype, shape, chunks = values.get("properties"), values.get("size"), values.get("chunks")
    if not isinstance(dtype, DType):
        raise fail("malformed-pickle", "a tensor has no properties")
    if any(unreadable(part) for part in (shape, chunks)):
        return Opaque(UNREADABLE)
    shape = _ints(shape, "sizes")
    pairs = [c for c in chunks if type(c) is tuple] if isinstance(chunks, list | tuple) else []
    if any(len(start) != len(shape) or len(size) != len(shape) for start, size in pairs):
        raise fail("shape-mismatch", f"a chunk has another number of axes than its tensor, {list(shape)}")
    starts, sizes = ([pair[i] for pair in pairs] for i in (0, 1))
    return Chunks(dtype, shape, _array(starts, len(shape)), _array(sizes, len(shape)))


def _array(rows: list[Shape], n_axes: int) -> Ints:
    return np.array(rows, np.int64).reshape(len(rows), n_axes)


_METADATA = "torch.distributed.checkpoint.metadata."
ROWS: dict[str, Row] = {
    _METADATA + "ChunkStorageMetadata": Row(record, _chunk, stamp=stamps.chunks),
    _METADATA + "MetadataIndex": Row(record, _index, stamp=stamps.entries),
    _METADATA + "TensorStorageMetadata": Row(record, _tensor),
    _METADATA + "TensorProperties": Row(record, _properties),
    "torch.distributed._shard.sharded_tensor.metadata.TensorProperties": Row(record, _properties),
    "torch.distributed.checkpoint.filesystem._StorageInfo": Row(record, _info),
    "torch.distributed.checkpoint._fsspec_filesystem._StorageInfo": Row(record, _info),
}
"""How the machine turns these classes into plain tuples and arrays as they are built."""
