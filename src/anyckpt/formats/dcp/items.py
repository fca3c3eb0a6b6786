"""One stored item: the bytes [offset, offset + length) of a data file, which are a whole torch.save file of their own.

    zip: archive/data.pkl, .format_version, .storage_alignment, byteorder, data/0, version, .data/serialization_id
    around it, outermost last, what `transform_descriptors` names: "stream.zstd/1" is one Zstandard stream

What precedes the elements is the same, byte for byte, in all items of one type and shape; so a head that was parsed
once tells where the elements of every item with an equal head lie, and a save of a million items costs a million small
reads, not a million archives. Items whose elements do not lie in C order are put into it when they are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from anyckpt.core.box import Shape, boxes_of_range, whole
from anyckpt.core.dtypes import DType
from anyckpt.core.inert import NumpyArray, TensorSubclass
from anyckpt.core.source import File, Span
from anyckpt.core.tensor import Tensor
from anyckpt.errors import CheckpointError
from anyckpt.finding import Report, fail, located
from anyckpt.formats import of_file, read_file
from anyckpt.formats.torch import archive
from anyckpt.formats.torch import zip as torch_zip
from anyckpt.io.bounds import check_range
from anyckpt.io.inflate import MAX_RATIO, decoded_unsized
from anyckpt.io.view import sub_file

HEAD_BYTES = 2048
ENVELOPE_BYTES = 1 << 20  # what a torch.save file has around its elements, generously
MAX_CACHED_BYTES = 16 << 10  # objects up to this size are kept by their bytes: hyperparameters repeat by the thousand

TRANSFORMS = {"stream.zstd/1": "zstd", "stream.zstd": "zstd"}
"""Transform descriptors and our codecs. Source: torch 2.13 `distributed/checkpoint/_extension.py`."""


@dataclass(slots=True)
class Known:
    """Heads and objects met so far, of one checkpoint.

    `heads`: bytes before the elements -> {(that head, length of the item): (dtype, shape)} for items in C order.
    """

    heads: dict[int, dict[tuple[bytes, int], tuple[DType, Shape]]] = field(default_factory=dict)
    objects: dict[bytes, Any] = field(default_factory=dict)


def opened(file: File, transforms: Sequence[str], name: str, n_bytes: int = 0) -> File:
    """The torch.save file in an item, which should hold `n_bytes` of elements: moments of zeros compress without bound.

    Raises CheckpointError [unsupported-compression, bomb].
    """
    ratio = max(MAX_RATIO, (n_bytes + ENVELOPE_BYTES) // max(1, file.size) + 1)
    for transform in reversed(transforms):
        codec = TRANSFORMS.get(transform)
        if codec is None:
            raise fail(
                "unsupported-compression", f"is coded by {transform!r:.60}, which is not known here", where=name,
                hint="load it with the extension that wrote it, and save it again without",
            )
        file = decoded_unsized(file, codec, name=name, max_ratio=ratio)
    return file


def load_object(file: File, known: Known, report: Report) -> Any:
    """The object of an item that is no tensor chunk, inert."""
    data = file.read(0, file.size) if file.size <= MAX_CACHED_BYTES else b""
    if data and data in known.objects:
        return known.objects[data]
    row = of_file(file)
    if row is None:
        raise _malformed(file, "is no torch.save file")
    if row.name == "torch":
        value = torch_zip.load(archive.open_archive(file, report), report)[0].value
    else:
        checkpoint = read_file(file, report)
        value = {**checkpoint.weights, **checkpoint.state}
    if data and not _holds_tensor(value):
        known.objects[data] = value
    return value


def _holds_tensor(value: Any) -> bool:
    from anyckpt.core.inert import walk

    return any(isinstance(inner, Tensor | TensorSubclass | NumpyArray) for _, inner in walk(value))


@dataclass(slots=True, eq=False)
class Elements:
    """The elements of one stored chunk as a file, in C order; where they lie is looked up on first use.

    `dtype` and `shape` are what the metadata says of the chunk; an item that holds something else raises
    [malformed-item] or [size-mismatch] when it is read.
    """

    file: File
    start: int
    length: int
    transforms: tuple[str, ...]
    dtype: DType
    shape: Shape
    known: Known
    label: str
    _found: Span | Tensor | None = None

    @property
    def name(self) -> str:
        """The data file and the tensor."""
        return f"{self.file.name}, {self.label}"

    @property
    def size(self) -> int:
        """Bytes of its elements."""
        return self.dtype.nbytes(prod(self.shape))

    def found(self) -> Span | Tensor:
        """Where the elements are: a span of them in C order, or a tensor that gives them otherwise."""
        if self._found is None:
            self._found = self._look()
        return self._found

    def read(self, offset: int, length: int) -> bytes:
        """Bytes of the elements in C order."""
        check_range(self.name, self.size, offset, length)
        buffer = bytearray(length)
        self.readinto(offset, memoryview(buffer))
        return bytes(buffer)

    def readinto(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from an offset among the elements."""
        check_range(self.name, self.size, offset, buffer.nbytes)
        found = self.found()
        if isinstance(found, Span):
            found.file.readinto(found.offset + offset, buffer)
        else:
            _read_in_order(found, offset, buffer)

    def on_disk(self) -> tuple[File, int] | None:
        """The data file and the offset in it, where the elements lie there as they are."""
        found = self.found()
        if not isinstance(found, Span):
            return None
        place = found.file.on_disk()
        return place and (place[0], place[1] + found.offset)

    def fileno(self) -> None:
        return None

    def stored(self) -> File:
        """The torch.save file that the item is."""
        return opened(sub_file(self.file, self.start, self.length, self.name), self.transforms, self.name, self.size)

    def _look(self) -> Span | Tensor:
        known = self.known.heads
        if self.transforms:
            return self._parse(self.stored(), b"")
        head = self.file.read(self.start, min(HEAD_BYTES, self.length))
        for n_bytes, same in known.items():
            if (kind := same.get((head[:n_bytes], self.length))) is not None:
                self._check(*kind)
                return Span(self.file, self.start + n_bytes, self.size)
        return self._parse(self.stored(), head)

    def _parse(self, stored: File, head: bytes) -> Span | Tensor:
        """Read the item as the file that it is, and note its head where its elements lie behind it in C order."""
        tensor = read_chunk(stored, Report())
        self._check(tensor.dtype, tensor.shape)
        if tensor.op is not None or len(tensor.pieces) != 1:
            return tensor
        piece = tensor.pieces[0]
        source = piece.source
        if piece.strides is not None or not isinstance(source, Span) or source.swap > 1 or source.length != self.size:
            return tensor
        n_bytes = source.offset - self.start
        if head and source.file is self.file and 0 < n_bytes <= len(head) and self.size:
            self.known.heads.setdefault(n_bytes, {})[head[:n_bytes], self.length] = (self.dtype, self.shape)
        return source

    def _check(self, dtype: DType, shape: Shape) -> None:
        if dtype != self.dtype or prod(shape) != prod(self.shape):
            raise fail(
                "size-mismatch",
                f"the item holds {dtype} {list(shape)}, .metadata says {self.dtype} {list(self.shape)}",
                where=self.name, hint="the data file belongs to another save than .metadata",
            )


def read_chunk(stored: File, report: Report) -> Tensor:
    """The tensor that an item holds. Raises CheckpointError [malformed-item] where it holds none."""
    try:
        value = torch_zip.load(archive.open_archive(stored, report), report)[0].value
    except CheckpointError as error:
        if error.finding.code in ("not-a-checkpoint", "bad-header"):
            raise _malformed(stored, "is no torch.save file") from error
        raise located(error, stored.name) if not error.finding.where else error from error
    if isinstance(value, TensorSubclass) and value.base is not None:
        value = value.base
    if not isinstance(value, Tensor):
        raise _malformed(stored, f"holds {type(value).__name__} where a tensor belongs")
    return value


def _malformed(file: File, message: str) -> CheckpointError:
    return fail("malformed-item", message, where=file.name, hint="the data file is damaged or of another save")


def _read_in_order(tensor: Tensor, offset: int, buffer: memoryview) -> None:
    """Fill `buffer` from byte `offset` of a tensor's elements in C order, box by box."""
    from anyckpt.core.read import read_box

    itemsize = tensor.dtype.itemsize
    first, last = offset // itemsize, -(-(offset + buffer.nbytes) // itemsize)
    if not tensor.shape or tensor.dtype.block > 1:
        data = read_box(tensor, whole(tensor.shape)).tobytes()
    else:
        data = b"".join(read_box(tensor, box).tobytes() for box in boxes_of_range(tensor.shape, first, last))
        offset -= first * itemsize
    buffer.cast("B")[:] = data[offset : offset + buffer.nbytes]

