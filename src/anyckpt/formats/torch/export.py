"""torch.export archives (.pt2): the weights beside a program, which is listed and never run.

    <top>/archive_format                             "pt2"                                          torch >= 2.7
    <top>/data/weights/<model>_weights_config.json   {"config": {name: {path_name, use_pickle, is_param, tensor_meta}}}
    <top>/data/weights/weight_<n>                    raw bytes of a storage, or with use_pickle a torch.save of a tensor
    <top>/data/constants/…                           the same for constants; custom_obj_<n> are pickles
    <top>/data/sample_inputs/<model>.pt              torch.save
    <top>/models/<model>.json                        the program, with stack traces of its source
    <top>/data/aotinductor/…                         compiled code
    serialized_exported_program.json, serialized_state_dict.pt, serialized_constants.pt, …         torch 2.1 to 2.6

Facts from torch 2.13: `torch/export/__init__.py`, `torch/export/pt2_archive/_package.py`, `torch/_export/serde/`.
"""

from __future__ import annotations

import re
from typing import Any

from anyckpt.core.checkpoint import Checkpoint
from anyckpt.core.dtypes import DTYPES
from anyckpt.core.source import File
from anyckpt.errors import CheckpointError
from anyckpt.finding import Report, fail, located
from anyckpt.formats.torch.archive import (
    is_big_endian,
    looks_like_pickle,
    members_of,
    open_archive,
    record_span,
    run_pickle,
)
from anyckpt.formats.torch.state import read_state
from anyckpt.formats.torch.zip import load
from anyckpt.formats.torch.zip import verify as verify
from anyckpt.io import json
from anyckpt.io.paths import printable
from anyckpt.io.zip import ZipArchive, read_zip
from anyckpt.pickle.result import Result
from anyckpt.pickle.storage import Storage
from anyckpt.pickle.tensors import integers, view

SINCE = ("2.7", "a torch.export archive (read by torch.export.load)")
SINCE_OLD = ("2.1", "a torch.export archive (read by torch.export.load)")
OLD_PROGRAM, OLD_WEIGHTS = "serialized_exported_program.json", "serialized_state_dict.pt"
SCALAR_TYPES = {
    1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float16", 7: "float32", 8: "float64", 9: "complex32",
    10: "complex64", 11: "complex128", 12: "bool", 13: "bfloat16", 28: "uint16", 29: "float8_e4m3fn", 30: "float8_e5m2",
    31: "float8_e4m3fnuz", 32: "float8_e5m2fnuz", 33: "float8_e8m0fnu", 34: "uint32", 35: "uint64",
}
_CONFIG = re.compile(r"data/(weights|constants)/(.+)_(?:weights|constants)_config\.json")
_SOURCE_PATH = re.compile(rb'File \\"(/[^"\\]{1,400})')
_PROGRAM_BYTES = 16 << 20


def matches(file: File, head: bytes) -> bool:
    """A zip that says `pt2`, or one with the members of torch 2.1 to 2.6."""
    archive = members_of(file)
    if archive is None:
        return False
    names = archive.members
    return f"{archive.top}/archive_format" in names or OLD_PROGRAM in names or OLD_WEIGHTS in names


def read(file: File, report: Report) -> Checkpoint:
    """Describe the weights; constants go to `state`. Raises CheckpointError where the list of weights can't be had."""
    archive = open_archive(file, report)
    results: list[Result] = []
    storages: list[Storage] = []
    old = OLD_WEIGHTS in archive.members or OLD_PROGRAM in archive.members
    root = _old(archive, results, storages, report) if old else _new(archive, results, storages, report)
    lead = "" if old else f"{archive.top}/"
    compiled = [n for n in archive.members if n.startswith(f"{lead}data/aotinductor/")]
    if compiled:
        report.worsen("unknown")
        message = f"carries {len(compiled)} files of compiled code, which its loader runs"
        report.add("contains-code", message, where=file.name)
    _note_paths(archive, report)
    facts = {
        "container": "torch.export", "since": SINCE_OLD if old else SINCE, "results": tuple(results),
        "storages": tuple(storages), "container_bytes": file.size,
    }
    return read_state(root, format="torch-export", path=file.name, report=report, facts=facts)


def _new(archive: ZipArchive, results: list[Result], storages: list[Storage], report: Report) -> dict[str, Any]:
    found: dict[str, dict[str, dict[str, Any]]] = {"weights": {}, "constants": {}}
    swapped = is_big_endian(archive, report)
    for name in archive.members:
        match = _CONFIG.fullmatch(name.removeprefix(f"{archive.top}/"))
        if match:
            config = _config(archive, name)
            folder = name.rpartition("/")[0]
            shared: dict[str, Storage] = {}
            found[match[1]][match[2]] = {
                key: _payload(archive, folder, key, entry, swapped, shared, results, storages, report)
                for key, entry in config.items()
            }
            storages += shared.values()
    if not found["weights"]:
        raise fail("missing-record", "it has no list of weights (data/weights/*_weights_config.json)",
                   where=archive.file.name)
    for name in archive.members:
        if "/data/sample_inputs/" in name and name.endswith(".pt"):
            try:
                _nested(archive, name, results, [], report)
            except CheckpointError as error:
                report.extend([located(error, _member_name(archive, name)).finding])
                report.worsen("unknown")
    weights, constants = found["weights"], found["constants"]
    if len(weights) == 1:
        return {"state_dict": next(iter(weights.values())), "constants": next(iter(constants.values()), {})}
    joined = {f"{model}.{k}": v for model, entries in weights.items() for k, v in entries.items()}
    return {"state_dict": joined, "constants": constants}


def _old(archive: ZipArchive, results: list[Result], storages: list[Storage], report: Report) -> dict[str, Any]:
    values = {
        name.removeprefix("serialized_").removesuffix(".pt"): _nested(archive, name, results, storages, report)
        for name in archive.members
        if name.startswith("serialized_") and name.endswith(".pt")
    }
    if not isinstance(values.get("state_dict"), dict):
        raise fail("missing-record", f"it has no {OLD_WEIGHTS}", where=archive.file.name)
    return values


def _member_name(archive: ZipArchive, name: str) -> str:
    """What to call a member in a finding."""
    return f"{archive.file.name}!{printable(name)}"


def _config(archive: ZipArchive, name: str) -> dict[str, Any]:
    member = archive.open(name)
    document = json.parse(member.read(0, member.size), where=member.name, code="bad-header")
    config = document.get("config") if isinstance(document, dict) else None
    if not isinstance(config, dict):
        raise fail("bad-header", 'has no "config"', where=member.name)
    return config


def _payload(
    archive: ZipArchive, folder: str, key: str, entry: Any, swapped: bool, shared: dict[str, Storage],
    results: list[Result], storages: list[Storage], report: Report,
) -> Any:
    """One weight or constant: a view of a raw record, or the value of a pickled one."""
    where = f"{archive.file.name}, tensor {key}"
    path = entry.get("path_name") if isinstance(entry, dict) else None
    if not isinstance(path, str):
        raise fail("bad-header", "its entry names no record", where=where)
    name = f"{folder}/{path}"
    if entry.get("use_pickle"):
        return _nested(archive, name, results, storages, report)
    meta = entry.get("tensor_meta")
    if not isinstance(meta, dict):
        raise fail("bad-header", "its entry lacks tensor_meta", where=where)
    dtype = DTYPES.get(SCALAR_TYPES.get(meta.get("dtype", 0), ""))
    if dtype is None:
        raise fail("unknown-dtype", f"has the scalar type {str(meta.get('dtype'))[:20]}", where=where)
    storage = shared.get(path)
    if storage is None:
        span = record_span(archive, name)
        device = meta.get("device")
        location = device.get("type") if isinstance(device, dict) else None
        storage = shared[path] = Storage(
            span, dtype, path, str(location or "cpu"), span.length, span.length // dtype.itemsize, swapped
        )
    try:
        offset = _int(meta.get("storage_offset"))
        return view(storage, offset, _ints(meta.get("sizes")), _ints(meta.get("strides")), dtype)
    except CheckpointError as error:
        raise fail(error.finding.code, error.finding.message, where=where) from error


def _ints(values: Any) -> tuple[int, ...]:
    return integers([_int(v) for v in values] if isinstance(values, list) else None, "size")


def _int(value: Any) -> Any:
    return value.get("as_int") if isinstance(value, dict) else value


def _nested(archive: ZipArchive, name: str, results: list[Result], storages: list[Storage], report: Report) -> Any:
    """The value in a member that torch.save wrote, or that is a bare pickle."""
    member = archive.open(name)
    head = member.read(0, min(4, member.size))
    if head != b"PK\3\4":
        data = member.read(0, member.size)
        if not looks_like_pickle(data):
            raise fail("malformed-item", "is neither a torch file nor a pickle", where=member.name)
        result = run_pickle(data, member.name, report)
    else:
        result, records = load(read_zip(member, report), report)
        storages += records.storages.values()
    results.append(result)
    return result.value


def _note_paths(archive: ZipArchive, report: Report) -> None:
    """Programs carry the stack traces of their source, absolute paths and all."""
    for name, member in archive.members.items():
        if name.endswith(".json") and ("/models/" in name or name == OLD_PROGRAM):
            file = archive.open(name)
            found = _SOURCE_PATH.search(file.read(0, min(member.size, _PROGRAM_BYTES)))
            if found:
                path = found[1].decode("utf-8", "replace")
                report.add("privacy", f"its program names source files by absolute path, {path} first", where=file.name)
                return
