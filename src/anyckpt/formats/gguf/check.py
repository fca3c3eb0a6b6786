"""Deep check of quantized tensors: block scales that are NaN or infinite, as llama.cpp's `--check-tensors` refuses them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from anyckpt.core.box import Box, slabs
from anyckpt.core.checkpoint import Checkpoint
from anyckpt.core.ggml.types import BLOCK_TYPES, BlockType
from anyckpt.core.read import read_box
from anyckpt.core.source import File
from anyckpt.core.tensor import Tensor
from anyckpt.errors import CheckpointError
from anyckpt.finding import Report
from anyckpt.io.paths import printable
from anyckpt.io.place import Place

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]

SLAB_BYTES = 4 << 20

SCALES: Mapping[str, tuple[int, ...]] = {
    **{name: (0,) for name in BLOCK_TYPES}, "q4_1": (0, 2), "q5_1": (0, 2), "q2_k": (80, 82), "q3_k": (108,),
    "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,), "tq1_0": (52,), "tq2_0": (64,), "mxfp4": (), "nvfp4": (), "iq1_m": (),
}  # fmt: skip
"""Byte offsets of the float16 numbers of a block."""


def verify(source: File | Place, checkpoint: Checkpoint, report: Report) -> None:
    """Read the scales of every block."""
    for name, tensor in checkpoint.weights.items():
        row = BLOCK_TYPES.get(tensor.dtype.name)
        if row is None or not tensor.shape:
            continue
        try:
            n_bad = _bad_blocks(tensor, row)
        except CheckpointError:
            continue  # the pass over the values says so
        if n_bad:
            report.add(
                "non-finite", f"{n_bad:,} of its blocks have a scale that is NaN or infinite",
                where=printable(name), hint="llama.cpp computes garbage with it: download it again, or quantize again",
            )


def _bad_blocks(tensor: Tensor, row: BlockType) -> int:
    n_bad = 0
    n_blocks = (*tensor.shape[:-1], tensor.shape[-1] // row.block)
    for slab in slabs(n_blocks, max(1, SLAB_BYTES // row.n_bytes)):
        box = Box((*slab.start[:-1], slab.start[-1] * row.block), (*slab.stop[:-1], slab.stop[-1] * row.block))
        blocks = read_box(tensor, box).reshape(-1, row.n_bytes)
        n_bad += int(np.count_nonzero(_is_bad(blocks, row.name)))
    return n_bad


def _is_bad(blocks: Array, name: str) -> Array:
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
