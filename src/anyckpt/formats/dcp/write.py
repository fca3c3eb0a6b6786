"""The DCP folder to be, for any number of ranks: FSDP2's shards, as `torch.distributed.checkpoint.load` reads them.

    .metadata       Metadata 1.0.0, with the path of every name
    __R_0.distcp    rank R's items: its part of every tensor, cut along the first axis as torch.chunk does; what has no
                    axis and what is no tensor is rank 0's

Any world size loads any other: the loader intersects boxes. Names are those of `get_state_dict`: `<model>.<parameter>`
and `<optimizer>.state.<parameter>.<slot>` with `param_groups` as a list whose `params` are names, so that
`set_state_dict` takes them. A loader finds only what it asks for under the same keys: they are the source's own, else
`model` and `optimizer`.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Mapping as ReadOnly
from dataclasses import dataclass, field, replace
from typing import Any

from anyckpt.core import ops
from anyckpt.core.box import Box, Shape, whole
from anyckpt.core.checkpoint import Checkpoint
from anyckpt.core.dtypes import DType
from anyckpt.core.inert import Mapping, NumpyArray, Text
from anyckpt.core.layout import Checksum, FileLayout, Part
from anyckpt.core.tensor import Tensor
from anyckpt.errors import UsageError
from anyckpt.finding import Finding
from anyckpt.formats.table import WriteOptions
from anyckpt.formats.torch import zipwrite
from anyckpt.formats.torch.plain import Replacements
from anyckpt.pickle.emit import emit
from anyckpt.pickle.reduce import Call, Name
from anyckpt.sharding.grid import shards

MAX_WORLD = 1 << 20
Path = tuple[str | int, ...]


@dataclass(slots=True)
class Data:
    """One data file in the making: parts laid one after the other."""

    name: str
    size: int = 0
    parts: list[Part] = field(default_factory=list)
    checksums: list[Checksum] = field(default_factory=list)

    def add(self, item: FileLayout) -> tuple[int, int]:
        """Append an item; returns its offset and length."""
        at = self.size
        self.parts += [replace(part, offset=at + part.offset) for part in item.parts]
        self.checksums += [Checksum(at + c.offset, at + c.start, at + c.stop) for c in item.checksums]
        self.size += item.size
        return at, item.size


@dataclass(slots=True)
class Envelopes:
    """torch.save files of tensors of one type and shape differ in nothing but their elements: each is laid out once."""

    known: dict[tuple[DType, Shape], FileLayout] = field(default_factory=dict)

    def of(self, tensor: Tensor) -> FileLayout:
        """The torch.save file of one tensor."""
        key = (tensor.dtype, tensor.shape)
        if key not in self.known:
            self.known[key] = zipwrite.archive(tensor, "archive")
        item = self.known[key]
        parts = tuple(replace(p, content=tensor) if isinstance(p.content, Tensor) else p for p in item.parts)
        return replace(item, parts=parts)


@dataclass(frozen=True, slots=True)
class Chunked:
    """A tensor in chunks that are said: (rank whose file it goes to, where it begins, its elements)."""

    dtype: DType
    shape: Shape
    chunks: tuple[tuple[int, Shape, Tensor], ...]


def write(checkpoint: Checkpoint, options: WriteOptions) -> list[FileLayout]:
    """The files to be; `options.topology.world` ranks, one where it is not given.

    Raises UsageError for a world that makes no sense, Refused for what torch has no form for.
    """
    world = max(1, options.topology.world or options.topology.dp) if options.topology else 1
    if world > MAX_WORLD:
        raise UsageError(f"a world of {world:,} ranks is beyond {MAX_WORLD:,}")
    checkpoint = for_torch(checkpoint, options, world)
    paths: dict[str, Path] = {}
    values: dict[str, Any] = {}
    for path, value in leaves(saved_object(checkpoint, options)):
        name = ".".join(map(str, path))
        if name in values:
            raise UsageError(f"two entries would be called {name!r}", hint="rename one of them in the source")
        paths[name] = path
        values[name] = _chunked(value, world) if isinstance(value, Tensor) else value
    return folder(values, world, paths)


def _chunked(tensor: Tensor, world: int) -> Chunked:
    """A tensor cut along its first axis, as torch.chunk does."""
    chunks: list[tuple[int, Shape, Tensor]] = []
    for rank, box in enumerate(_boxes(tensor.shape, world)):
        if box.volume or not tensor.size:
            chunks.append((rank, box.start, ops.slice_tensor(tensor, box)))
        if not tensor.size:
            break
    return Chunked(tensor.dtype, tensor.shape, tuple(chunks))


def folder(
    values: ReadOnly[str, Chunked | Any], n_ranks: int, paths: ReadOnly[str, Path] | None = None
) -> list[FileLayout]:
    """The data files and `.metadata` of named values: tensors in chunks, and objects, which are rank 0's.

    `paths`: where each name stands in the object that is saved; None: they stand for themselves.
    """
    files = [Data(f"__{rank}_0.distcp") for rank in range(n_ranks)]
    envelopes = Envelopes()
    entries: dict[str, Any] = {}
    storage: dict[Any, Any] = {}
    for name, value in values.items():
        if not isinstance(value, Chunked):
            at, length = files[0].add(zipwrite.archive(value, "archive"))
            entries[name] = _new(_METADATA + "BytesStorageMetadata", {})
            storage[_index(name, None, None)] = _info(files[0].name, at, length)
            continue
        chunks: list[Call] = []
        for rank, start, tensor in value.chunks:
            at, length = files[rank].add(envelopes.of(tensor))
            storage[_index(name, start, len(chunks))] = _info(files[rank].name, at, length)
            stop = tuple(a + n for a, n in zip(start, tensor.shape, strict=True))
            chunks.append(_chunk(Box(start, stop)))
        entries[name] = _tensor(value, chunks)
    metadata = {
        "state_dict_metadata": entries, "planner_data": None if paths is None else dict(paths),
        "storage_data": storage, "storage_meta": None, "version": "1.0.0",
    }  # fmt: skip
    data = emit(_new(_METADATA + "Metadata", metadata), storage=_no_storage)
    written = [FileLayout(f.name, f.size, tuple(f.parts), tuple(f.checksums)) for f in files if f.size]
    return [*written, FileLayout(".metadata", len(data), (Part(0, len(data), data),))]


def for_torch(checkpoint: Checkpoint, options: WriteOptions, world: int) -> Checkpoint:
    """The checkpoint as torch's own optimizers keep it: no masters beside the weights. Tells what is lost by that.

    Findings go to `options.extra["findings"]`, if there.
    """
    found = options.extra.get("findings")
    findings: list[Finding] = found if isinstance(found, list) else []
    saved_by = checkpoint.topology.world if checkpoint.topology else 0
    if options.extra.get("training") and checkpoint.rng is not None and saved_by > 1 and saved_by != world:
        message = f"generators' states were saved by {saved_by} ranks; {world} ranks can't take them over"
        findings.append(Finding("lossy", "warning", message, hint="they are written as they were"))
    optimizer = checkpoint.optimizer
    masters = optimizer.slots.get("master") if optimizer is not None else None
    if optimizer is None or not masters:
        return checkpoint
    rounded = [n for n, t in masters.items() if n in checkpoint.weights and checkpoint.weights[n].dtype != t.dtype]
    if rounded:
        message = f"{len(rounded)} weights are written as the model computes with them; torch keeps no masters beside"
        hint = "add --weights master to write the masters in their place"
        findings.append(Finding("lossy", "warning", message, where=rounded[0], hint=hint))
    slots = {slot: tensors for slot, tensors in optimizer.slots.items() if slot != "master"}
    return replace(checkpoint, optimizer=replace(optimizer, slots=slots))


def saved_object(checkpoint: Checkpoint, options: WriteOptions) -> dict[str, Any]:
    """The nested dict that a trainer would hand to dcp.save, plain data and tensors only."""
    weights = zipwrite.state_dict(checkpoint, options)
    weights.attributes = {}
    replaced = options.extra.get("replaced")
    replacements = Replacements(replaced if isinstance(replaced, list) else [])
    if options.extra.get("training"):
        plain = replacements.plain(zipwrite.training_dict(checkpoint, weights, by_name=True))
    else:
        root = str(checkpoint.facts.get("root") or "model")
        plain = replacements.plain({"model" if "." in root else root: weights})
    return dict(plain)


def leaves(root: Any) -> Iterator[tuple[Path, Any]]:
    """What becomes an item, as torch flattens it: dicts always, lists that hold a tensor or a dict.

    Source: torch 2.13 `distributed/checkpoint/_traverse.py`, `traverse_state_dict`.
    """
    todo: list[tuple[Path, Any]] = [((str(key),), value) for key, value in reversed(list(root.items()))]
    while todo:
        path, value = todo.pop()
        if isinstance(value, NumpyArray) and not value.is_scalar:
            value = value.tensor
        if isinstance(value, dict) and not (isinstance(value, Mapping) and value.kind == "collections.Counter"):
            todo += [((*path, str(key)), inner) for key, inner in reversed(list(value.items()))]
        elif isinstance(value, list) and not _is_terminal(value):
            todo += [((*path, i), inner) for i, inner in reversed(list(enumerate(value)))]
        else:
            yield path, value


def _is_terminal(value: Any) -> bool:
    if isinstance(value, dict):
        return False
    if not isinstance(value, list):
        return True
    return not any(
        isinstance(entry, Tensor) or (isinstance(entry, dict | list) and not _is_terminal(entry)) for entry in value
    )


def _boxes(shape: Shape, world: int) -> list[Box]:
    return shards(shape, world) if shape and world > 1 else [whole(shape)]


# -- the metadata's objects, as the pickle writer takes them ---------------------------------------------------------

_METADATA = "torch.distributed.checkpoint.metadata."
_SIZE = Name("torch", "Size")


def _new(path: str, state: Any) -> Call:
    module, _, name = path.rpartition(".")
    return Call(Name(module, name), (), state=state, new=True)


def _size(shape: Shape) -> Call:
    return Call(_SIZE, (shape,))


def _chunk(box: Box) -> Call:
    return _new(_METADATA + "ChunkStorageMetadata", {"offsets": _size(box.start), "sizes": _size(box.shape)})


def _index(name: str, start: Shape | None, index: int | None) -> Call:
    offset = None if start is None else _size(start)
    return _new(_METADATA + "MetadataIndex", {"fqn": name, "offset": offset, "index": index})


def _info(path: str, offset: int, length: int) -> Call:
    state = {"relative_path": path, "offset": offset, "length": length}
    return _new("torch.distributed.checkpoint.filesystem._StorageInfo", state)


def _tensor(tensor: Chunked, chunks: list[Call]) -> Call:
    encoding = Call(Name("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"), (0,))
    properties = (tensor.dtype, Text("torch.strided", "torch.layout"), False, encoding, False)
    state = {
        "properties": _new(_METADATA + "TensorProperties", properties), "size": _size(tensor.shape), "chunks": chunks,
    }  # fmt: skip
    return _new(_METADATA + "TensorStorageMetadata", state)


def _no_storage(tensor: Tensor) -> Any:
    raise AssertionError("the metadata holds no tensors")
