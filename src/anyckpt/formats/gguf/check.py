"""Deep check of quantized tensors: block scales that are NaN or infinite, as llama.cpp's `--check-tensors` refuses
them.
"""

from __future__ import annotations

import numpy as np

from anyckpt.core.box import Box, slabs
from anyckpt.core.checkpoint import Checkpoint
from anyckpt.core.ggml.types import BLOCK_TYPES, BlockType
from anyckpt.core.ggml.validate import bad_blocks
from anyckpt.core.read import read_box
from anyckpt.core.source import File
from anyckpt.core.tensor import Tensor
from anyckpt.errors import CheckpointError
from anyckpt.finding import Report
from anyckpt.io.paths import printable
from anyckpt.io.place import Place

SLAB_BYTES = 4 << 20


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
                "non-finite",
                f"{n_bad:,} of its blocks have a scale that is NaN or infinite",
                where=printable(name),
                hint="llama.cpp computes garbage with it: download it again, or quantize again",
            )


def _bad_blocks(tensor: Tensor, row: BlockType) -> int:
    n_bad = 0
    n_blocks = (*tensor.shape[:-1], tensor.shape[-1] // row.block)
    for slab in slabs(n_blocks, max(1, SLAB_BYTES // row.n_bytes)):
        box = Box((*slab.start[:-1], slab.start[-1] * row.block), (*slab.stop[:-1], slab.stop[-1] * row.block))
        blocks = read_box(tensor, box).reshape(-1, row.n_bytes)
        n_bad += int(np.count_nonzero(bad_blocks(blocks, row.name)))
    return n_bad
