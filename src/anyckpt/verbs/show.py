"""The values of one tensor, or of a part of it, within a limit."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from types import EllipsisType
from typing import TYPE_CHECKING, Any

import numpy as np

from anyckpt.core.box import Box, Shape
from anyckpt.core.checkpoint import Checkpoint
from anyckpt.core.tensor import Tensor
from anyckpt.errors import UsageError
from anyckpt.verbs.open import open
from anyckpt.verbs.reading import has_values, read_values, tensor_named

if TYPE_CHECKING:
    from anyckpt.core.tensor import Array

Index = tuple[int | slice, ...]

LIMIT = 1000  # elements shown in full; of larger ones the corners
EDGE = 3  # elements at each end of an axis that a corner has
MAX_CORNER_AXES = 5  # of more axes the first ones are shown by their first element
_PART = re.compile(r"\s*(?:(\.\.\.)|(-?\d+)?\s*(?:(:)\s*(-?\d+)?\s*(?::\s*(-?\d+)?)?)?)\s*")


@dataclass(frozen=True, slots=True)
class Shown:
    """One tensor's part. `values`: nested lists of numbers, `…` (as text) where some are left out.

    `shape` is that of the part, `full_shape` of the tensor. `is_cut` says that values were left out. Types whose values
    are not known show their bytes as hexadecimal text.
    """

    path: str
    name: str
    index: str
    dtype: str
    full_shape: Shape
    shape: Shape
    values: Any
    text: str
    is_cut: bool

    def as_dict(self) -> dict[str, Any]:
        """The record as `--json` prints it."""
        return {
            "path": self.path, "name": self.name, "index": self.index, "dtype": self.dtype,
            "full_shape": list(self.full_shape), "shape": list(self.shape), "cut": self.is_cut, "values": self.values,
        }


def show(path: str | os.PathLike[str] | Checkpoint, tensor: str, *, limit: int = LIMIT) -> Shown:
    """Show `tensor`: a name, with an index in brackets if wanted (`"fc.weight[0:4, ::2]"`, `"x[..., -1]"`).

    Optimizer slots are `parameter/slot`. Reads no more than is shown. Raises UsageError for an unknown name or an index
    that does not fit.
    """
    checkpoint = path if isinstance(path, Checkpoint) else open(path)
    name, text = _split(tensor, checkpoint)
    name, found = tensor_named(checkpoint, name)
    if text and found.dtype.block > 1:
        raise UsageError(f"{found.dtype.name} values come in blocks and take no index", hint="show the tensor alone")
    part = found[expand(parse_index(text), found.ndim)] if text else found
    if not has_values(part):
        return _raw(checkpoint, name, text, found, part, limit)
    values, is_cut = _some(part, name, limit)
    return Shown(
        checkpoint.path, name, text, found.dtype.name, found.shape, part.shape, values, format_nested(values), is_cut
    )


def _split(text: str, checkpoint: Checkpoint) -> tuple[str, str]:
    """The name and what stands in the brackets; a name that itself ends in brackets wins."""
    if text in checkpoint.weights or not text.endswith("]"):
        return text, ""
    name, bracket, index = text[:-1].rpartition("[")
    return (name, index.strip() or ":") if bracket else (text, "")


def parse_index(text: str) -> list[int | slice | EllipsisType]:
    """Numbers, slices and one `...`, separated by commas. Raises UsageError for anything else.

    >>> parse_index("0:4, ::2, -1")
    [slice(0, 4, None), slice(None, None, 2), -1]
    """
    items: list[int | slice | EllipsisType] = []
    for word in text.split(","):
        match = _PART.fullmatch(word)
        if match is None or not word.strip():
            raise UsageError(f"{word.strip()!r} is no index", hint="write it as in numpy: name[0:4, ::2, -1]")
        dots, first, colon, stop, step = match.groups()
        if dots:
            items.append(...)
        elif colon:
            if step is not None and int(step) < 1:
                raise UsageError(f"{word.strip()!r}: a step is 1 or more")
            items.append(slice(*(None if n is None else int(n) for n in (first, stop, step))))
        else:
            items.append(int(first))
    if sum(item is ... for item in items) > 1:
        raise UsageError("an index has one '...' at most")
    return items


def expand(items: list[int | slice | EllipsisType], ndim: int) -> Index:
    """The index with `...` written out as full slices. Raises UsageError for more items than axes."""
    out: list[int | slice] = []
    for item in items:
        if isinstance(item, EllipsisType):
            out += [slice(None)] * (ndim - len(items) + 1)
        else:
            out.append(item)
    if len(out) > ndim:
        raise UsageError(f"{len(out)} indices for a tensor of {ndim} axes")
    return tuple(out)


def _some(part: Tensor, name: str, limit: int) -> tuple[Any, bool]:
    """All values as nested lists, or, beyond `limit`, those at both ends of every axis."""
    if part.size == 0:
        return np.empty(part.shape).tolist(), False
    if part.size <= limit:
        return _plain(read_values(part, Box((0,) * part.ndim, part.shape), name)), False
    ranges = [_ends(n, axis >= part.ndim - MAX_CORNER_AXES) for axis, n in enumerate(part.shape)]
    if part.dtype.block > 1:  # blocks are read whole: the first of them
        ranges = [[(0, 1)]] * (part.ndim - 1) + [[(0, min(part.dtype.block, part.shape[-1]))]]
    shape = [sum(b - a for a, b in ends) for ends in ranges]
    corner: Array | None = None
    for choice in product(*(list(_placed(ends)) for ends in ranges)):
        values = read_values(part, Box(tuple(a for a, _, _ in choice), tuple(b for _, b, _ in choice)), name)
        corner = np.empty(shape, values.dtype) if corner is None else corner
        corner[tuple(slice(at, at + b - a) for a, b, at in choice)] = values
    assert corner is not None  # a part with elements has at least one corner
    gaps = [ends[0][1] if len(ends) > 1 or ends[0][1] < n else None for ends, n in zip(ranges, part.shape, strict=True)]
    return _with_gaps(_plain(corner), gaps), True


def _ends(n: int, both: bool) -> list[tuple[int, int]]:
    """The index ranges of an axis of `n` that are shown."""
    if not both:
        return [(0, 1)]
    return [(0, n)] if n <= 2 * EDGE else [(0, EDGE), (n - EDGE, n)]


def _placed(ends: list[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    at = 0
    for a, b in ends:
        yield a, b, at
        at += b - a


def _with_gaps(values: Any, gaps: list[int | None]) -> Any:
    """Nested lists with `…` where an axis was cut."""
    if not gaps:
        return values
    rows = [_with_gaps(row, gaps[1:]) for row in values]
    return rows if gaps[0] is None else [*rows[: gaps[0]], "…", *rows[gaps[0] :]]


def _plain(values: Array) -> Any:
    """Nested lists of Python numbers, of the narrow types the shortest decimal that names them."""
    if values.dtype.kind in "iub":
        return values.tolist()
    if values.dtype.kind == "c":
        return np.vectorize(str, otypes=[object])(values).tolist() if values.size else values.tolist()
    if values.dtype == np.float64:
        return values.tolist()
    # float32 and narrower: through its own shortest text, so that 0.1 shows as 0.1 and not 0.10000000149
    shortest = np.vectorize(_shortest, otypes=[np.float64])(values.astype(np.float32)) if values.size else values
    return shortest.tolist()


def _shortest(value: Any) -> float:
    return float(str(np.float32(value)))


def format_nested(values: Any, *, indent: str = "") -> str:
    """Nested lists as aligned rows of text."""
    width = max((len(_number(v)) for v in _leaves(values)), default=1)
    return _format(values, indent, width)


def _leaves(values: Any) -> Iterator[Any]:
    if not isinstance(values, list):
        if values != "…":
            yield values
        return
    for value in values:
        yield from _leaves(value)


def _format(values: Any, indent: str, width: int) -> str:
    if not isinstance(values, list):
        return indent + _number(values)
    if not any(isinstance(v, list) for v in values):
        return indent + "[" + "  ".join(_number(v).rjust(width) if v != "…" else "…" for v in values) + "]"
    rows = [_format(v, indent + " ", width) for v in values]
    return f"{indent}[{rows[0].lstrip()}" + "".join(f"\n{row}" for row in rows[1:]) + "]"


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _raw(checkpoint: Checkpoint, name: str, text: str, found: Tensor, part: Tensor, limit: int) -> Shown:
    """Bytes of a type whose values are not known."""
    if part.nbytes > max(limit * 16, 1 << 20):
        raise UsageError(
            f"{part.dtype.name} values are packed and can't be shown in part", hint="take a smaller part of the tensor"
        )
    data = part.tobytes()
    shown = data[:limit].hex(" ") + (" …" if len(data) > limit else "")
    return Shown(
        checkpoint.path, name, text, found.dtype.name, found.shape, part.shape, shown, shown, len(data) > limit
    )
