"""`.metadata` of torch.distributed.checkpoint: which tensors there are, in which chunks, and where each item lies.

    Metadata { state_dict_metadata: {name: TensorStorageMetadata {properties, size, chunks: [{offsets, sizes}]}
                                         | BytesStorageMetadata {}}
               planner_data:        {name: path}                              keys and list indices, or nothing
               storage_data:        {MetadataIndex {fqn, offset, index}:
                                     _StorageInfo {relative_path, offset, length[, transform_descriptors]}}
               storage_meta, version }

A pickle of protocol 4 that torch loads without any guard; here it runs on the inert machine. Files of torch 2.0 to 2.2
lack `version`, `storage_meta` and the transforms; those of 2.13 have them all. Saves of many ranks have millions of
chunks, so `rows` makes a tuple of each object as soon as it is built, and two arrays of the chunks of a tensor.
Source: torch 2.13 `distributed/checkpoint/{metadata,filesystem}.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from anyckpt.core.box import Shape
from anyckpt.core.inert import Opaque
from anyckpt.finding import Report, fail
from anyckpt.formats.dcp.records import Chunks, Item, Path
from anyckpt.formats.dcp.rows import ROWS
from anyckpt.io.bounds import byte_count
from anyckpt.io.paths import printable
from anyckpt.pickle.call import unreadable
from anyckpt.pickle.machine import run
from anyckpt.pickle.result import Limits, Result

if TYPE_CHECKING:
    from anyckpt.core.source import File

MAX_METADATA_BYTES = 8 << 30
MAX_PATH_PARTS = 64
_LIMITS = Limits(opcodes=4_000_000_000, memo=400_000_000, stack=400_000_000)
"""The bounds that matter are those by the stream's own bytes; a metadata file of a large save has billions of them."""


@dataclass(slots=True)
class Metadata:
    """What one or several metadata files say.

    `tensors` by name; `bytes_items` are the names of what is no tensor; `items` by (name, start of the chunk), the
    start being None for what is no tensor; `paths` where each name stood in the object that was saved.
    """

    tensors: dict[str, Chunks] = field(default_factory=dict)
    bytes_items: list[str] = field(default_factory=list)
    items: dict[tuple[str, Shape | None], Item] = field(default_factory=dict)
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
        out.items = storage if all(map(_is_item, storage.values())) else {
            key: item for key, item in storage.items() if _is_item(item) and type(key) is tuple
        }
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


def _is_item(value: Any) -> bool:
    """False for what was unreadable, which is reported already."""
    return type(value) is Item


def _is_path(path: Any) -> bool:
    return (
        isinstance(path, tuple | list)
        and 0 < len(path) <= MAX_PATH_PARTS
        and all(isinstance(part, str) or (type(part) is int and 0 <= part < 1 << 31) for part in path)
    )
