"""Megatron-LM's zarr checkpoints: one folder a tensor, one file a chunk; written until core 0.14, gone by 0.17.

    metadata.json     {"sharded_backend": "zarr", …}          common.pt    as of torch_dist
    NAME/.zarray      zarr v2: {"shape", "chunks", "dtype": "<f4" | "bfloat16", "compressor": null, "order": "C", …}
    NAME/1.0          the chunk at (1, 0) of the grid: raw, little-endian, always of the full chunk's size
    NAME/shard_0.1_1.2.pt                                      an object: a torch file

"bfloat16" is no dtype of the zarr standard. Names are those of torch_dist (`stacked`). Covers files of core 0.10.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import product
from math import prod
from typing import Any

from anyckpt.core.box import Box, Shape, c_strides
from anyckpt.core.checkpoint import Checkpoint
from anyckpt.core.dtypes import DTYPES, DType
from anyckpt.core.source import Absent, Span
from anyckpt.core.tensor import Piece, Tensor
from anyckpt.errors import CheckpointError
from anyckpt.finding import Report, fail
from anyckpt.formats.megatron import folders
from anyckpt.formats.megatron.agree import check_masters
from anyckpt.formats.megatron.dist import Stored, assemble
from anyckpt.formats.torch.saved import saved_object
from anyckpt.io.paths import printable
from anyckpt.io.place import Place

MAX_CHUNKS = 1_000_000
_NUMPY = re.compile(r"[<|]([fiub])(\d)")
_KINDS = {"f": "float", "i": "int", "u": "uint", "b": "bool"}


def matches(place: Place) -> bool:
    """Whether a distributed checkpoint of zarr folders lies here or one iteration down."""
    return folders.is_megatron(place, ("zarr",))


def read(place: Place, report: Report) -> Checkpoint:
    """Read one iteration. Raises CheckpointError where common.pt can't be read."""
    found = folders.locate(place, report)
    tensors: dict[str, Tensor] = {}
    objects: dict[str, Any] = {}
    imports: list[Any] = []
    known = frozenset(found.place.names)
    for name in found.place.names:
        folder, _, leaf = name.rpartition("/")
        try:
            if leaf == ".zarray" and folder:
                tensors[folder] = _tensor(found.place, folder, known, report)
            elif leaf.startswith("shard_") and leaf.endswith(".pt"):
                saved = saved_object(found.place.open(name), report)
                objects[name[: -len(".pt")]] = saved.value
                imports.extend(saved.imports)
        except CheckpointError as error:
            report.extend([error.finding])
    facts = {"container": "zarr", "form": "zarr", "folder": found.name, "imports": tuple(dict.fromkeys(imports))}
    return assemble(place, found, Stored(tensors, objects, facts), report, "megatron-zarr")


def _tensor(place: Place, folder: str, known: frozenset[str], report: Report) -> Tensor:
    where = f"{folder}/.zarray"
    said = place.read_json(where, report, code="bad-header")
    dtype, shape, chunks = _described(said, where)
    grid = tuple(-(-n // c) for n, c in zip(shape, chunks, strict=True))
    if prod(grid) > MAX_CHUNKS:
        raise fail("limit-exceeded", f"has {prod(grid):,} chunks", where=where)
    n_bytes = dtype.nbytes(prod(chunks))
    pieces, lost = [], []
    for index in product(*map(range, grid)):
        name = f"{folder}/{'.'.join(map(str, index)) or '0'}"
        start = tuple(i * c for i, c in zip(index, chunks, strict=True))
        box = Box(start, tuple(min(a + c, n) for a, c, n in zip(start, chunks, shape, strict=True)))
        strides = None if box.shape == chunks else c_strides(chunks)
        if name not in known:
            lost.append(name)
            pieces.append(Piece(Absent(n_bytes, "its chunk's file is not there"), box))
            continue
        file = place.open(name)
        if file.size != n_bytes:
            code = "truncated" if file.size < n_bytes else "size-mismatch"
            raise fail(code, f"should have {n_bytes:,} bytes and has {file.size:,}", where=file.name)
        pieces.append(Piece(Span(file, 0, n_bytes), box, strides))
    if lost:
        report.add(
            "missing-shard", f"{len(lost)} of {len(pieces)} chunks are not there: {printable(lost[0])}",
            where=printable(folder), hint="copy the missing files, then run: anyckpt verify PATH",
        )
    return Tensor(dtype, shape, tuple(pieces))


def _described(said: Any, where: str) -> tuple[DType, Shape, Shape]:
    """Element type, shape and chunks of a .zarray that is of the kind that Megatron writes."""
    if not isinstance(said, Mapping) or said.get("zarr_format") != 2:
        raise fail("unsupported-version", "is no array of zarr version 2", where=where)
    if said.get("compressor") is not None or said.get("filters"):
        raise fail("unsupported-compression", "its chunks are compressed or filtered", where=where)
    if said.get("order") != "C":
        raise fail("unsupported", f"its order is {said.get('order')!r:.20}", where=where)
    sizes = []
    for key in ("shape", "chunks"):
        value = said.get(key)
        if not isinstance(value, list) or not all(type(n) is int for n in value):
            raise fail("bad-header", f"its {key} is no list of integers", where=where)
        if any(n < 0 or n >= 1 << 48 for n in value):
            raise fail("negative-size", f"its {key} is {value}", where=where)
        sizes.append(tuple(value))
    if len(sizes[0]) != len(sizes[1]) or 0 in sizes[1]:
        raise fail("bad-header", f"chunks of {list(sizes[1])} for a shape of {list(sizes[0])}", where=where)
    return _dtype(said.get("dtype"), where), sizes[0], sizes[1]


def _dtype(text: Any, where: str) -> DType:
    name = text if isinstance(text, str) else ""
    if match := _NUMPY.fullmatch(name):
        name = "bool" if match[1] == "b" else f"{_KINDS[match[1]]}{8 * int(match[2])}"
    if name not in DTYPES:
        raise fail("unknown-dtype", f"has the element type {text!r:.40}", where=where)
    return DTYPES[name]


def verify(place: Place, checkpoint: Checkpoint, report: Report) -> None:
    """Deep: masters that round to their weights."""
    check_masters(checkpoint, report)
