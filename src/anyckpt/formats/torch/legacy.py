"""torch.save before 1.6, and later with `_use_new_zipfile_serialization=False`: five pickles, then storages.

    pickle(0x1950a86a20f9469cfc6c)  pickle(1001)  pickle({"little_endian": …, …})  pickle(object)  pickle([keys])
    for each key in that list:  n_elements i64, n_elements × itemsize bytes                            little-endian

No checksums and no alignment; where a storage lies follows from the sizes of those before it. Facts from torch 2.13
`torch/serialization.py` (_legacy_save, _legacy_load) and `torch/csrc/serialization.cpp`, which writes counts and
elements little-endian on every machine, whatever `little_endian` says.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from anyckpt.core.checkpoint import Checkpoint
from anyckpt.core.source import Absent, File, Source, Span
from anyckpt.errors import CheckpointError
from anyckpt.finding import Report, fail, located
from anyckpt.formats.torch.archive import MAX_STRAY_BYTES, looks_like_pickle
from anyckpt.formats.torch.state import read_state
from anyckpt.formats.torch.stream import admit, class_of_module_id, run_at
from anyckpt.io.bounds import byte_count
from anyckpt.io.paths import printable
from anyckpt.io.view import SubFile
from anyckpt.pickle.machine import run
from anyckpt.pickle.storage import Storage, StorageId, storage_id

MAGIC = 0x1950A86A20F9469CFC6C
_MAGIC_BYTES = MAGIC.to_bytes(10, "little")
_PROTOCOL = 1001
SINCE = ("0.1", "the stream of torch before 1.6")


def matches(file: File, head: bytes) -> bool:
    """A first pickle that holds the magic number, of whatever pickle protocol."""
    if _MAGIC_BYTES not in head[:32] and str(MAGIC).encode() not in head[:32]:
        return False
    result = run(head[:64])
    return result.complete and result.value == MAGIC


def read(file: File, report: Report) -> Checkpoint:
    """Describe the checkpoint; storages that are cut off are reported and the others stay readable."""
    where = file.name
    wanted: dict[str, StorageId] = {}

    def note(pid: Any) -> Any:
        module = class_of_module_id(pid, report, where)
        if module is not None:
            return module
        found = storage_id(pid)
        known = wanted.setdefault(found.key, found)
        if (known.dtype, known.n_bytes) != (found.dtype, found.n_bytes):
            raise fail("inconsistent", f"storage {found.key!r} is named with two types or lengths")
        return Storage(Absent(found.n_bytes, "not looked for yet"), found.dtype, found.key, "", found.n_bytes, 0)

    offset = 0
    values = []
    for name in ("magic", "protocol", "system"):
        result = run_at(file, offset, f"{where}, {name} pickle")
        values.append(admit(result, report))
        offset += result.end
    if values[1] != _PROTOCOL:
        raise fail("unsupported-version", f"is a torch stream of version {values[1]!r}, not {_PROTOCOL}", where=where)
    big = isinstance(values[2], dict) and values[2].get("little_endian") is False
    object_at = offset
    first = run_at(file, offset, f"{where}, object pickle", note, first=1 << 20)
    admit(first, report)
    offset += first.end
    listed = run_at(file, offset, f"{where}, key pickle", first=1 << 20)
    keys = _keys(admit(listed, report), where)
    offset += listed.end
    sources, end = _storages(file, offset, keys, wanted, report)
    storages: dict[str, Storage] = {}

    def persistent(pid: Any) -> Any:
        module = class_of_module_id(pid, report, where)
        if module is not None:
            return module
        found = storage_id(pid)
        if found.key not in sources:
            raise fail("missing-record", f"storage {found.key!r} is not in the list of keys")
        source = sources[found.key]
        storage = storages.setdefault(
            found.key, Storage(source, found.dtype, found.key, found.location, found.n_bytes, found.n_elements)
        )
        return _view(storage, found)

    result = run(file.read(object_at, first.end), persistent=persistent, where=f"{where}, object pickle")
    root = admit(result, report)
    _check_tail(file, end, report)
    facts = {
        "container": "torch stream", "since": SINCE, "object": root, "results": (result, listed),
        "storages": tuple(storages.values()),
        "byteorder": "little", "container_bytes": file.size,
    }
    if big:
        report.add("unknown-byteorder", "was written on a big-endian machine", where=where, severity="note")
    return read_state(root, format="torch-legacy", path=where, report=report, facts=facts)


def _keys(value: Any, where: str) -> list[str]:
    keys = [key.decode("utf-8", "replace") if isinstance(key, bytes) else key for key in _list(value)]
    if not isinstance(value, list) or not all(isinstance(key, str) for key in keys):
        raise fail("malformed-pickle", "the list of storage keys is none", where=where)
    return keys


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _storages(
    file: File, offset: int, keys: list[str], wanted: dict[str, StorageId], report: Report
) -> tuple[dict[str, Source], int]:
    """Where each storage lies, by its count and the type that the object pickle names, and where the last one ends.

    Each follows from those before it: behind the first that is at fault, which is reported, all are absent.
    """
    base, start = (file.file, file.start) if isinstance(file, SubFile) else (file, 0)
    sources: dict[str, Source] = {}
    try:
        for key in keys:
            n_bytes = _storage_bytes(file, offset, key, wanted, sources)
            if n_bytes is None:
                break
            sources[key] = Span(base, start + offset + 8, n_bytes)
            offset += 8 + n_bytes
        else:
            return sources, offset
        missing = [key for key in keys if key not in sources]
        needed = sum(8 + wanted[key].n_bytes for key in missing if key in wanted)
        lost = byte_count(max(1, offset + needed - file.size))
        message = f"is cut short: {lost} are missing, {len(missing)} of {len(keys)} storages are not whole"
        report.add("truncated", message, where=file.name, hint="download or copy this file again")
    except CheckpointError as error:
        report.extend([located(error, file.name).finding])
    for key, named in wanted.items():
        if key in keys and key not in sources:
            sources[key] = Absent(named.n_bytes, "what stands before it in the file is damaged, or the file ends")
    return sources, file.size


def _storage_bytes(
    file: File, offset: int, key: str, wanted: dict[str, StorageId], earlier: dict[str, Source]
) -> int | None:
    """Bytes of the storage whose count stands at `offset`; None where the file ends within it."""
    found = wanted.get(key)
    if found is None or key in earlier:
        how = "twice" if key in earlier else "that the object does not name"
        raise fail("inconsistent", f"the list of keys has storage {printable(key)!r} {how}")
    if offset + 8 > file.size:
        return None
    n_elements = int.from_bytes(file.read(offset, 8), "little", signed=True)
    if n_elements < 0:
        raise fail("negative-size", f"storage {printable(key)!r} claims {n_elements} elements")
    n_bytes = n_elements * (found.dtype.itemsize if found.dtype else 1)
    if offset + 8 + n_bytes > file.size:
        return None
    if n_bytes != found.n_bytes:
        message = f"storage {printable(key)!r} has {n_elements:,} elements, the object says {found.n_elements:,}"
        raise fail("size-mismatch", message)
    return n_bytes


def _view(storage: Storage, found: StorageId) -> Storage:
    """A storage that is a part of another (torch < 0.4)."""
    if found.view is None:
        return storage
    key, first, n_elements = found.view
    itemsize = found.dtype.itemsize if found.dtype else 1
    if (first + n_elements) * itemsize > storage.n_bytes:
        raise fail("offset-out-of-bounds", f"the view {key!r} on storage {found.key!r} reaches beyond it")
    part = storage.part(first * itemsize, n_elements * itemsize, 0)
    return replace(storage, source=part, n_bytes=n_elements * itemsize, n_elements=n_elements)


def _check_tail(file: File, end: int, report: Report) -> None:
    """What follows the last storage: torch.load does not look at it, another loader may."""
    n_bytes = file.size - end
    if not n_bytes:
        return
    tail = file.read(end, min(n_bytes, MAX_STRAY_BYTES))
    if not tail.strip(b"\0"):
        return
    message = f"{n_bytes:,} bytes follow the last storage"
    if looks_like_pickle(tail):
        result = run(tail, persistent=lambda pid: None, where=f"{file.name}, byte {end}")
        report.worsen(result.verdict)
        report.extend(f for f in result.findings if f.code in ("dangerous-code", "unknown-code"))
        message += ": another pickle"
    elif b"PK\5\6" in tail[-(1 << 16) :]:
        report.worsen("unknown")
        report.add("polyglot", "ends as a zip archive does: other tools would read that one", where=file.name)
    report.add("trailing-data", message, where=file.name, severity="warning")
