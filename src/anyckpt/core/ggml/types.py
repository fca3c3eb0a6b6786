"""The table of ggml's tensor types, as GGUF files name them by number.

Source: `ggml.h` and `ggml-common.h` of llama.cpp builds 11434 and 11739. The enum only grows: numbers of removed types
(4, 5, 31-33, 36-38) were never given away again. Types that exist only while a model runs (Q8_1, Q8_K) are in no file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from anyckpt.core.dtypes import DTYPES, DType, register
from anyckpt.core.tensor import DEQUANTIZERS

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

Swap = tuple[tuple[int, int, int], ...]
"""(byte offset in the block, bytes of an element, elements) of what has a byte order."""


@dataclass(frozen=True, slots=True)
class BlockType:
    """One quantized type: `block` values in `n_bytes` bytes; `swap` is what a big-endian file reverses in a block."""

    id: int
    name: str
    block: int
    n_bytes: int
    swap: Swap = ((0, 2, 1),)

    @property
    def dtype(self) -> DType:
        """The row of `core.dtypes`."""
        return DTYPES[self.name]


_ROWS = (
    BlockType(2, "q4_0", 32, 18),
    BlockType(3, "q4_1", 32, 20, ((0, 2, 2),)),
    BlockType(6, "q5_0", 32, 22),
    BlockType(7, "q5_1", 32, 24, ((0, 2, 2),)),
    BlockType(8, "q8_0", 32, 34),
    BlockType(10, "q2_k", 256, 84, ((80, 2, 2),)),
    BlockType(11, "q3_k", 256, 110, ((108, 2, 1),)),
    BlockType(12, "q4_k", 256, 144, ((0, 2, 2),)),
    BlockType(13, "q5_k", 256, 176, ((0, 2, 2),)),
    BlockType(14, "q6_k", 256, 210, ((208, 2, 1),)),
    BlockType(16, "iq2_xxs", 256, 66, ((0, 2, 33),)),
    BlockType(17, "iq2_xs", 256, 74, ((0, 2, 33),)),
    BlockType(18, "iq3_xxs", 256, 98, ((0, 2, 1), (66, 4, 8))),
    BlockType(19, "iq1_s", 256, 50, ((0, 2, 1), (34, 2, 8))),
    BlockType(20, "iq4_nl", 32, 18),
    BlockType(21, "iq3_s", 256, 110),
    BlockType(22, "iq2_s", 256, 82),
    BlockType(23, "iq4_xs", 256, 136, ((0, 2, 2),)),
    BlockType(29, "iq1_m", 256, 56, ((48, 2, 4),)),
    BlockType(34, "tq1_0", 256, 54, ((52, 2, 1),)),
    BlockType(35, "tq2_0", 256, 66, ((64, 2, 1),)),
    BlockType(39, "mxfp4", 32, 17, ()),
    BlockType(40, "nvfp4", 64, 36, ()),
    BlockType(41, "q1_0", 128, 18),
    BlockType(42, "q2_0", 64, 18),
)

PLAIN: Mapping[int, str] = MappingProxyType(
    {0: "float32", 1: "float16", 24: "int8", 25: "int16", 26: "int32", 27: "int64", 28: "float64", 30: "bfloat16"}
)
"""Types of one element, by number, as `core.dtypes` calls them."""

REMOVED: Mapping[int, str] = MappingProxyType(
    {
        4: "Q4_2",
        5: "Q4_3",
        31: "Q4_0_4_4",
        32: "Q4_0_4_8",
        33: "Q4_0_8_8",
        36: "IQ4_NL_4_4",
        37: "IQ4_NL_4_8",
        38: "IQ4_NL_8_8",
        9: "Q8_1",
        15: "Q8_K",
    }
)
"""Numbers that once stood in files, or that never should."""

BLOCK_TYPES: Mapping[str, BlockType] = MappingProxyType({row.name: row for row in _ROWS})

BY_ID: Mapping[int, DType] = MappingProxyType(
    {
        **{number: DTYPES[name] for number, name in PLAIN.items()},
        **{row.id: register(DType(row.name, row.n_bytes, "quantized", block=row.block)) for row in _ROWS},
    }
)
"""ggml's number -> element type."""

ID_OF: Mapping[str, int] = MappingProxyType({dtype.name: number for number, dtype in BY_ID.items()})
"""Element type's name -> ggml's number."""


def spelling(name: str) -> str:
    """A type as llama.cpp prints it: `float16` is F16, `q4_k` is Q4_K."""
    short = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "float64": "f64"}
    return short.get(name, name.replace("int", "i") if name.startswith("int") else name).upper()


def swapped(blocks: Array, row: BlockType) -> Array:
    """Blocks (n, bytes) of uint8 of one byte order in the other; a copy."""
    out = blocks.copy()
    for offset, size, n in row.swap:
        stop = offset + size * n
        field = blocks[:, offset:stop].reshape(len(blocks), n, size)
        out[:, offset:stop] = field[:, :, ::-1].reshape(len(blocks), -1)
    return np.asarray(out)


def _dequantizer(name: str) -> Callable[[Array, tuple[int, ...]], Array]:
    def dequantize(raw: Array, shape: tuple[int, ...]) -> Array:
        from anyckpt.core.ggml.unpack import unpack

        return unpack(name, raw, shape)

    return dequantize


DEQUANTIZERS.update({row.name: _dequantizer(row.name) for row in _ROWS})
