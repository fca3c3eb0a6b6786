"""`view("dense")`: sparse, quantized and wrapped tensors as the plain tensors they stand for.

What a tensor subclass means is known for torch's own and for the classes of one table; any other stays as its parts
(`name/attribute`), which are never put together by guess.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from anyckpt.core.box import Box, whole
from anyckpt.core.checkpoint import Checkpoint
from anyckpt.core.dtypes import DTYPES
from anyckpt.core.inert import TensorSubclass
from anyckpt.core.ops import Densify, Dequantize, cast, reshape
from anyckpt.core.read import read_box
from anyckpt.core.source import Foreign
from anyckpt.core.tensor import DEQUANTIZERS, Tensor, from_array, from_source
from anyckpt.errors import UsageError

if TYPE_CHECKING:
    from anyckpt.core.tensor import Array

Parts = dict[str, Tensor]
"""What one entry becomes: suffix ("" or "/0" …) -> plain tensor."""

PACKED = {"quint4x2": 4, "quint2x4": 2}  # bits of a value; the first value is in the lowest bits


def dense(checkpoint: Checkpoint) -> Checkpoint:
    """Plain tensors for all that is sparse, quantized or a known wrapper; the rest as it is. Lazy.

    Values are those of torch's `.to_dense()` and `.dequantize()`. Optimizer state is left alone: it was plain.
    """
    subclasses: Mapping[str, TensorSubclass] = checkpoint.facts.get("subclasses") or {}
    made = {name: parts for name, value in subclasses.items() if (parts := plain_parts(value)) is not None}
    weights: dict[str, Tensor] = {}
    for name, tensor in checkpoint.weights.items():
        owner = name if name in made else next((n for n in _owners(name) if n in made), None)
        if owner is None:
            weights[name] = dequantized(tensor)
        else:
            weights.update((owner + suffix, part) for suffix, part in made[owner].items())
    facts = {**checkpoint.facts, "subclasses": {n: v for n, v in subclasses.items() if n not in made}}
    return replace(checkpoint.with_weights(weights), facts=facts)


def _owners(name: str) -> list[str]:
    """The names that `name` may be a part of: `a/b/c` belongs to `a/b` or `a`."""
    parts = name.split("/")
    return ["/".join(parts[:n]) for n in range(len(parts) - 1, 0, -1)]


def plain_parts(value: TensorSubclass) -> Parts | None:
    """The plain tensors of one tensor subclass, None where its meaning is not known."""
    name = value.cls.name
    row = MEANINGS.get(str(value.cls)) or next((f for end, f in BY_CLASS.items() if name == end), None)
    return row(value) if row is not None else None


def dequantized(tensor: Tensor) -> Tensor:
    """A block-quantized tensor as float32; any other as it is."""
    if tensor.dtype.name not in DEQUANTIZERS:
        return tensor
    return _by_blocks(tensor, "float32", tensor.numpy)


def _by_blocks(tensor: Tensor, dtype: str, values: Callable[[Box], Array]) -> Tensor:
    """A plain tensor over a packed one: boxes are widened to whole blocks, read by `values`, and trimmed.

    Where rows are not whole blocks every box needs the whole tensor.
    """
    block = tensor.dtype.block

    def read(box: Box) -> Array:
        if not tensor.shape or tensor.shape[-1] % block:
            return np.ascontiguousarray(values(whole(tensor.shape))[box.slices()])
        first = box.start[-1] // block * block
        wide = Box((*box.start[:-1], first), (*box.stop[:-1], -(-box.stop[-1] // block) * block))
        return np.ascontiguousarray(values(wide)[..., box.start[-1] - first : box.stop[-1] - first])

    kind = DTYPES[dtype]
    n_bytes = kind.nbytes(tensor.size)
    return from_source(kind, tensor.shape, Foreign(read, n_bytes, scratch=n_bytes))


def _unpacked(tensor: Tensor) -> Tensor:
    """torch's quint4x2 and quint2x4 as uint8, one value an element."""
    bits = PACKED[tensor.dtype.name]

    def values(box: Box) -> Array:
        packed = read_box(tensor, box)
        shifts = np.arange(0, 8, bits, dtype=np.uint8)
        out = (packed[..., None] >> shifts) & np.uint8((1 << bits) - 1)
        return np.asarray(out.reshape(-1)[: box.volume].reshape(box.shape))

    return _by_blocks(tensor, "uint8", values)


def _quantized(value: TensorSubclass) -> Parts | None:
    """torch's quantized tensors: (q - zero_point) · scale, in float32."""
    if value.base is None:
        return None
    attributes = value.attributes()
    q = _unpacked(value.base) if value.base.dtype.name in PACKED else value.base
    scale, zero_point = (_numbers(attributes[key]) for key in ("scale", "zero_point"))
    return {"": Tensor(DTYPES["float32"], q.shape, op=Dequantize(q, scale, zero_point, attributes["axis"],
                                                                  DTYPES["float32"]))}


def _numbers(value: object) -> Tensor:
    """A scale or zero point as a tensor; torch's kernels take the scale of a whole tensor in float32."""
    if isinstance(value, Tensor):
        return value
    return from_array(np.asarray(value, np.float32 if isinstance(value, float) else None))


def _sparse(value: TensorSubclass) -> Parts:
    attributes = value.attributes()
    layout = attributes["layout"].removeprefix("torch.")
    keys = ("indices", "values") if layout == "sparse_coo" else ("compressed_indices", "plain_indices", "values")
    parts = tuple(attributes[key] for key in keys)
    return {"": Tensor(parts[-1].dtype, value.shape, op=Densify(layout, parts, value.shape))}


def _nested(value: TensorSubclass) -> Parts:
    """A nested tensor of the strided layout: its parts, each with its own shape, as `/0`, `/1` …"""
    attributes = value.attributes()
    buffer: Tensor = attributes["buffer"]
    sizes, strides, offsets = (attributes[key].numpy().tolist() for key in ("sizes", "strides", "offsets"))
    parts = {}
    for i, (size, stride, offset) in enumerate(zip(sizes, strides, offsets, strict=True)):
        parts[f"/{i}"] = _strided(buffer, offset, tuple(size), tuple(stride))
    return parts


def _jagged(value: TensorSubclass) -> Parts | None:
    """A nested tensor of the jagged layout, told by its two parts: all values in a row, and where each item begins."""
    attributes = value.attributes()
    parts = {"/values": attributes.get("_values"), "/offsets": attributes.get("_offsets")}
    return {suffix: part for suffix, part in parts.items() if isinstance(part, Tensor)} or None


def _strided(buffer: Tensor, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    """A view of a one-dimensional buffer, bounds checked when it is made."""
    extent = 0 if 0 in shape else sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1
    if min((offset, *shape, *strides)) < 0 or offset + extent > buffer.size or len(buffer.shape) != 1:
        raise UsageError(f"a part of a nested tensor lies outside of its buffer of {buffer.size:,} elements")

    def read(box: Box) -> Array:
        if box.volume == 0:
            return np.empty(box.shape, buffer.dtype.numpy_dtype())
        first = offset + sum(a * s for a, s in zip(box.start, strides, strict=True))
        span = sum((n - 1) * s for n, s in zip(box.shape, strides, strict=True)) + 1
        flat = read_box(buffer, Box((first,), (first + span,)))
        steps = tuple(s * flat.itemsize for s in strides)
        return np.ascontiguousarray(np.lib.stride_tricks.as_strided(flat, box.shape, steps))

    n_bytes = buffer.dtype.nbytes(extent)
    return from_source(buffer.dtype, shape, Foreign(read, n_bytes, scratch=n_bytes))


def _scaled(value: TensorSubclass) -> Parts | None:
    """torchao's Int8Tensor and Float8Tensor: (qdata - zero_point) · scale; one scale for all or one of 1 or n an axis.

    None where the parts have another form.
    """
    attributes = value.attributes()
    q, scale, zero_point = (attributes.get(key) for key in ("qdata", "scale", "zero_point"))
    if not isinstance(q, Tensor) or not isinstance(scale, Tensor) or q.shape != value.shape:
        return None
    if zero_point is not None and (not isinstance(zero_point, Tensor) or zero_point.shape != scale.shape):
        return None
    by_axis = scale.ndim == q.ndim and all(n in (1, m) for n, m in zip(scale.shape, q.shape, strict=True))
    if scale.size == 1:
        scale = reshape(scale, ())
        zero_point = None if zero_point is None else reshape(zero_point, ())
    elif not by_axis:
        return None
    dtype = value.dtype if value.dtype is not None and value.dtype.is_floating else DTYPES["float32"]
    if scale.dtype.name in ("bfloat16", "float16"):
        scale = cast(scale, DTYPES["float32"])
    return {"": Tensor(dtype, q.shape, op=Dequantize(q, scale, zero_point, 0 if scale.ndim else None, dtype))}


Meaning = Callable[[TensorSubclass], "Parts | None"]

MEANINGS: Mapping[str, Meaning] = {
    "torch._utils._rebuild_qtensor": _quantized,
    "torch._utils._rebuild_sparse_tensor": _sparse,
    "torch._utils._rebuild_nested_tensor": _nested,
}
# torchao moves its classes from module to module, so they are known by name (torchao 0.18).
BY_CLASS: Mapping[str, Meaning] = {"Int8Tensor": _scaled, "Float8Tensor": _scaled, "NestedTensor": _jagged}
