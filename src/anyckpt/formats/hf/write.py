"""The folder to be: shards, their index, and what travels along.

Facts: shard rule and names from huggingface_hub 1.x `serialization/_base.py` and transformers 5.24 `save_pretrained`:
tensors in the order of the state dict; one over the limit has a file to itself; a file is closed when the next tensor
would pass the limit. `total_size` is the bytes of all tensors, `total_parameters` their elements, shared ones once.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

from anyckpt.core.checkpoint import Asset, Checkpoint
from anyckpt.core.layout import FileLayout, Part
from anyckpt.core.source import Span
from anyckpt.core.tensor import Tensor
from anyckpt.formats import safetensors
from anyckpt.formats.hf.ties import explained
from anyckpt.formats.table import WriteOptions

METADATA = {"format": "pt"}
ENTRY_BYTES = 200  # of a header's entry without its name, at most for any real shape; a name's character takes up to 6


def write(checkpoint: Checkpoint, options: WriteOptions) -> list[FileLayout]:
    """Weights as safetensors, an index where there are several files, config and tokenizer as they were.

    Tied names that the config explains are left out as transformers does; others are written under each name, since a
    loader could not find them again (`tied="clone"`: all are written; "drop": none). Raises UsageError for a tensor
    that safetensors can't hold.
    """
    dropped = _dropped(checkpoint, options)
    weights = {name: tensor for name, tensor in checkpoint.weights.items() if name not in dropped}
    shards = split(weights, options.max_shard_bytes)
    stem = "adapter_model" if checkpoint.format == "peft" else "model"
    files: list[FileLayout] = []
    if len(shards) == 1:
        files.append(safetensors.layout(f"{stem}.safetensors", weights, METADATA))
    else:
        weight_map: dict[str, str] = {}
        for i, names in enumerate(shards, 1):
            file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
            files.append(safetensors.layout(file, {name: weights[name] for name in names}, METADATA))
            weight_map.update(dict.fromkeys(names, file))
        files.append(literal("model.safetensors.index.json", _index(weights, weight_map)))
    for asset in checkpoint.assets:
        files.append(_config(checkpoint, asset) if asset.name == "config.json" else _copy(asset))
    config = checkpoint.config or {}
    if "model_type" in config and not any(asset.name == "config.json" for asset in checkpoint.assets):
        files.append(literal("config.json", _dump(config)))
    return files


def split(weights: Mapping[str, Tensor], limit: int) -> list[list[str]]:
    """Names by shard. `limit` in bytes of tensors; very many small ones are cut where the header grows too long."""
    shards: list[list[str]] = []
    current: list[str] = []
    n_bytes = header_bytes = 0
    for name, tensor in weights.items():
        size, entry_bytes = tensor.nbytes, ENTRY_BYTES + 6 * len(name)
        if size > limit:
            shards.append([name])
            continue
        if current and (n_bytes + size > limit or header_bytes + entry_bytes > safetensors.MAX_HEADER_BYTES):
            shards.append(current)
            current, n_bytes, header_bytes = [], 0, 0
        current.append(name)
        n_bytes += size
        header_bytes += entry_bytes
    return [*shards, current] if current or not shards else shards


def _index(weights: Mapping[str, Tensor], weight_map: Mapping[str, str]) -> bytes:
    """The index as json.dumps(indent=2) prints it, which is slow for a million names."""
    totals = {
        "total_parameters": sum(t.size for t in weights.values()),
        "total_size": sum(t.nbytes for t in weights.values()),
    }
    quote = json.encoder.encode_basestring
    lines = ",\n".join(f"    {quote(name)}: {quote(file)}" for name, file in sorted(weight_map.items()))
    head = json.dumps({"metadata": totals}, indent=2)[:-2]
    return f'{head},\n  "weight_map": {{\n{lines}\n  }}\n}}\n'.encode()


def _dropped(checkpoint: Checkpoint, options: WriteOptions) -> set[str]:
    if options.tied == "clone":
        return set()
    if options.tied == "drop":
        return set(checkpoint.aliases)
    return explained(checkpoint.aliases, checkpoint.weights, checkpoint.config)


def _config(checkpoint: Checkpoint, asset: Asset) -> FileLayout:
    """config.json as it was, or with the dtype set right where the weights were cast."""
    saved = checkpoint.config or {}
    key = next((k for k in ("dtype", "torch_dtype") if isinstance(saved.get(k), str)), None)
    now = main_dtype(checkpoint.weights)
    if key is None or now is None or str(saved[key]).removeprefix("torch.") == now or "quantization_config" in saved:
        return _copy(asset)
    return literal("config.json", _dump({**saved, key: now}))


def main_dtype(weights: Mapping[str, Tensor]) -> str | None:
    """The float type that most bytes are of; None where there is none."""
    n_bytes: Counter[str] = Counter()
    for tensor in weights.values():
        if tensor.dtype.kind == "float":
            n_bytes[tensor.dtype.name] += tensor.nbytes
    return n_bytes.most_common(1)[0][0] if n_bytes else None


def _copy(asset: Asset) -> FileLayout:
    size = asset.file.size
    return FileLayout(asset.name, size, (Part(0, size, Span(asset.file, 0, size)),) if size else ())


def literal(name: str, data: bytes) -> FileLayout:
    """A file of these bytes."""
    return FileLayout(name, len(data), (Part(0, len(data), data),))


def _dump(value: Any) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
