"""From chunks to tensors: every chunk must lie inside its tensor, all of them cover it once, and each has its item.

torch pastes chunks without looking whether they cover the tensor, and so leaves holes with what memory held before;
here a hole is an error. Chunks are checked as columns, for there may be millions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from anyckpt.core.box import Box, Shape, cover
from anyckpt.core.source import Absent, File, Span
from anyckpt.core.tensor import Piece, Tensor
from anyckpt.errors import CheckpointError, UsageError
from anyckpt.finding import Report, fail
from anyckpt.formats.dcp.items import Elements, Known
from anyckpt.formats.dcp.metadata import Metadata
from anyckpt.formats.dcp.records import Chunks, Item
from anyckpt.io.bounds import byte_count
from anyckpt.io.paths import printable
from anyckpt.io.place import Place

if TYPE_CHECKING:
    from anyckpt.formats.dcp.records import Ints

EAGER_CHUNKS = 50_000  # a checkpoint of no more has its pieces made at once, which is quicker for those who read them


@dataclass(slots=True)
class DataFiles:
    """The data files of one checkpoint by the path that its metadata gives, opened and checked once each.

    A file that can't be had is reported once and stays None.
    """

    place: Place
    report: Report
    known: Known = field(default_factory=Known)
    files: dict[str, File | None] = field(default_factory=dict)
    ends: dict[str, int] = field(default_factory=dict)

    def get(self, path: str) -> File | None:
        """The data file of that relative path."""
        if path not in self.files:
            self.files[path] = self._open(path)
        return self.files[path]

    def _open(self, path: str) -> File | None:
        try:
            return self.place.open(path)
        except CheckpointError as error:
            finding = error.finding
            missing = finding.code == "broken-link" and not self.place.exists(path)
            if not missing:
                self.report.extend([finding])
                return None
        except UsageError:
            pass
        self.report.add(
            "missing-shard", f"the data file {printable(path)!r} is not there", where=printable(path),
            hint="copy the files of every rank into one folder, then run: anyckpt verify PATH",
        )
        return None

    def fits(self, item: Item) -> bool:
        """Whether the item lies inside its file; where not, that is reported, once a file."""
        file = self.get(item.path)
        if file is None:
            return False
        end = item.offset + item.length
        if end > file.size:
            if end > self.ends.get(item.path, file.size):
                if item.path not in self.ends:
                    missing = byte_count(end - file.size)
                    self.report.add(
                        "truncated", f"an item needs bytes {item.offset:,}-{end:,}; the file ends at {file.size:,} "
                        f"({missing} missing)", where=file.name, hint="copy this file again",
                    )
                self.ends[item.path] = end
            return False
        return True


class Pieces(Sequence[Piece]):
    """The chunks of one tensor as pieces, each made when it is asked for."""

    __slots__ = ("_chunks", "_data", "_items", "_name")

    def __init__(self, name: str, chunks: Chunks, items: Sequence[Item | None], data: DataFiles) -> None:
        self._name, self._chunks, self._items, self._data = name, chunks, items, data

    def __len__(self) -> int:
        return len(self._items)

    @overload
    def __getitem__(self, index: int) -> Piece: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Piece]: ...
    def __getitem__(self, index: int | slice) -> Piece | Sequence[Piece]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        chunks = self._chunks
        start, size = tuple(chunks.starts[index].tolist()), tuple(chunks.sizes[index].tolist())
        box = Box(start, tuple(a + n for a, n in zip(start, size, strict=True)))
        n_bytes = chunks.dtype.nbytes(box.volume)
        item = self._items[index]
        file = None if item is None else self._data.get(item.path)
        if item is None or file is None:
            return Piece(Absent(n_bytes, "its data file is missing or cut short"), box)
        elements = Elements(
            file, item.offset, item.length, item.transforms, chunks.dtype, size, self._data.known, self._name
        )
        return Piece(Span(elements, 0, n_bytes), None if size == chunks.shape else box)

    def __iter__(self) -> Iterator[Piece]:
        return (self[i] for i in range(len(self)))


def tensors_of(metadata: Metadata, data: DataFiles, report: Report) -> dict[str, Tensor]:
    """Every tensor of the metadata. Faults go to `report`; a tensor whose chunks make no sense is left out."""
    eager = sum(len(chunks.starts) for chunks in metadata.tensors.values()) <= EAGER_CHUNKS
    tensors: dict[str, Tensor] = {}
    for name, chunks in metadata.tensors.items():
        try:
            check_chunks(name, chunks, report)
        except CheckpointError as error:
            report.extend([error.finding])
            continue
        items = _items_of(name, chunks, metadata, data, report)
        pieces: Sequence[Piece] = Pieces(name, chunks, items, data)
        tensors[name] = Tensor(chunks.dtype, chunks.shape, tuple(pieces) if eager else pieces)
    return tensors


def check_chunks(name: str, chunks: Chunks, report: Report) -> None:
    """Report holes and overlaps; raises where sizes are negative or a chunk leaves its tensor."""
    where, shape = printable(name), chunks.shape
    if any(n < 0 for n in shape) or (chunks.sizes < 0).any() or (chunks.starts < 0).any():
        message = f"the tensor of shape {list(shape)} or a chunk of it has a negative size"
        raise fail("negative-size", message, where=where)
    stops = chunks.starts + chunks.sizes
    if (stops < chunks.starts).any() or (stops > np.array(shape, np.int64)).any():
        i = int((stops > np.array(shape, np.int64)).any(axis=1).argmax()) if shape else 0
        message = f"chunk {i} at {chunks.starts[i].tolist()} of size {chunks.sizes[i].tolist()} leaves the tensor"
        raise fail("offset-out-of-bounds", f"{message} of shape {list(shape)}", where=where)
    missing, overlaps = _coverage(chunks.starts, stops, shape)
    if overlaps:
        report.add("offset-overlap", "two chunks hold the same elements", where=where)
    elif missing:
        report.add(
            "offset-hole", f"no chunk holds {missing:,} of its elements; torch would load it all the same, with "
            "whatever stood in memory there", where=where, hint="the save was not finished by every rank",
        )


def _coverage(starts: Ints, stops: Ints, shape: Shape) -> tuple[int, bool]:
    """How many elements no chunk holds (0 where chunks overlap), and whether any two chunks overlap."""
    n_axes = len(shape)
    if not n_axes:
        return (0 if len(starts) else 1), len(starts) > 1
    full = np.all(stops > starts, axis=1)
    starts, stops = starts[full], stops[full]
    total = 1
    for n in shape:
        total *= n
    held = sum(int(v) for v in (stops - starts).astype(object).prod(axis=1)) if len(starts) else 0
    varying = [a for a in range(n_axes) if len(starts) and ((starts[:, a] != starts[0, a]).any() or (
        stops[:, a] != stops[0, a]).any())]
    if len(starts) < 2:
        return total - held, False
    if len(varying) <= 1:  # sharded along one axis: sorted neighbours must not overlap
        axis = varying[0] if varying else 0
        order = np.argsort(starts[:, axis], kind="stable")
        overlaps = bool((starts[order[1:], axis] < stops[order[:-1], axis]).any())
        return (0 if overlaps else total - held), overlaps
    boxes = [Box(tuple(a), tuple(b)) for a, b in zip(starts.tolist(), stops.tolist(), strict=True)]
    found = cover(boxes, shape)
    return found.missing, found.overlap is not None


def _items_of(
    name: str, chunks: Chunks, metadata: Metadata, data: DataFiles, report: Report
) -> list[Item | None]:
    """The item of each chunk, None where there is none or its file lacks it."""
    items: list[Item | None] = []
    n_lost = 0
    for start, size in zip(chunks.starts.tolist(), chunks.sizes.tolist(), strict=True):
        found = metadata.items.get((name, tuple(start)))
        if found is None:
            n_lost += 0 not in size
        elif 0 not in size and not data.fits(found):
            found = None
        items.append(found)
    if n_lost or (not items and 0 not in chunks.shape):
        report.add(
            "missing-tensor", f"{n_lost} of its {len(items)} chunks are stored nowhere", where=printable(name),
            hint="the save was not finished by every rank",
        )
    return items


def check_items(items: Mapping[Any, Item], report: Report) -> None:
    """Report items that share bytes of a file."""
    by_path: dict[str, list[tuple[int, int]]] = {}
    for path, offset, length, _ in items.values():
        by_path.setdefault(path, []).append((offset, length))
    for path, places in by_path.items():
        table = np.array(sorted(places), dtype=object if max(a + b for a, b in places) >> 62 else np.int64)
        if len(table) > 1 and (table[:-1, 0] + table[:-1, 1] > table[1:, 0]).any():
            report.add("offset-overlap", "items of different tensors share bytes of this file", where=printable(path))
