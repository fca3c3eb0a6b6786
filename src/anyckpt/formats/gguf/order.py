"""Tensors of big-endian files: what has to be reversed, and what a writer forgot to reverse.

`convert_hf_to_gguf --bigendian` (build 11434) turns F32 and F16 round but leaves BF16 and all block types as they were
(it holds them as bytes), so the file says big-endian and most of its data is not. Exponents tell: of values read in the
wrong order hardly any lies within the range that weights have.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from anyckpt.core.box import Box
from anyckpt.core.dtypes import DType
from anyckpt.core.ggml.types import BLOCK_TYPES, swapped
from anyckpt.core.source import File, Foreign, Span
from anyckpt.core.tensor import Tensor, from_source
from anyckpt.formats.gguf.header import Info

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]

SAMPLE = 256  # values looked at


def big_endian(info: Info, file: File, is_forgotten: bool) -> Tensor:
    """The tensor in our byte order."""
    n_bytes = info.n_bytes
    row = BLOCK_TYPES.get(info.dtype.name)
    span = Span(file, info.offset, n_bytes)
    if is_forgotten or (row is not None and not row.swap):
        return from_source(info.dtype, info.shape, span)
    if row is None:
        return from_source(info.dtype, info.shape, Span(file, info.offset, n_bytes, swap=info.dtype.itemsize))
    bytes_of_rows = (*info.shape[:-1], info.shape[-1] // row.block * row.n_bytes)

    def read(box: Box) -> Array:
        """`box` in bytes, of whole blocks."""
        out = np.empty(box.shape, np.uint8)
        lead = bytes_of_rows[:-1]
        width = bytes_of_rows[-1]
        for index in np.ndindex(*(b - a for a, b in zip(box.start[:-1], box.stop[:-1]))):
            flat = 0
            for i, a, n in zip(index, box.start[:-1], lead):
                flat = flat * n + a + i
            start = info.offset + flat * width + box.start[-1]
            blocks = np.frombuffer(file.read(start, box.stop[-1] - box.start[-1]), np.uint8).reshape(-1, row.n_bytes)
            out[index] = swapped(blocks, row).reshape(-1)
        return out

    return from_source(info.dtype, info.shape, Foreign(read, n_bytes))


def forgotten(info: Info, file: File) -> bool:
    """Whether a BF16 or block tensor of a big-endian file is little-endian all the same."""
    stop = info.offset + info.n_bytes
    if stop > file.size or not info.n_bytes:
        return False
    values = _sample(info.dtype, file.read(info.offset, min(info.n_bytes, SAMPLE * info.dtype.itemsize)))
    if values is None:
        return False
    little, big = _plausible(values, info.dtype), _plausible(values.byteswap(), info.dtype)
    return little > 2 * big


def _sample(dtype: DType, data: bytes) -> Array | None:
    if dtype.name == "bfloat16":
        return np.frombuffer(data, "<u2")
    row = BLOCK_TYPES.get(dtype.name)
    if row is None or not row.swap:
        return None
    offset = row.swap[0][0]
    blocks = np.frombuffer(data, np.uint8).reshape(-1, row.n_bytes)
    return np.ascontiguousarray(blocks[:, offset : offset + 2]).view("<u2")


def _plausible(values: Array, dtype: DType) -> int:
    """How many have an exponent between 2^-24 and 2^6."""
    bias, shift, mask = (127, 7, 0xFF) if dtype.name == "bfloat16" else (15, 10, 0x1F)
    exponent = (values >> shift & mask).astype(np.int32) - bias
    return int(np.count_nonzero((exponent > max(-24, -bias)) & (exponent < 6)))
