"""The first container of torch (2016, before 0.1.10): a tar of four members that are streams of pickles and numbers.

    sys_info   pickle
    storages   pickle(n)  n × [pickle((key, location, class)), n_elements i64, data]
               pickle([(view key, root key, offset, n_elements), …])
    tensors    pickle(n)
               n × [pickle((key, storage key, class)), n_axes i32, 4 bytes, sizes i64…, strides i64…, offset i64]
    pickle     the object; a persistent id is the key of a tensor

Facts from torch 2.13 `torch/serialization.py` (legacy_load). torch.load(weights_only=True) refuses this layout, which
was a way around that guard (CVE-2025-32434), so the verdict is never better than unknown.
"""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

from anyckpt.core.checkpoint import Checkpoint
from anyckpt.core.inert import Global
from anyckpt.core.source import File, Span
from anyckpt.core.tensor import Tensor
from anyckpt.errors import CheckpointError
from anyckpt.finding import Report, fail
from anyckpt.formats.torch.state import read_state
from anyckpt.formats.torch.stream import admit, class_of_module_id, run_at
from anyckpt.io.tar import TarArchive, read_tar
from anyckpt.io.view import SubFile
from anyckpt.pickle.storage import STORAGE_DTYPES, Storage
from anyckpt.pickle.tensors import view

MEMBERS = ("sys_info", "pickle", "tensors", "storages")
SINCE = ("0.1", "the tar container of 2016")
MAX_AXES = 64  # torch's own limit (c10 allows more, nobody has had more)


def matches(file: File, head: bytes) -> bool:
    """A tar with the members `pickle` and `storages`."""
    try:
        members = read_tar(file, Report()).members
    except CheckpointError:
        return False
    return "pickle" in members and ("storages" in members or "tensors" in members)


def read(file: File, report: Report) -> Checkpoint:
    """Describe the checkpoint. Raises CheckpointError where a member is missing or broken."""
    archive = read_tar(file, report)
    report.worsen("unknown")
    report.add("unknown-code", "is a tar of 2016: its loader runs four pickles without any guard", where=file.name)
    for name in MEMBERS:  # each is judged, whatever is wrong with the others
        if name in archive.members:
            report.worsen(run_at(archive.open(name), 0, f"{file.name}!{name}", lambda pid: None).verdict)
    storages = _storages(archive, report)
    tensors = _tensors(archive, storages, report)

    def persistent(pid: Any) -> Any:
        module = class_of_module_id(pid, report, file.name)
        if module is not None:
            return module
        tensor = tensors.get(_key(pid))
        if tensor is None:
            raise fail("missing-record", f"the object names a tensor {str(pid)[:40]!r} that is not in the file")
        return tensor

    member = archive.open("pickle")
    result = run_at(member, 0, member.name, persistent, first=1 << 20)
    root = admit(result, report)
    for name in sorted(set(archive.members) - set(MEMBERS)):
        report.add("unexpected-member", "is not a part of this format", where=f"{file.name}!{name}")
    facts = {
        "container": "torch tar", "since": SINCE, "object": root, "results": (result,),
        "storages": tuple(storages.values()), "container_bytes": file.size,
    }
    checkpoint = read_state(root, format="torch-tar", path=file.name, report=report, facts=facts)
    return replace(checkpoint, facts={**checkpoint.facts, "weights_only": ("the tar container",)})


class _Cursor:
    """A place in a member: pickles and numbers are taken from it in turn."""

    def __init__(self, file: SubFile, report: Report) -> None:
        self.file, self.report, self.offset = file, report, 0

    def pickle(self) -> Any:
        result = run_at(self.file, self.offset, f"{self.file.name}, byte {self.offset}")
        self.offset += result.end
        return admit(result, self.report)

    def numbers(self, layout: str) -> tuple[int, ...]:
        n_bytes = struct.calcsize(layout)
        data = self.file.read(self.offset, n_bytes)
        self.offset += n_bytes
        return struct.unpack(layout, data)

    def count(self) -> int:
        """How many things follow; each takes 16 bytes at the least."""
        n = self.pickle()
        if type(n) is not int or n < 0:
            raise fail("malformed-pickle", f"a count is {str(n)[:40]}", where=self.file.name)
        if n * 16 > self.file.size:
            raise fail("truncated", f"claims {n:,} entries in {self.file.size:,} bytes", where=self.file.name)
        return n


def _storages(archive: TarArchive, report: Report) -> dict[Any, Storage]:
    cursor = _Cursor(archive.open("storages"), report)
    storages: dict[Any, Storage] = {}
    for _ in range(cursor.count()):
        key, location, cls = _three(cursor.pickle(), cursor.file.name)
        if not isinstance(cls, Global) or str(cls) not in STORAGE_DTYPES:
            raise fail("malformed-pickle", f"storage {key} is of the class {str(cls)[:60]}", where=cursor.file.name)
        dtype = STORAGE_DTYPES[str(cls)]
        (n_elements,) = cursor.numbers("<q")
        if n_elements < 0:
            raise fail("negative-size", f"storage {key} claims {n_elements} elements", where=cursor.file.name)
        n_bytes = n_elements * (dtype.itemsize if dtype else 1)
        if cursor.offset + n_bytes > cursor.file.size:
            raise fail("truncated", f"storage {key} should have {n_bytes:,} bytes", where=cursor.file.name)
        span = Span(cursor.file.file, cursor.file.start + cursor.offset, n_bytes)
        storages[_key(key)] = Storage(span, dtype, str(key), str(location), n_bytes, n_elements)
        cursor.offset += n_bytes
    views = cursor.pickle()
    for entry in views if isinstance(views, list) else ():
        if not isinstance(entry, tuple) or len(entry) != 4 or _key(entry[1]) not in storages:
            raise fail("malformed-pickle", "a view on a storage names none", where=cursor.file.name)
        root, first, n_elements = storages[_key(entry[1])], entry[2], entry[3]
        itemsize = root.dtype.itemsize if root.dtype else 1
        counted = type(first) is int and type(n_elements) is int
        if not counted or not 0 <= first <= first + n_elements <= root.n_elements:
            raise fail("offset-out-of-bounds", "a view on a storage reaches beyond it", where=cursor.file.name)
        part = root.part(first * itemsize, n_elements * itemsize, 0)
        storages[_key(entry[0])] = replace(root, source=part, n_bytes=n_elements * itemsize, n_elements=n_elements)
    return storages


def _tensors(archive: TarArchive, storages: dict[Any, Storage], report: Report) -> dict[Any, Tensor]:
    cursor = _Cursor(archive.open("tensors"), report)
    tensors: dict[Any, Tensor] = {}
    for _ in range(cursor.count()):
        key, storage_key, _ = _three(cursor.pickle(), cursor.file.name)
        n_axes, _ = cursor.numbers("<ii")
        if not 0 <= n_axes <= MAX_AXES:
            raise fail("malformed-item", f"tensor {key} claims {n_axes} axes", where=cursor.file.name)
        size, stride = cursor.numbers(f"<{n_axes}q"), cursor.numbers(f"<{n_axes}q")
        (offset,) = cursor.numbers("<q")
        storage = storages.get(_key(storage_key))
        if storage is None:
            raise fail("missing-record", f"tensor {key} names a storage that is not there", where=cursor.file.name)
        tensors[_key(key)] = view(storage, offset, size, stride)
    return tensors


def _three(value: Any, where: str) -> tuple[Any, Any, Any]:
    if not isinstance(value, tuple) or len(value) != 3:
        raise fail("malformed-pickle", "an entry is not made of three parts", where=where)
    return value[0], value[1], value[2]


def _key(key: Any) -> str:
    """Keys are numbers in the lists and their decimal text in the object."""
    return str(key) if isinstance(key, int | str) else repr(key)[:80]
