"""What came before GGUF: GGML without a version, GGMF 1, GGJT 1 to 3. Llama models only.

    0   u32 magic: "lmgg" (no version), "fmgg", "tjgg" as the bytes lie; u32 version for the latter two
    …   seven i32: n_vocab n_embd n_mult n_head n_layer n_rot ftype
    …   vocabulary: n_vocab × (u32 length, bytes, and float32 score unless "lmgg")
    …   tensors until the file ends: i32 n_dims, i32 name length, i32 type, i32 dims (fastest first), name,
        "tjgg": zeros to a multiple of 32 of the file's offset, data

Names are Meta's, and so is the rotary order. A model of more than 7B came in FILE, FILE.1, FILE.2 …: each tensor cut in
parts along rows, or along columns for `wo`, `w2` and `tok_embeddings`. Of quantized data only GGJT 3 has today's
blocks; GGJT 2 has float32 scales, and what is older also pairs neighbouring values in a byte.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from anyckpt.core import ops
from anyckpt.core.checkpoint import Checkpoint
from anyckpt.core.dtypes import DType, register
from anyckpt.core.ggml.types import BY_ID
from anyckpt.core.source import File, Span
from anyckpt.core.tensor import DEQUANTIZERS, Tensor, from_source
from anyckpt.finding import Report, fail
from anyckpt.formats.gguf.header import Cursor
from anyckpt.io.bounds import cut_short
from anyckpt.io.paths import printable
from anyckpt.io.place import Place

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]

MAGICS = {b"lmgg": "GGML", b"fmgg": "GGMF", b"tjgg": "GGJT"}
ADAPTER = b"algg"
VERSIONS = {"GGML": (0,), "GGMF": (1,), "GGJT": (1, 2, 3)}
FIELDS = ("n_vocab", "n_embd", "n_mult", "n_head", "n_layer", "n_rot", "ftype")
ALIGNMENT = 32
MAX_PARTS = 8
BY_COLUMNS = ("attention.wo.weight", "feed_forward.w2.weight", "tok_embeddings.weight")

OLD_TYPES = {
    2: {2: DType("q4_0_ggjt2", 20, "quantized", block=32), 3: DType("q4_1_ggjt2", 24, "quantized", block=32),
        8: DType("q8_0_ggjt2", 36, "quantized", block=32)},
    1: {2: DType("q4_0_ggjt1", 20, "quantized", block=32), 3: DType("q4_1_ggjt1", 24, "quantized", block=32)},
}  # fmt: skip
"""GGJT version (1 stands for all that is older) -> type id -> blocks that differ from today's."""
NEW_IN = {1: (0, 1), 2: (0, 1, 6, 7), 3: (0, 1, 2, 3, 6, 7, 8, 10, 11, 12, 13, 14)}
"""Type ids whose blocks are today's, by version."""


def _old_values(raw: Array, shape: tuple[int, ...], dtype: DType) -> Array:
    blocks = np.ascontiguousarray(raw).reshape(-1, dtype.itemsize)
    d = np.ascontiguousarray(blocks[:, :4]).view("<f4")
    if dtype.name.startswith("q8_0"):
        values = np.ascontiguousarray(blocks[:, 4:]).view(np.int8).astype(np.float32) * d
        return np.asarray(values.reshape(-1)[: prod(shape)].reshape(shape))
    has_minimum = dtype.name.startswith("q4_1")
    packed = blocks[:, 8:] if has_minimum else blocks[:, 4:]
    if dtype.name.endswith("1") and not dtype.name.endswith("_1"):  # ggjt1: byte j holds values 2j and 2j + 1
        q = np.stack([packed & 15, packed >> 4], axis=2).reshape(len(blocks), 32)
    else:
        q = np.concatenate([packed & 15, packed >> 4], axis=1)
    if has_minimum:
        values = q.astype(np.float32) * d + np.ascontiguousarray(blocks[:, 4:8]).view("<f4")
    else:
        values = (q.astype(np.int8) - np.int8(8)).astype(np.float32) * d
    return np.asarray(values.reshape(-1)[: prod(shape)].reshape(shape))


def _register() -> None:
    def of(dtype: DType) -> Callable[[Array, tuple[int, ...]], Array]:
        return lambda raw, shape: _old_values(raw, shape, dtype)

    for types in OLD_TYPES.values():
        for dtype in types.values():
            DEQUANTIZERS[register(dtype).name] = of(dtype)


_register()


@dataclass(frozen=True, slots=True)
class Legacy:
    """What a file says beside its tensors: its settings by name, tokens as they lie, and scores where it has them."""

    container: str
    version: int
    settings: dict[str, int]
    tokens: tuple[bytes, ...]
    scores: tuple[float, ...] | None


def matches(file: File, head: bytes) -> bool:
    """Whether one of the old magic numbers stands at the start."""
    return head[:4] in (*MAGICS, ADAPTER)


def read(file: File, report: Report) -> Checkpoint:
    """Read a file by itself."""
    legacy, weights = _read_file(file)
    return _checkpoint(file, legacy, weights, report)


def read_set(place: Place, report: Report) -> Checkpoint:
    """A file, with FILE.1, FILE.2 … joined where they lie beside it."""
    file = place.open()
    legacy, weights = _read_file(file)
    parts = [weights]
    for i in range(1, MAX_PARTS):
        name = f"{place.path.name}.{i}"
        if legacy.container == "GGJT" or not place.exists(name):
            break
        parts.append(_read_file(place.open(name))[1])
    return _checkpoint(file, legacy, _joined(parts) if len(parts) > 1 else weights, report)


def _joined(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    out = {}
    for name, first in parts[0].items():
        pieces = [part[name] for part in parts if name in part]
        if len(pieces) != len(parts):
            raise fail("missing-tensor", f"{printable(name)} is not in every part of the model")
        axis = 1 if name.endswith(BY_COLUMNS) else 0
        out[name] = first if first.ndim == 1 else ops.concat(pieces, axis)
    return out


def _checkpoint(file: File, legacy: Legacy, weights: dict[str, Tensor], report: Report) -> Checkpoint:
    version = f" v{legacy.version}" if legacy.version else ""
    report.add(
        "older-spelling",
        f"is {legacy.container}{version}, from before GGUF; llama.cpp no longer reads it",
        where=file.name,
        hint="write it anew: anyckpt convert FILE NEW.gguf",
    )
    facts = {"container": f"{legacy.container}{version}", "ggml": legacy}
    return Checkpoint("ggml", file.name, weights, facts=facts)


def _read_file(file: File) -> tuple[Legacy, dict[str, Tensor]]:
    cursor = Cursor(file)
    magic = cursor.take(4)
    if magic == ADAPTER:
        raise fail("unsupported", "is a LoRA adapter of the time before GGUF", where=file.name)
    container = MAGICS[magic]
    version = 0 if container == "GGML" else cursor.number(4)
    if version not in VERSIONS[container]:
        raise fail("unsupported-version", f"is {container} of version {version:,}, which is not known", where=file.name)
    settings = {name: cursor.number(4) for name in FIELDS}
    least = 4 if container == "GGML" else 8
    if not 0 < settings["n_vocab"] <= cursor.left // least:
        n = settings["n_vocab"]
        raise cut_short(file.name, file.size, cursor.at, cursor.at + n * least)
    tokens, scores = [], []
    for _ in range(settings["n_vocab"]):
        tokens.append(cursor.take(cursor.number(4)))
        if container != "GGML":
            scores.append(float(np.frombuffer(cursor.take(4), "<f4")[0]))
    weights: dict[str, Tensor] = {}
    while cursor.left:
        name, tensor = _read_tensor(cursor, container, version)
        if name in weights:
            raise fail("duplicate-key", f"two tensors are called {printable(name)}", where=file.name)
        weights[name] = tensor
    return Legacy(container, version, settings, tuple(tokens), tuple(scores) if scores else None), weights


def _read_tensor(cursor: Cursor, container: str, version: int) -> tuple[str, Tensor]:
    where = cursor.file.name
    n_dims, length, kind = (cursor.number(4) for _ in range(3))
    if not 1 <= n_dims <= 4 or not 1 <= length <= 512:
        raise fail(
            "bad-header", f"a tensor of {n_dims:,} axes and a name of {length:,} bytes makes no sense", where=where
        )
    dims = tuple(cursor.number(4) for _ in range(n_dims))
    name = cursor.take(length).decode("utf-8", "surrogateescape")
    dtype = _type_of(kind, container, version)
    if dtype is None:
        raise fail("unknown-dtype", f"{printable(name)} is of type {kind} of {container} {version}", where=where)
    if dims[0] % dtype.block:
        raise fail(
            "size-mismatch", f"rows of {dims[0]:,} values of {printable(name)} are not whole blocks", where=where
        )
    if container == "GGJT":
        cursor.skip(min(-cursor.at % ALIGNMENT, cursor.left))
    n_bytes = dtype.nbytes(prod(dims))
    start = cursor.at
    cursor.skip(n_bytes)
    return name, from_source(dtype, tuple(reversed(dims)), Span(cursor.file, start, n_bytes))


def _type_of(kind: int, container: str, version: int) -> DType | None:
    era = version if container == "GGJT" else 1
    return OLD_TYPES.get(era, {}).get(kind) or (BY_ID[kind] if kind in NEW_IN[era] else None)
