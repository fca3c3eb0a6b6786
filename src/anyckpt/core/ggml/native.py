"""ggml's own encoders in C, by the `libgguf` wheel (extra `gguf`), where it is installed: the same bytes, faster.

Its IQ1_M differs from the official encoder's and is left out, as are types it does not have. ggml's IQ3_S encoder has a
fault that is not copied: behind 32 zeros, what follows in a block of 256 is written too far to the front, and reads
back as other numbers. Rows that hold such blocks are left to `pack_iq`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from anyckpt.core.ggml.types import BLOCK_TYPES

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]

TYPES = frozenset(
    "q4_0 q4_1 q5_0 q5_1 q8_0 q2_k q3_k q4_k q5_k q6_k iq4_nl iq4_xs iq3_s iq3_xxs iq2_s iq2_xs iq2_xxs iq1_s "
    "tq1_0 tq2_0 mxfp4 q1_0".split()
)
ONLY_HERE = frozenset(("iq3_xxs", "iq2_s", "iq2_xs", "iq2_xxs", "iq1_s"))
"""Types that numpy does not write."""
OFF = "ANYCKPT_NO_LIBGGUF"  # set by the test that compares the two


@cache
def library() -> Any:
    """The module, None where it is not installed."""
    try:
        import libgguf
    except ImportError:
        return None
    return libgguf


def misplaces(rows: Array) -> Array:
    """Which rows [n, columns] have a block where values follow a group of 32 zeros."""
    used = (rows.reshape(len(rows), -1, 8, 32) != 0).any(axis=3)
    return np.asarray((~used[..., :-1] & used[..., 1:]).any(axis=(1, 2)))


def packer(name: str) -> Callable[[str, Array, Array | None], Array] | None:
    """The C encoder of a type, None where there is none."""
    return pack if name in TYPES and library() is not None and not os.environ.get(OFF) else None


def pack(name: str, rows: Array, weights: Array | None) -> Array:
    """Quantize rows as `core.ggml.pack.pack` does."""
    row = BLOCK_TYPES[name]
    source = np.ascontiguousarray(rows, np.float32)
    out = np.empty((rows.shape[0], rows.shape[1] // row.block * row.n_bytes), np.uint8)
    importance = None if weights is None else np.ascontiguousarray(weights, np.float32)
    library().quantize_rows_into_raw(row.id, source, out, rows.shape[0], rows.shape[1], importance)
    return out
