"""torch.distributed.checkpoint (DCP): one folder, written by many ranks.

    .metadata                 what there is and where; written last, through .metadata.tmp and a rename
    __R.metadata              instead of it, one a rank (use_collectives=False): each tells of its own rank's chunks
    __R_N.distcp              data of rank R: torch.save files, one an item, one after the other
    meta.pt                   Lightning and Fabric: the rest of the object that was saved

    metadata   the pickle         chunks   tensors of chunks      tree    the nested object again
    items      one stored item    write    the folder to be       hf_storage    the safetensors storage of DCP

Read: torch 2.0 to 2.13, synchronous and asynchronous saves, any number of threads and files, zstd streams. The object
goes through `formats.torch.state`, like one of torch.save, so that what trainers wrap around it is known there.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from anyckpt.core.checkpoint import Checkpoint
from anyckpt.core.topology import Topology
from anyckpt.errors import CheckpointError
from anyckpt.finding import Report, fail
from anyckpt.formats.dcp.chunks import DataFiles, check_items, tensors_of
from anyckpt.formats.dcp.items import load_object, opened, read_chunk
from anyckpt.formats.dcp.metadata import Metadata, read_metadata
from anyckpt.formats.dcp.tree import unflatten
from anyckpt.formats.dcp.write import write
from anyckpt.formats.torch.state import read_state
from anyckpt.io.paths import printable
from anyckpt.io.place import Place
from anyckpt.io.view import sub_file

METADATA = ".metadata"
_RANK_METADATA = re.compile(r"__(\d+)\.metadata")
_DATA = re.compile(r"__(\d+)_(\d+)\.distcp")
LEFTOVERS = re.compile(r"(__\d+)?\.metadata\.tmp")


def matches(place: Place) -> bool:
    """Metadata, or data without any: then the save was not finished, which is for `read` to say."""
    return any(_is_metadata(n) or _DATA.fullmatch(n) for n in place.names if "/" not in n)


def _is_metadata(name: str) -> bool:
    return name == METADATA or bool(_RANK_METADATA.fullmatch(name))


def read(place: Place, report: Report) -> Checkpoint:
    """Read the folder. Raises CheckpointError where there is no metadata, for names are in it alone."""
    root, facts = read_object(place, report)
    checkpoint = read_state(root, format="dcp", path=str(place.path), report=report, facts=facts)
    ranks = facts["ranks"]
    return replace(checkpoint, topology=Topology(world=ranks) if ranks > 1 else None)


def read_object(place: Place, report: Report) -> tuple[dict[str, Any], dict[str, Any]]:
    """The object that was saved, its tensors as descriptions, and what is known of the container."""
    metadata = metadata_of(place, report)
    data = DataFiles(place, report)
    check_items(metadata.items, report)
    values: dict[str, Any] = dict(tensors_of(metadata, data, report))
    for name in metadata.bytes_items:
        try:
            values[name] = _object_of(name, metadata, data, report)
        except CheckpointError as error:
            report.extend([error.finding])
            report.worsen("unknown")  # what was not looked at is never safe
    _note_strangers(place, metadata, report)
    ordered = {name: values[name] for name in (*metadata.paths, *values) if name in values}
    root = unflatten(ordered, metadata.paths, report, METADATA)
    facts = {
        "container": "dcp", "imports": metadata.imports, "dcp_version": metadata.version, "ranks": _n_ranks(metadata),
        "metadata_others": metadata.others, "save_id": metadata.save_id, "elements": metadata,
    }  # fmt: skip
    return root, facts


def metadata_of(place: Place, report: Report) -> Metadata:
    """What `.metadata` says, or the files of all ranks together."""
    names = [n for n in place.names if "/" not in n]
    if METADATA in names:
        return read_metadata(place.open(METADATA), report)
    by_rank = sorted((int(m[1]), n) for n in names if (m := _RANK_METADATA.fullmatch(n)))
    if not by_rank:
        raise fail(
            "incomplete", "there is no .metadata, which is written last: the save did not finish, and the names of its "
            "tensors are lost", where=printable(str(place.path)), hint="use an earlier checkpoint: anyckpt latest DIR",
        )
    lacking = sorted(set(range(by_rank[-1][0] + 1)) - {rank for rank, _ in by_rank})
    if lacking:
        report.add("missing-shard", f"the metadata of rank {lacking[0]} is not there", where=printable(str(place.path)))
    merged = read_metadata(place.open(by_rank[0][1]), report)
    for _, name in by_rank[1:]:
        _merge(merged, read_metadata(place.open(name), report), name, report)
    return merged


def _merge(into: Metadata, other: Metadata, where: str, report: Report) -> None:
    """Add what another rank says: its chunks, replicas told once. Each rank saved its own part."""
    import numpy as np

    if into.save_id and other.save_id and into.version != other.version:
        report.add("mixed-steps", "the metadata of the ranks are of different versions", where=where)
    for name, chunks in other.tensors.items():
        known = into.tensors.get(name)
        if known is None:
            into.tensors[name] = chunks
            continue
        if (known.dtype, known.shape) != (chunks.dtype, chunks.shape):
            report.add("inconsistent", f"{printable(name)!r} has another shape or type in it", where=where)
            continue
        seen = {tuple(start) for start in known.starts.tolist()}
        fresh = [i for i, start in enumerate(chunks.starts.tolist()) if tuple(start) not in seen]
        into.tensors[name] = replace(
            known, starts=np.concatenate([known.starts, chunks.starts[fresh]]),
            sizes=np.concatenate([known.sizes, chunks.sizes[fresh]]),
        )
    into.bytes_items += [name for name in other.bytes_items if name not in set(into.bytes_items)]
    for key, item in other.items.items():
        into.items.setdefault(key, item)
    into.paths.update(other.paths)
    into.imports = tuple(dict.fromkeys((*into.imports, *other.imports)))


def _object_of(name: str, metadata: Metadata, data: DataFiles, report: Report) -> Any:
    item = metadata.items.get((name, None))
    if item is None:
        report.add("missing-tensor", "is stored nowhere", where=printable(name))
        return None
    if not data.fits(item):
        return None
    file = data.get(item.path)
    assert file is not None
    where = f"{file.name}, {printable(name)}"
    stored = opened(sub_file(file, item.offset, item.length, where), item.transforms, where)
    return load_object(stored, data.known, report)


def _note_strangers(place: Place, metadata: Metadata, report: Report) -> None:
    """Data files that the metadata does not name, and what a save that was cut short left behind."""
    used = {item.path for item in metadata.items.values()}
    own = [n for n in place.names if "/" not in n]
    extra = [n for n in own if _DATA.fullmatch(n) and n not in used]
    if extra:
        more = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
        report.add(
            "extra-shard", f"{printable(extra[0])}{more}: .metadata does not know it; of another save",
            where=printable(extra[0]), hint="delete it once the checkpoint is known to be whole",
        )
    left = [n for n in own if LEFTOVERS.fullmatch(n)]
    if left:
        report.add("leftover", "a later save into the same folder did not finish", where=printable(left[0]))


def _n_ranks(metadata: Metadata) -> int:
    """How many ranks wrote data, by the names of their files."""
    paths = {item.path for item in metadata.items.values()}
    ranks = [int(m[1]) for path in paths if (m := _DATA.fullmatch(path.rpartition("/")[2]))]
    return max(ranks, default=-1) + 1


def verify(place: Place, checkpoint: Checkpoint, report: Report) -> None:
    """Deep: read every item as the torch.save file that it is, checksums and all, and compare it with .metadata."""
    metadata = checkpoint.facts.get("elements")
    if not isinstance(metadata, Metadata):
        return
    from anyckpt.formats.torch import zip as torch_zip

    data = DataFiles(place, Report())
    for (name, start), item in metadata.items.items():
        if not data.fits(item):
            continue
        file = data.get(item.path)
        chunks = metadata.tensors.get(name)
        if file is None:
            continue
        where = f"{file.name}, {printable(name)}"
        try:
            stored = opened(sub_file(file, item.offset, item.length, where), item.transforms, where)
            if chunks is not None and start is not None:
                _compare(stored, name, start, metadata, report)
            torch_zip.verify(stored, checkpoint, report)
        except CheckpointError as error:
            report.extend([error.finding])
            report.worsen("unknown")


def _compare(stored: Any, name: str, start: tuple[int, ...], metadata: Metadata, report: Report) -> None:
    chunks = metadata.tensors[name]
    tensor = read_chunk(stored, report)
    row = (chunks.starts == list(start)).all(axis=1) if len(start) else [True] * len(chunks.starts)
    sizes = [size for size, hit in zip(chunks.sizes.tolist(), row, strict=True) if hit]
    if sizes and (tensor.dtype != chunks.dtype or list(tensor.shape) != sizes[0]):
        report.add(
            "size-mismatch", f"holds {tensor.dtype} {list(tensor.shape)}, .metadata says {chunks.dtype} {sizes[0]}",
            where=stored.name, hint="the data file belongs to another save than .metadata",
        )


__all__ = ["matches", "read", "read_object", "verify", "write"]
