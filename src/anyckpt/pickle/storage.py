"""torch storages: the record a persistent id stands for, and the element type of each storage class.

    ('storage', <class>, key, location, n_elements)             zip
    ('storage', <class>, key, location, n_elements, view)       legacy; view: None or (view_key, offset, n_elements)
    ('module', <class>, source_file, source)                    legacy, whole modules; stands for the class

Facts from torch 2.13 `torch/storage.py` and `torch/serialization.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from anyckpt.core.dtypes import DTYPES, DType
from anyckpt.core.inert import Global
from anyckpt.core.source import Absent, Fill, Inline, Source, Span
from anyckpt.finding import fail

_CLASSES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8",
    "ByteStorage": "uint8", "BoolStorage": "bool", "ComplexDoubleStorage": "complex128",
    "ComplexFloatStorage": "complex64", "QInt8Storage": "qint8", "QUInt8Storage": "quint8", "QInt32Storage": "qint32",
    "QUInt4x2Storage": "quint4x2", "QUInt2x4Storage": "quint2x4",
}

STORAGE_DTYPES: dict[str, DType | None] = {
    **{f"{module}.{name}": DTYPES[dtype] for name, dtype in _CLASSES.items() for module in ("torch", "torch.cuda")},
    "torch.storage.UntypedStorage": None, "torch.UntypedStorage": None, "torch.storage._UntypedStorage": None,
    "torch.storage.TypedStorage": None, "torch.TypedStorage": None, "torch.storage._TypedStorage": None,
}
"""Storage class -> its element type; None for storages of bytes."""

STORAGE_CLASSES: dict[str, str] = {dtype: name for name, dtype in _CLASSES.items()}
"""Element type -> the class in module `torch`; types without one are written as bytes (`_rebuild_tensor_v3`)."""


@dataclass(frozen=True, slots=True)
class Storage:
    """One storage as a persistent id names it: where its bytes are, and how it counts them.

    `dtype` is None for storages of bytes; `n_elements` counts in the class's own elements. `swapped`: the record is of
    the other byte order, and what reads it knows by how many bytes to swap.
    """

    source: Source
    dtype: DType | None
    key: str
    location: str
    n_bytes: int
    n_elements: int
    swapped: bool = False

    def part(self, offset: int, length: int, unit: int) -> Source:
        """The bytes [offset, offset + length) of it as a source; `unit` is the bytes one swap reverses."""
        source = self.source
        if isinstance(source, Span):
            swap = unit if self.swapped and unit > 1 else source.swap
            return Span(source.file, source.offset + offset, length, swap)
        if isinstance(source, Inline):
            return Inline(source.data[offset : offset + length])
        if isinstance(source, Absent | Fill):
            return replace(source, length=length)
        raise fail("unsupported", f"storage {sketch(self.key)} lies in a source that tensors can't be views of")


class StorageId(NamedTuple):
    """A persistent id that was checked: what to look for, nothing about where it is."""

    dtype: DType | None
    key: str
    location: str
    n_elements: int
    n_bytes: int
    view: tuple[str, int, int] | None = None


def storage_id(pid: Any) -> StorageId:
    """Check a torch persistent id. Raises CheckpointError [malformed-pickle, negative-size, size-overflow]."""
    if not isinstance(pid, tuple) or len(pid) not in (5, 6) or (pid[0] != "storage" and pid[0] != b"storage"):
        raise fail("malformed-pickle", f"a persistent id is {sketch(pid)}, not the five parts of a storage")
    cls, key, location, n_elements = pid[1], _text(pid[2]), _text(pid[3]), pid[4]
    path = f"{cls.module}.{cls.name}" if isinstance(cls, Global) else ""
    if path not in STORAGE_DTYPES:
        raise fail("malformed-pickle", f"a persistent id names {sketch(cls)} where a storage class belongs")
    if key is None or location is None:
        raise fail("malformed-pickle", "the key or location of a storage is not text")
    if type(n_elements) is not int:
        raise fail("malformed-pickle", f"storage {sketch(key)} counts its elements with {sketch(n_elements)}")
    if n_elements < 0:
        raise fail("negative-size", f"storage {sketch(key)} claims {sketch(n_elements)} elements")
    dtype = STORAGE_DTYPES[path]
    # The packed quantized storages count bytes, although a tensor over them counts values.
    itemsize = dtype.itemsize if dtype else 1
    if n_elements * itemsize > 2**63 - 1:
        raise fail("size-overflow", f"storage {sketch(key)} claims {sketch(n_elements)} elements, beyond 64 bits")
    return StorageId(dtype, key, location, n_elements, n_elements * itemsize, _view(key, pid[5:]))


def _view(key: str, rest: tuple[Any, ...]) -> tuple[str, int, int] | None:
    if not rest or rest[0] is None:
        return None
    view = rest[0]
    if not isinstance(view, tuple) or len(view) != 3 or (view_key := _text(view[0])) is None:
        raise fail("malformed-pickle", f"the view on storage {sketch(key)} is {sketch(view)}")
    offset, n_elements = view[1:]
    if type(offset) is not int or type(n_elements) is not int:
        raise fail("malformed-pickle", f"the view on storage {sketch(key)} is not counted with integers")
    if offset < 0 or n_elements < 0:
        raise fail("negative-size", f"the view on storage {sketch(key)} is {sketch(offset)} + {sketch(n_elements)}")
    return view_key, offset, n_elements


def _text(value: Any) -> str | None:
    """Python 2 wrote keys as byte strings."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return value if isinstance(value, str) else None


def sketch(value: Any) -> str:
    """A few words for a value of any size."""
    if isinstance(value, str | bytes):
        return repr(value[:50]) + ("..." if len(value) > 50 else "")
    if isinstance(value, int):
        return repr(value) if value.bit_length() < 128 else "a huge integer"
    if isinstance(value, Global):
        return f"{value.module[:50]}.{value.name[:50]}"
    return repr(value) if value is None or isinstance(value, float) else f"a {type(value).__name__}"
