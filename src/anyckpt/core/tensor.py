"""Tensors as descriptions: pieces with a source, or one operation over other tensors. Immutable, cheap, lazy.

`read.py` fills arrays from them and `ops.py` holds the closed list of operations; nothing here touches a byte.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Protocol

from anyckpt.core.box import Box, Shape, whole
from anyckpt.core.dtypes import DType
from anyckpt.core.source import Absent, Fill, Inline, Source

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]


class Op(Protocol):
    """One operation: for a box of its output, which boxes of its inputs it needs, and how to compute it from them."""

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The tensors it reads."""

    def regions(self, box: Box) -> Sequence[tuple[Tensor, Box]]:
        """What has to be read to compute `box` of the output."""

    def compute(self, box: Box, arrays: Sequence[Array]) -> Array:
        """The output's `box`, from the arrays of `regions(box)` in order (numpy, or raw bytes of packed types)."""

    def scratch(self, box: Box) -> int:
        """Bytes `compute` allocates beside its inputs and its result."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor and where its elements are.

    `box` None: the whole tensor. `strides` in elements of the source, per axis; None: C order of the box. Element i of
    a strided piece lies at byte `dot(i, strides) * itemsize` of the source.
    """

    source: Source
    box: Box | None = None
    strides: Shape | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """A named tensor's dtype, shape and whereabouts; either `pieces` or an `op`.

    `pieces` is a tuple, or a sequence that makes each piece when it is asked for it (saves of thousands of ranks).
    Compared by identity: two descriptions of equal bytes are not the same tensor. Use `.tobytes()` or
    `anyckpt.diff` to compare values.
    """

    dtype: DType
    shape: Shape
    pieces: Sequence[Piece] = ()
    op: Op | None = None

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes when stored in C order."""
        dtype = self.dtype
        return prod(self.shape) * dtype.itemsize if dtype.block == 1 else stored_bytes(dtype, self.shape)

    @property
    def is_stored(self) -> bool:
        """Whether its bytes were saved (False for meta tensors and skipped data)."""
        if self.op is not None:
            return all(t.is_stored for t in self.op.inputs)
        if len(self.pieces) == 1:  # nearly always, and asked of each of a million tensors
            return not isinstance(self.pieces[0].source, Absent)
        return not any(isinstance(piece.source, Absent) for piece in self.pieces)

    def numpy(self, region: Box | None = None) -> Array:
        """Read it, or a box of it, into memory.

        Returns an array of the box's shape: numpy dtypes, ml_dtypes for bfloat16 and float8. Packed and raw types give
        their bytes; a block-quantized type that has a dequantizer gives float32. Raises CheckpointError where the file
        is cut short, MemoryError never by design of the reader, only where the array itself does not fit.
        """
        from anyckpt.core.read import read_box

        array = read_box(self, region or whole(self.shape))
        dequantize = DEQUANTIZERS.get(self.dtype.name)
        if dequantize is not None:
            return dequantize(array, (region or whole(self.shape)).shape)
        return array if array.dtype == self.dtype.numpy_dtype() else array.view(self.dtype.numpy_dtype())

    def tobytes(self) -> bytes:
        """The stored bytes, C order, little-endian."""
        from anyckpt.core.read import read_box

        return read_box(self, whole(self.shape)).tobytes()

    def __getitem__(self, index: int | slice | tuple[int | slice, ...]) -> Tensor:
        """A part of it, lazily; integers drop their axis, as in numpy. Steps must be positive."""
        from anyckpt.core.ops import index_tensor

        return index_tensor(self, index)

    def torch(self) -> Any:
        """A torch tensor of the same values, where torch is installed. Raises MissingDependency otherwise."""
        from anyckpt.verbs.load import to_torch

        return to_torch(self)

    def __repr__(self) -> str:
        return f"Tensor({self.dtype}, {list(self.shape)})"


DEQUANTIZERS: dict[str, Callable[[Array, Shape], Array]] = {}
"""dtype name -> function(raw bytes of whole blocks, shape) -> float32; families with block types register theirs."""


def stored_bytes(dtype: DType, shape: Shape) -> int:
    """Bytes of a C-ordered tensor; packed types fill whole blocks along the flattened tensor."""
    return dtype.nbytes(prod(shape))


def stored_shape(dtype: DType, shape: Shape) -> Shape:
    """The shape of the array of bytes that a packed tensor is read as; a plain type's own shape."""
    if dtype.block == 1:
        return shape
    if not shape:
        return (dtype.itemsize,)
    return (*shape[:-1], dtype.nbytes(shape[-1]))


def from_source(dtype: DType, shape: Shape, source: Source, strides: Shape | None = None) -> Tensor:
    """A tensor whose elements lie in one source."""
    return Tensor(dtype, shape, (Piece(source, None, strides),))


def from_array(array: Array, dtype: DType | None = None) -> Tensor:
    """A tensor held in memory, in the array's shape; stored little-endian."""
    import numpy as np

    from anyckpt.core.dtypes import of_numpy

    if array.dtype.byteorder == ">" or (array.dtype.byteorder == "=" and not np.little_endian):
        array = array.astype(array.dtype.newbyteorder("<"))
    return from_source(dtype or of_numpy(array.dtype), array.shape, Inline(np.ascontiguousarray(array).tobytes()))


def filled(dtype: DType, shape: Shape, element: bytes) -> Tensor:
    """A tensor every element of which has the same bytes."""
    return from_source(dtype, shape, Fill(element, stored_bytes(dtype, shape)))
