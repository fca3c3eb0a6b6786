"""Importance matrices: for the columns of a weight, how much their errors matter, as `llama-imatrix` measures it.

    GGUF     general.type "imatrix"; tensors NAME.in_sum2 [columns · experts] and NAME.counts [experts]
    .dat     i32 n; per entry: i32 length, name, i32 calls, i32 n values, f32[n]      (before August 2025)

What is given to the quantizer is the mean: the sum by its count, 1 for an expert that never ran.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

import numpy as np

from anyckpt.core.source import File
from anyckpt.core.tensor import Tensor, from_array
from anyckpt.finding import Report, fail
from anyckpt.formats.gguf.header import MAGIC
from anyckpt.formats.gguf.split import read_one

MAX_BYTES = 1 << 30


def read_importance(file: File) -> dict[str, Tensor]:
    """Tensor name -> float32 [columns] or [experts · columns]. Raises CheckpointError for another kind of file."""
    if file.size > MAX_BYTES:
        raise fail("limit-exceeded", f"has {file.size:,} bytes, too many for an importance matrix", where=file.name)
    found = _from_gguf(file) if file.read(0, min(4, file.size)) == MAGIC else _from_dat(file)
    for name, values in found.items():
        if not np.isfinite(values).all():
            raise fail("non-finite", "an importance is NaN or infinite", where=f"{file.name}, tensor {name}")
    return {name: from_array(values) for name, values in found.items()}


def _from_gguf(file: File) -> dict[str, np.ndarray]:
    weights: Mapping[str, Tensor] = read_one(file, Report()).weights
    found = {}
    for name, tensor in weights.items():
        base = name.removesuffix(".in_sum2")
        counts = weights.get(f"{base}.counts")
        if base == name or counts is None:
            continue
        sums, n = tensor.numpy().astype(np.float32).reshape(-1), counts.numpy().astype(np.float32).reshape(-1)
        rows = sums.reshape(len(n), -1)
        mean = np.where(n[:, None] > 0, rows / np.where(n > 0, n, 1)[:, None], np.float32(1))
        found[base] = mean.astype(np.float32).reshape(-1)
    if not found:
        raise fail("bad-header", "holds no importance matrix", where=file.name)
    return found


def _from_dat(file: File) -> dict[str, np.ndarray]:
    data, at = file.read(0, file.size), 0

    def number() -> int:
        nonlocal at
        if at + 4 > len(data):
            raise fail("truncated", "the importance matrix ends too early", where=file.name)
        (value,) = struct.unpack_from("<i", data, at)
        at += 4
        return int(value)

    found = {}
    for _ in range(number()):
        length = number()
        name = data[at : at + max(length, 0)].decode("utf-8", "replace")
        at += length
        calls, n = number(), number()
        if length < 1 or n < 1 or at + 4 * n > len(data):
            raise fail("bad-header", "is no importance matrix", where=file.name)
        values = np.frombuffer(data, "<f4", n, at).astype(np.float32)
        at += 4 * n
        found[name] = values / np.float32(calls) if calls > 0 else values
    if not found:
        raise fail("bad-header", "holds no importance matrix", where=file.name)
    return found
