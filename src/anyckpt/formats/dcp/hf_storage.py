"""DCP's Hugging Face storage, not consolidated: every rank's parts as safetensors, with where they belong.

    shard-RRRRR-model-CCCCC-of-NNNNN.safetensors      R: rank + 1, C of N: the file that the tensor is meant for
        __metadata__ DCP_VERSION "1.0", DCP_SHARDING_INFO '{NAME: {"saved_offsets": [start of the part on each axis]}}'

There is no index and no whole shape: a tensor reaches as far as its parts do, so that a last rank that is lost would
not be missed but for the numbers. What is replicated is in one rank's file only. With consolidation these files lie in
a folder `sharded` beside ordinary ones, which is a Hugging Face folder.
Source: torch 2.13 `distributed/checkpoint/hf_storage.py`.
"""

from __future__ import annotations

import re
from dataclasses import replace
from math import prod
from typing import Any

from anyckpt.core.box import Box, Shape, cover
from anyckpt.core.checkpoint import Checkpoint
from anyckpt.core.dtypes import DType
from anyckpt.core.source import File, Span
from anyckpt.core.tensor import Piece, Tensor
from anyckpt.core.topology import Topology
from anyckpt.errors import CheckpointError
from anyckpt.finding import Report, fail
from anyckpt.formats import safetensors
from anyckpt.formats.hf.beside import look_beside, with_companions
from anyckpt.io import json
from anyckpt.io.paths import printable
from anyckpt.io.place import Place

SHARD = re.compile(r"shard-(\d{5,})-model-(\d{5,})-of-(\d{5,})\.safetensors")
INFO = "DCP_SHARDING_INFO"


def matches(place: Place) -> bool:
    """Files of ranks in the folder itself."""
    return any(SHARD.fullmatch(name) for name in place.names)


def read(place: Place, report: Report) -> Checkpoint:
    """Read the headers of all ranks' files and put the parts together."""
    names = sorted(name for name in place.names if SHARD.fullmatch(name))
    parts: dict[str, dict[Box, tuple[DType, File, int]]] = {}
    for name in names:
        try:
            _read_shard(place, name, parts, report)
        except CheckpointError as error:
            report.extend([error.finding])
    ranks = _check_numbers(names, report)
    weights = {}
    for name, held in parts.items():
        if (tensor := _tensor(name, held, report)) is not None:
            weights[name] = tensor
    if not weights:
        raise CheckpointError(report.errors[0]) if report.errors else fail("missing-tensor", "there are no tensors")
    look_beside(place, set(names), report)
    checkpoint = Checkpoint(
        "dcp-hf", str(place.path), weights, topology=Topology(world=ranks) if ranks > 1 else None,
        facts={"container": "safetensors", "files": tuple(names), "ranks": ranks},
    )
    return replace(with_companions(place, checkpoint, report))


def _read_shard(
    place: Place, name: str, parts: dict[str, dict[Box, tuple[DType, File, int]]], report: Report
) -> None:
    file = place.open(name)
    header = safetensors.read_header(file, report)
    text = header.metadata.get(INFO)
    info = json.parse(text.encode(), where=file.name, code="bad-header", max_depth=8) if text is not None else {}
    if not isinstance(info, dict) or text is None:
        report.add("bad-header", f"its metadata lacks {INFO}: where its parts belong is not known", where=file.name)
        return
    for tensor, (dtype, shape, source, offset) in header.rows.items():
        start = _start(info.get(tensor), shape)
        if start is None:
            where = f"{file.name}, {printable(tensor)}"
            report.add("bad-header", f"{INFO} does not say where this part begins", where=where)
            continue
        box = Box(start, tuple(a + n for a, n in zip(start, shape, strict=True)))
        if box.volume or not parts.get(tensor):
            parts.setdefault(tensor, {}).setdefault(box, (dtype, source, offset))


def _start(entry: Any, shape: Shape) -> Shape | None:
    offsets = entry.get("saved_offsets") if isinstance(entry, dict) else None
    if not isinstance(offsets, list) or len(offsets) != len(shape):
        return None
    return tuple(offsets) if all(type(n) is int and 0 <= n < 1 << 62 for n in offsets) else None


def _check_numbers(names: list[str], report: Report) -> int:
    """Ranks count from 1, and each says how many files it wrote. Nothing tells whether the last rank is there."""
    ranks: dict[int, tuple[int, set[int]]] = {}
    for match in filter(None, map(SHARD.fullmatch, names)):
        ranks.setdefault(int(match[1]), (int(match[3]), set()))[1].add(int(match[2]))
    lacking = [rank for rank in range(1, min(max(ranks), 100_000)) if rank not in ranks]
    lacking += [rank for rank, (n, numbers) in ranks.items() if len(numbers) < n]
    if lacking:
        report.add(
            "missing-shard", f"files of rank {lacking[0] - 1} are not there, by the numbers of the others",
            where=names[0], hint="copy the files of every rank into one folder",
        )
    report.add(
        "inferred", "whole shapes are what the parts reach: that the last rank is there can't be told", where=names[-1]
    )
    return max(ranks)


def _tensor(name: str, held: dict[Box, tuple[DType, File, int]], report: Report) -> Tensor | None:
    """A tensor as wide as its parts reach."""
    where = printable(name)
    boxes = list(held)
    dtypes = {dtype.name for dtype, _, _ in held.values()}
    if len(dtypes) > 1 or len({len(box.start) for box in boxes}) > 1:
        report.add("inconsistent", "its parts differ in type or number of axes", where=where)
        return None
    shape = tuple(max(edges) for edges in zip(*(box.stop for box in boxes), strict=True)) if boxes[0].start else ()
    found = cover(boxes, shape)
    if found.overlap is not None:
        report.add("offset-overlap", "two parts hold the same elements", where=where)
    elif found.missing:
        hint = "copy the files of every rank into one folder"
        report.add("missing-shard", f"{found.missing:,} of its elements are in no file", where=where, hint=hint)
    dtype = next(iter(held.values()))[0]
    pieces = tuple(
        Piece(Span(file, offset, dtype.nbytes(prod(box.shape))), None if box.shape == shape else box)
        for box, (_, file, offset) in held.items()
    )
    return Tensor(dtype, shape, pieces)
