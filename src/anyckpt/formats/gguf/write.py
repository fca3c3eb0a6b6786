"""GGUF files to be: header bytes, and where every tensor stands. The same bytes as gguf-py's writer for the same input.

The checkpoint must speak GGUF already: tensors under GGUF names in the types they are to have, metadata as
`facts["gguf"]`; `verbs.gguf` makes it so from any other.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping

from anyckpt.core.checkpoint import Checkpoint
from anyckpt.core.ggml.types import ID_OF
from anyckpt.core.layout import FileLayout, Part
from anyckpt.core.tensor import Tensor
from anyckpt.errors import UsageError
from anyckpt.formats.gguf import kv
from anyckpt.formats.gguf.header import ALIGNMENT, MAGIC, MAX_DIMENSIONS, MAX_NAME_BYTES
from anyckpt.formats.gguf.kv import U16, Field, Metadata
from anyckpt.formats.table import WriteOptions
from anyckpt.io.paths import printable

VERSION = 3
SPLIT_KEYS = ("split.no", "split.count", "split.tensors.count")


def write(checkpoint: Checkpoint, options: WriteOptions) -> list[FileLayout]:
    """One file, or with `split_max_bytes` in `options.extra` a set named after the destination.

    Raises UsageError for a checkpoint without GGUF metadata, and for a tensor that GGUF can't hold.
    """
    metadata = checkpoint.facts.get("gguf")
    if not isinstance(metadata, Metadata):
        raise UsageError(
            "GGUF needs to know the model, and these tensors carry no config",
            hint="convert a model's folder: anyckpt convert FOLDER OUT.gguf",
        )
    fields = {key: value for key, value in metadata.fields.items() if key not in SPLIT_KEYS}
    limit = int(options.extra.get("split_max_bytes") or 0)
    groups = split(checkpoint.weights, limit)
    if len(groups) == 1:
        return [layout("" if not options.extra.get("as_folder") else _name(options, 1, 1), fields, checkpoint.weights)]
    files = []
    for i, names in enumerate(groups):
        numbers = {
            "split.no": kv.field(U16, i), "split.count": kv.field(U16, len(groups)),
            "split.tensors.count": kv.field(kv.I32, len(checkpoint.weights)),
        }  # fmt: skip
        held = {**fields, **numbers} if i == 0 else numbers
        weights = {name: checkpoint.weights[name] for name in names}
        files.append(layout(_name(options, i + 1, len(groups)), held, weights, alignment_of(fields)))
    return files


def _name(options: WriteOptions, no: int, count: int) -> str:
    stem = options.destination.removesuffix(".gguf") or "model"
    return f"{stem}-{no:05d}-of-{count:05d}.gguf" if count > 1 else f"{stem}.gguf"


def split(weights: Mapping[str, Tensor], limit: int) -> list[list[str]]:
    """Names by file: a file is closed when the next tensor would pass `limit` bytes, padding not counted (gguf-py's
    rule).
    """
    groups: list[list[str]] = [[]]
    held = 0
    for name, tensor in weights.items():
        if groups[-1] and limit and held + tensor.nbytes > limit:
            groups.append([])
            held = 0
        groups[-1].append(name)
        held += tensor.nbytes
    return groups


def alignment_of(fields: Mapping[str, Field]) -> int:
    """The alignment that the metadata asks for."""
    found = fields.get("general.alignment")
    return int(found.value()) if found is not None else ALIGNMENT


def encode_metadata(fields: Iterable[tuple[str, Field]]) -> bytes:
    """Key-value pairs as they lie in a file."""
    parts = []
    for key, value in fields:
        raw = key.encode("utf-8", "surrogateescape")
        parts += [struct.pack("<Q", len(raw)), raw, value.encoded()]
    return b"".join(parts)


def layout(
    name: str, fields: Mapping[str, Field], weights: Mapping[str, Tensor], alignment: int | None = None
) -> FileLayout:
    """One file of these values and tensors."""
    alignment = alignment or alignment_of(fields)
    header = header_bytes(fields, weights, alignment)
    start = -(-len(header) // alignment) * alignment if weights else len(header)
    parts = [Part(0, len(header), header)]
    offset = start
    for tensor in weights.values():
        if tensor.nbytes:
            parts.append(Part(offset, tensor.nbytes, tensor))
        offset += -(-tensor.nbytes // alignment) * alignment
    return FileLayout(name, offset, tuple(parts))


def header_bytes(fields: Mapping[str, Field], weights: Mapping[str, Tensor], alignment: int) -> bytes:
    """All that stands before the padding and the data."""
    infos, offset = [], 0
    for name, tensor in weights.items():
        raw, dims, type_id = _described(name, tensor)
        infos.append(struct.pack(f"<Q{len(raw)}sI{len(dims)}QIQ", len(raw), raw, len(dims), *dims, type_id, offset))
        offset += -(-tensor.nbytes // alignment) * alignment
    counts = struct.pack("<IQQ", VERSION, len(weights), len(fields))
    return MAGIC + counts + encode_metadata(fields.items()) + b"".join(infos)


def _described(name: str, tensor: Tensor) -> tuple[bytes, tuple[int, ...], int]:
    raw = name.encode("utf-8", "surrogateescape")
    type_id = ID_OF.get(tensor.dtype.name)
    shown = printable(name, limit=100)
    if type_id is None:
        raise UsageError(
            f"{shown} is {tensor.dtype.name}, which GGUF has no type for", hint=f"leave it out with --exclude '{shown}'"
        )
    if len(tensor.shape) > MAX_DIMENSIONS:
        raise UsageError(f"{shown} has {tensor.ndim} axes; GGUF allows {MAX_DIMENSIONS}")
    if len(raw) > MAX_NAME_BYTES:
        raise UsageError(f"the name {shown} is longer than the {MAX_NAME_BYTES} bytes that llama.cpp reads")
    if tensor.shape and tensor.shape[-1] % tensor.dtype.block:
        raise UsageError(f"rows of {shown} are not whole blocks of {tensor.dtype.name}")
    if not tensor.is_stored:
        raise UsageError(f"the values of {shown} were never saved")
    return raw, tuple(reversed(tensor.shape)), type_id
