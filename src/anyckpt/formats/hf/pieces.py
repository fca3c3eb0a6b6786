"""Files of torch's distributed checkpoint in safetensors form, not consolidated: each rank's boxes of the tensors.

    shard-RRRRR-model-CCCCC-of-NNNNN.safetensors     rank R - 1, file C of that rank's N
    __metadata__  DCP_SHARDING_INFO: JSON {name: {"saved_offsets": [start on each axis]}}, DCP_VERSION

Facts from torch 2.13 `distributed/checkpoint/hf_storage.py`. No file tells a tensor's full shape: it is taken as what
the boxes reach, as torch's own loader does, so a lost last rank leaves a smaller tensor and not a hole.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from anyckpt.core.box import Box, cover
from anyckpt.core.dtypes import DType
from anyckpt.core.source import Span
from anyckpt.core.tensor import Piece, Tensor
from anyckpt.errors import CheckpointError
from anyckpt.finding import Report
from anyckpt.formats import safetensors
from anyckpt.formats.hf.sets import RANK_FILE, WeightSet
from anyckpt.io import json
from anyckpt.io.paths import printable
from anyckpt.io.place import Place

INFO = "DCP_SHARDING_INFO"


@dataclass(slots=True)
class Boxes:
    """The boxes of one tensor: pieces by box (replicas once), and the first file that has it."""

    dtype: DType
    file: str
    pieces: dict[Box, Piece] = field(default_factory=dict)


def join_pieces(place: Place, found: WeightSet, report: Report) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors put together from all ranks' files, and the files read. Holes and overlaps are reported."""
    tensors: dict[str, Boxes] = {}
    read: list[str] = []
    _check_numbers(list(found.shards.values()), report)
    for name in found.shards.values():
        try:
            _read(place, name, tensors, report)
        except CheckpointError as error:
            report.extend([error.finding])
        else:
            read.append(name)
    report.add(
        "inferred", "full shapes are what the ranks' boxes reach: that the last rank is there can't be told",
        where=printable(next(iter(found.shards.values()), "")),
    )
    return {name: _whole(name, boxes, report) for name, boxes in tensors.items()}, read


def _check_numbers(names: list[str], report: Report) -> None:
    """Ranks count from 1, and each says how many files it wrote."""
    ranks: dict[int, tuple[int, set[int]]] = {}
    for match in filter(None, map(RANK_FILE.fullmatch, names)):
        ranks.setdefault(int(match["rank"]), (int(match["n"]), set()))[1].add(int(match["i"]))
    lost = [rank for rank in range(1, min(max(ranks), 100_000)) if rank not in ranks]
    lost += [rank for rank, (n, numbers) in ranks.items() if len(numbers) < n]
    if lost:
        listed = ", ".join(map(str, lost[:6]))
        message = f"files of {len(lost):,} of {max(ranks):,} ranks are not there: {listed}"
        report.add("missing-shard", message, where=printable(names[0]))


def _read(place: Place, name: str, tensors: dict[str, Boxes], report: Report) -> None:
    file = place.open(name)
    header = safetensors.read_header(file, report)
    info = json.parse(header.metadata.get(INFO, "{}").encode(), where=f"{file.name}, {INFO}", code="bad-header")
    for tensor_name, row in header.rows.items():
        dtype, shape, _, offset = row
        start = _offsets(info, tensor_name, len(shape))
        if start is None:
            message = f"{INFO} does not say which part it is"
            report.add("bad-header", message, where=f"{file.name}, tensor {printable(tensor_name)}")
            continue
        box = Box(start, tuple(a + n for a, n in zip(start, shape, strict=True)))
        boxes = tensors.setdefault(tensor_name, Boxes(dtype, name))
        if boxes.dtype != dtype or any(len(box.start) != len(other.start) for other in boxes.pieces):
            message = f"is {dtype} of {len(shape)} axes, and of another kind in {printable(boxes.file)}"
            report.add("inconsistent", message, where=f"{file.name}, tensor {printable(tensor_name)}")
            continue
        boxes.pieces.setdefault(box, Piece(Span(file, offset, dtype.nbytes(box.volume)), box))


def _offsets(info: Any, name: str, n_axes: int) -> tuple[int, ...] | None:
    """`saved_offsets` of a tensor, None where it is not a list of one whole number for each axis."""
    entry = info.get(name) if isinstance(info, dict) else None
    start = entry.get("saved_offsets") if isinstance(entry, dict) else None
    if not isinstance(start, list) or len(start) != n_axes:
        return None
    return tuple(start) if all(type(a) is int and 0 <= a < 1 << 48 for a in start) else None


def _whole(name: str, boxes: Boxes, report: Report) -> Tensor:
    parts = list(boxes.pieces)
    shape = tuple(max(stops) for stops in zip(*(box.stop for box in parts), strict=True))
    covered = cover(parts, shape)
    where = f"{printable(boxes.file)}, tensor {printable(name)}"
    if covered.overlap is not None:
        report.add("offset-overlap", "two ranks' boxes of it overlap in part", where=where)
    elif covered.missing:
        report.add("offset-hole", f"{covered.missing:,} elements of {list(shape)} are in no rank's file", where=where)
    return Tensor(boxes.dtype, shape, tuple(boxes.pieces.values()))
