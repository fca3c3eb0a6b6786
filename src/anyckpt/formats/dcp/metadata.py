"""`.metadata` of torch.distributed.checkpoint: which tensors there are, in which chunks, and where each item lies.

    Metadata { state_dict_metadata: {name: TensorStorageMetadata {properties, size, chunks: [{offsets, sizes}]}
                                         | BytesStorageMetadata {}}
               planner_data:        {name: path}                              keys and list indices, or nothing
               storage_data:        {MetadataIndex {fqn, offset, index}:
                                     _StorageInfo {relative_path, offset, length[, transform_descriptors]}}
               storage_meta, version }

A pickle of protocol 4 that torch loads without any guard; here it runs on the inert machine. Files of torch 2.0 to 2.2
lack `version`, `storage_meta` and the transforms; those of 2.13 have them all. `index` does not take part in the
equality of a MetadataIndex. Saves of very many ranks have millions of chunks, so the rows below turn each object into a
tuple as soon as it is built, and chunks of a tensor into two arrays.
Source: torch 2.13 `distributed/checkpoint/{metadata,filesystem}.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from anyckpt.core.box import Shape
from anyckpt.core.dtypes import DType
from anyckpt.core.inert import Opaque
from anyckpt.finding import Report, fail
from anyckpt.formats.dcp import stamps
from anyckpt.io.bounds import byte_count
from anyckpt.io.paths import printable
from anyckpt.pickle.call import UNREADABLE, Context, Row, record, unreadable
from anyckpt.pickle.machine import run
from anyckpt.pickle.result import Limits, Result

if TYPE_CHECKING:
    from anyckpt.core.source import File

    Ints = np.ndarray[Any, np.dtype[np.int64]]

MAX_METADATA_BYTES = 8 << 30
MAX_PATH_PARTS = 64
_LIMITS = Limits(opcodes=4_000_000_000, memo=400_000_000, stack=400_000_000)
"""The bounds that matter are those by the stream's own bytes; a metadata file of a large save has billions of them."""

Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Item:
    """Where one stored thing lies: `length` bytes at `offset` of the file `path`, coded by `transforms` in order."""

    path: str
    offset: int
    length: int
    transforms: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Chunks:
    """The chunks of one tensor: `starts[i]` and `sizes[i]` along each axis; arrays of [n_chunks, n_axes]."""

    dtype: DType
    shape: Shape
    starts: Ints
    sizes: Ints


@dataclass(slots=True)
class Metadata:
    """What one or several metadata files say.

    `tensors` by name; `bytes_items` are the names of what is no tensor; `items` by (name, start of the chunk), the
    start being None for what is no tensor; `paths` where each name stood in the object that was saved.
    """

    tensors: dict[str, Chunks] = field(default_factory=dict)
    bytes_items: list[str] = field(default_factory=list)
    items: dict[tuple[str, Shape | None], Item | tuple[Any, ...]] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)
    version: str = ""
    save_id: str = ""
    imports: tuple[Any, ...] = ()
    others: dict[str, Any] = field(default_factory=dict)


def read_metadata(file: File, report: Report) -> Metadata:
    """Read one metadata file. Raises CheckpointError where it holds no Metadata at all; other faults are reported."""
    if file.size == 0:
        raise fail("empty-file", "has no bytes: the save was cut short", where=file.name)
    if file.size > MAX_METADATA_BYTES:
        raise fail("limit-exceeded", f"has {byte_count(file.size)}", where=file.name)
    result = run(file.read(0, file.size), where=file.name, rows=ROWS, limits=_LIMITS)
    report.worsen(result.verdict)
    report.extend(result.findings)
    if result.complete and result.end < file.size:
        message = f"{file.size - result.end:,} bytes follow the pickle"
        report.add("trailing-data", message, where=file.name)
    return _metadata(result, file.name, report)


def _metadata(result: Result, where: str, report: Report) -> Metadata:
    saved = result.value.attributes() if isinstance(result.value, Opaque) else result.value
    if not isinstance(saved, dict) or not isinstance(saved.get("state_dict_metadata"), dict):
        if not result.complete:
            finding = next(f for f in result.findings if f.severity == "error")
            raise fail(finding.code, finding.message, where=where, hint="the save was cut short; use an earlier one")
        raise fail("malformed-pickle", "holds no Metadata of torch.distributed.checkpoint", where=where)
    out = Metadata(imports=result.imports)
    for name, entry in saved.pop("state_dict_metadata").items():
        if isinstance(entry, Chunks):
            out.tensors[str(name)] = entry
        elif isinstance(entry, Opaque) and entry.class_name.endswith(".BytesStorageMetadata"):
            out.bytes_items.append(str(name))
        elif not unreadable(entry):
            report.add("malformed-pickle", f"the entry of {printable(str(name))!r} is of an unknown kind", where=where)
    storage = saved.pop("storage_data", None)
    if isinstance(storage, dict):
        out.items = storage
    paths = saved.pop("planner_data", None)
    if isinstance(paths, dict):
        out.paths = {str(name): path for name, path in paths.items() if _is_path(path)}
        out.others = {"planner_data": {n: v for n, v in paths.items() if not _is_path(v)}}
    elif paths is not None:
        out.others = {"planner_data": paths}
    version, meta = saved.pop("version", None), saved.pop("storage_meta", None)
    out.version = version if isinstance(version, str) else ""
    save_id = meta.attributes().get("save_id") if isinstance(meta, Opaque) else None
    out.save_id = save_id if isinstance(save_id, str) else ""
    out.others.update(saved)
    return out


def _is_path(path: Any) -> bool:
    return (
        isinstance(path, tuple | list)
        and 0 < len(path) <= MAX_PATH_PARTS
        and all(isinstance(part, str) or (type(part) is int and 0 <= part < 1 << 31) for part in path)
    )


def as_item(value: Any) -> Item | None:
    """One value of `items` as an Item; None where it was unreadable, which is reported already."""
    if isinstance(value, Item):
        return value
    return Item(*value) if type(value) is tuple and len(value) == 4 else None


# -- rows of the pickle machine --------------------------------------------------------------------------------------


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
    return path, offset, length, tuple(transforms)


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
