"""What lies behind the tensors of a file: ties, bytes that no tensor shows, devices, and who can load it."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from anyckpt.core.box import c_strides
from anyckpt.core.inert import NumpyArray, TensorSubclass, walk
from anyckpt.core.source import Span
from anyckpt.core.tensor import Tensor
from anyckpt.pickle.result import Import
from anyckpt.pickle.storage import Storage
from anyckpt.pickle.weights_only import SINCE_TORCH


def ties(weights: Mapping[str, Tensor]) -> dict[str, str]:
    """Tied name -> the first name of the same elements of the same storage, seen the same way."""
    first: dict[Any, str] = {}
    tied: dict[str, str] = {}
    for name, tensor in weights.items():
        key = identity(tensor)
        if key is not None and first.setdefault(key, name) != name:
            tied[name] = first[key]
    return tied


def identity(tensor: Tensor) -> Any:
    """What makes two tensors one: where they lie and how they are seen; None for what shares nothing."""
    if tensor.op is not None:
        inner = [identity(t) for t in tensor.op.inputs]
        return (type(tensor.op).__name__, *inner) if len(inner) == 1 and inner[0] is not None else None
    if len(tensor.pieces) != 1 or not tensor.size or not isinstance(tensor.pieces[0].source, Span):
        return None
    piece, span = tensor.pieces[0], tensor.pieces[0].source
    assert isinstance(span, Span)
    strides = piece.strides or c_strides(tensor.shape)
    return id(span.file), span.offset, span.length, tensor.dtype.name, tensor.shape, strides


def dead_bytes(root: Any, storages: Iterable[Storage]) -> tuple[int, int]:
    """How many bytes of stored storages no tensor in `root` shows, and in how many storages.

    torch.save writes the whole storage behind a view. A strided view counts as showing all that lies between its first
    and last element, so the number is never too high.
    """
    spans: list[tuple[int, int]] = []
    stored = [s.source for s in storages if isinstance(s.source, Span) and s.source.length]
    for span in sorted(stored, key=lambda s: (s.offset, -s.length)):
        if not spans or span.offset >= sum(spans[-1]):  # a view of the storage before it counts as that one
            spans.append((span.offset, span.length))
    starts = [start for start, _ in spans]
    shown: dict[int, list[tuple[int, int]]] = {}
    for _, value in walk(root):
        sources = [value.source] if isinstance(value, Storage) else [p.source for t in _stored(value) for p in t.pieces]
        for source in sources:
            if isinstance(source, Span) and starts:
                at = bisect_right(starts, source.offset) - 1
                shown.setdefault(at, []).append((source.offset, source.offset + source.length))
    n_bytes = n_storages = 0
    for i, (start, length) in enumerate(spans):
        covered, end = 0, start
        for a, b in sorted(shown.get(i, ())):
            covered += max(0, b - max(a, end))
            end = max(end, b)
        if covered < length:
            n_bytes += length - covered
            n_storages += 1
    return n_bytes, n_storages


def _stored(value: Any) -> list[Tensor]:
    """The tensors with pieces of their own that a value is made of."""
    if isinstance(value, NumpyArray | TensorSubclass):
        value = value.tensor if isinstance(value, NumpyArray) else value.base
    if not isinstance(value, Tensor):
        return []
    return [value] if value.op is None else [t for each in value.op.inputs for t in _stored(each)]


def devices(storages: Iterable[Storage]) -> dict[str, int]:
    """Device that tensors were saved from -> number of storages."""
    return dict(Counter(s.location for s in storages).most_common())


def torch_min(since: str, why: str, tensors: Iterable[Tensor], imports: Iterable[Import]) -> tuple[str, str]:
    """The oldest torch release that can load a file, and what asks for it.

    `since` and `why` are those of the container; element types and rebuild functions may ask for more.
    """
    reasons = [(since, why)]
    for dtype in {t.dtype for t in tensors}:
        if dtype.since_torch:
            reasons.append((dtype.since_torch, f"tensors of type {dtype.name}"))
    for name in sorted({i.path for i in imports} & SINCE_TORCH.keys()):
        reasons.append((SINCE_TORCH[name], f"tensors saved through {name.rpartition('.')[2]}"))
    return max(reasons, key=lambda reason: tuple(int(n) for n in reason[0].split(".")))


def weights_only_obstacles(imports: Iterable[Import], protocols: Iterable[int]) -> tuple[str, ...] | None:
    """What `torch.load(weights_only=True)` stops at: globals by name, a pickle protocol; None where nothing does."""
    found = list(dict.fromkeys(i.path for i in imports if not i.weights_only))
    # torch/_weights_only_unpickler.py knows no FRAME, MEMOIZE or STACK_GLOBAL.
    found += [f"pickle protocol {p}" for p in sorted(set(protocols)) if p >= 4]
    return tuple(found) or None
