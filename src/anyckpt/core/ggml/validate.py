"""Blocks whose scale is NaN or infinite: what ggml's `ggml_validate_row_data` refuses."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from anyckpt.core.ggml.types import BLOCK_TYPES

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]

SCALES: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {
        **dict.fromkeys(BLOCK_TYPES, (0,)), "q4_1": (0, 2), "q5_1": (0, 2), "q2_k": (80, 82), "q3_k": (108,),
        "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,), "tq1_0": (52,), "tq2_0": (64,), "mxfp4": (), "nvfp4": (),
        "iq1_m": (),
    }
)  # fmt: skip
"""Byte offsets of the float16 numbers of a block."""


def bad_blocks(blocks: Array, name: str) -> Array:
    """Which of the blocks (n, bytes) have a scale that is no finite number."""
    if name == "mxfp4":
        return np.asarray(blocks[:, 0] == 0xFF)
    if name == "nvfp4":
        return np.asarray((blocks[:, :4] & 0x7F == 0x7F).any(axis=1))
    if name == "iq1_m":
        high = blocks[:, [53, 55]].astype(np.uint16)
        bits = high[:, 0] << 4 & 0x0F00 | high[:, 1] << 8 & 0xF000
        return np.asarray(bits & 0x7C00 == 0x7C00)
    bad = np.zeros(len(blocks), bool)
    for offset in SCALES[name]:
        bad |= np.ascontiguousarray(blocks[:, offset : offset + 2]).view("<u2")[:, 0] & 0x7C00 == 0x7C00
    return bad
