"""The lazy operation of a writer that quantizes: any tensor of values as blocks, or as a narrower float, in slabs of
rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from anyckpt.core import kernels
from anyckpt.core.box import Box
from anyckpt.core.dtypes import DTYPES, DType
from anyckpt.core.ggml import native
from anyckpt.core.ggml.pack import CHUNK, PACKED_BY_NUMPY, pack
from anyckpt.core.ggml.types import spelling
from anyckpt.core.tensor import DEQUANTIZERS, Tensor
from anyckpt.errors import MissingDependency, UsageError
from anyckpt.finding import fail

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]

F32 = "float32"


@dataclass(frozen=True, slots=True)
class Quantize:
    """Values in blocks of `dtype`. `importance`: a float32 tensor [columns], or [experts, columns] for stacked
    experts.
    """

    input: Tensor
    dtype: DType
    importance: Tensor | None = None

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return (self.input,) if self.importance is None else (self.input, self.importance)

    def regions(self, box: Box) -> list[tuple[Tensor, Box]]:
        out = [(self.input, box)]
        if self.importance is not None:
            shape = self.importance.shape
            lead = () if len(shape) == 1 else ((box.start[0], box.stop[0]),)
            bounds = (*lead, (0, shape[-1]))
            out.append((self.importance, Box(tuple(a for a, _ in bounds), tuple(b for _, b in bounds))))
        return out

    def compute(self, box: Box, arrays: Sequence[Array]) -> Array:
        columns = box.shape[-1]
        values = as_float32(arrays[0], self.input.dtype, box.shape)
        if len(arrays) < 2 or arrays[1].ndim == 1:
            packed = pack(self.dtype.name, values.reshape(-1, columns), arrays[1] if len(arrays) > 1 else None)
        else:
            experts = values.reshape(box.shape[0], -1, columns)
            packed = np.concatenate(
                [pack(self.dtype.name, rows, w) for rows, w in zip(experts, arrays[1], strict=True)]
            )
        return packed.reshape(*box.shape[:-1], -1)

    def scratch(self, box: Box) -> int:
        return 4 * box.volume + 64 * CHUNK


@dataclass(frozen=True, slots=True)
class Dequantize:
    """The values of blocks, as float32."""

    input: Tensor

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return (self.input,)

    def regions(self, box: Box) -> list[tuple[Tensor, Box]]:
        block = self.input.dtype.block
        first, last = box.start[-1] // block * block, -(-box.stop[-1] // block) * block
        return [(self.input, Box((*box.start[:-1], first), (*box.stop[:-1], last)))]

    def compute(self, box: Box, arrays: Sequence[Array]) -> Array:
        wide = self.regions(box)[0][1]
        values = DEQUANTIZERS[self.input.dtype.name](arrays[0], wide.shape)
        start = box.start[-1] - wide.start[-1]
        return values[..., start : start + box.shape[-1]]

    def scratch(self, box: Box) -> int:
        return 4 * self.regions(box)[0][1].volume


@dataclass(frozen=True, slots=True)
class Narrow:
    """float32 or bfloat16 values as float16, which holds none beyond 65,504: such a value is an error, not an
    infinity.
    """

    input: Tensor

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return (self.input,)

    def regions(self, box: Box) -> list[tuple[Tensor, Box]]:
        return [(self.input, box)]

    def compute(self, box: Box, arrays: Sequence[Array]) -> Array:
        out = np.empty(arrays[0].shape, np.float16)
        source, target = arrays[0].reshape(-1), out.reshape(-1)
        for i in range(0, source.size, CHUNK):
            values = source[i : i + CHUNK]
            narrow = kernels.cast(values, DTYPES["float16"])
            target[i : i + CHUNK] = narrow
            if (narrow.view(np.uint16) & 0x7FFF >= 0x7C00).any():  # infinite or NaN
                self._check(values.astype(np.float32), narrow)
        return out

    @staticmethod
    def _check(values: Array, narrow: Array) -> None:
        """Raise where a finite value became infinite; NaN and infinities stay what they are."""
        if (np.isinf(narrow) & np.isfinite(values)).any():
            raise fail(
                "lossy",
                "a value is beyond what float16 can hold (65,504)",
                hint="write --quant bf16 or f32, or let it become infinite with --allow-lossy",
            )

    def scratch(self, box: Box) -> int:
        return 2 * box.volume + 8 * CHUNK


def as_float32(array: Array, dtype: DType, shape: tuple[int, ...]) -> Array:
    """Values that were read, as float32."""
    if dtype.name in DEQUANTIZERS:
        return DEQUANTIZERS[dtype.name](array, shape)
    return np.ascontiguousarray(kernels.cast(array, DTYPES[F32]) if array.dtype != np.float32 else array)


def quantize(tensor: Tensor, dtype: DType, importance: Tensor | None = None) -> Tensor:
    """`tensor` in blocks of `dtype`. Raises UsageError where its rows are not whole blocks, MissingDependency where
    only the `gguf` extra can write the type."""
    if tensor.dtype == dtype:
        return tensor
    if not tensor.shape or tensor.shape[-1] % dtype.block:
        raise UsageError(
            f"rows of {list(tensor.shape)} are not whole blocks of {dtype.block}, as {spelling(dtype.name)} needs"
        )
    if dtype.name not in PACKED_BY_NUMPY and native.packer(dtype.name) is None:
        if dtype.name in native.ONLY_HERE:
            raise MissingDependency(f"{spelling(dtype.name)} is written by libgguf: pip install 'anyckpt[gguf]'")
        raise UsageError(f"{spelling(dtype.name)} can be read, but is not written")
    return Tensor(dtype, tensor.shape, op=Quantize(tensor, dtype, importance))


def dequantize(tensor: Tensor) -> Tensor:
    """The values of a tensor of blocks, as float32; any other tensor as it is."""
    if tensor.dtype.name not in DEQUANTIZERS:
        return tensor
    return Tensor(DTYPES[F32], tensor.shape, op=Dequantize(tensor))


def narrow(tensor: Tensor) -> Tensor:
    """A tensor as float16, by way of float32."""
    if tensor.dtype.name == "float16":
        return tensor
    return Tensor(DTYPES["float16"], tensor.shape, op=Narrow(tensor))
