"""Read tensors box by box, several at once, in bounded memory: what the verbs that look at values share."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from math import prod
from typing import TYPE_CHECKING, TypeVar, cast

import numpy as np

from anyckpt.core.box import Box, slabs, whole
from anyckpt.core.checkpoint import Checkpoint
from anyckpt.core.tensor import DEQUANTIZERS, Tensor
from anyckpt.errors import CheckpointError, UsageError
from anyckpt.finding import located
from anyckpt.verbs.tensors import optimizer_tensors, other_tensors

if TYPE_CHECKING:
    from anyckpt.core.tensor import Array

SLAB_BYTES = 4 << 20  # what a thread reads at once
BLOCK = 1 << 15  # elements of which arithmetic makes temporaries at once: they stay in the cache

T = TypeVar("T")
R = TypeVar("R")
Events = Callable[[int, int], None]
"""Called with (bytes done, bytes in all), from any thread but one call at a time."""


def default_jobs() -> int:
    """Threads that keep a disk busy without crowding the machine."""
    return min(4, os.cpu_count() or 1)


def has_values(tensor: Tensor) -> bool:
    """Whether its elements are numbers we know: False for raw, packed and torch-quantized types."""
    dtype = tensor.dtype
    return dtype.name in DEQUANTIZERS or (bool(dtype.numpy) and dtype.kind != "quantized" and dtype.block == 1)


def boxes_of(tensor: Tensor, n_bytes: int = SLAB_BYTES) -> Iterator[Box]:
    """Cut a tensor into boxes of about `n_bytes`, contiguous and in C order.

    Packed types are cut between blocks; where their rows are not whole blocks the tensor is one box.
    """
    dtype, shape = tensor.dtype, tensor.shape
    if dtype.block == 1:
        yield from slabs(shape, max(1, n_bytes // max(dtype.itemsize, 1)))
    elif not shape or shape[-1] % dtype.block:
        yield from slabs(shape, max(1, prod(shape)))
    else:
        n_blocks = (*shape[:-1], shape[-1] // dtype.block)
        for box in slabs(n_blocks, max(1, n_bytes // (4 * dtype.block))):
            yield Box(
                (*box.start[:-1], box.start[-1] * dtype.block), (*box.stop[:-1], box.stop[-1] * dtype.block)
            )


def each(
    function: Callable[[T, Callable[[int], None]], R],
    items: Collection[T],
    *,
    total_bytes: int,
    jobs: int | None = None,
    events: Events | None = None,
) -> list[R]:
    """`function(item, advance)` for every item on several threads, in order; `advance(n)` tells of n bytes done.

    An exception stops the rest after the running ones are done and is raised.
    """
    lock, done = threading.Lock(), 0
    results: list[R | None] = [None] * len(items)
    waiting: Iterator[tuple[int, T]] = enumerate(items)

    def advance(n_bytes: int) -> None:
        nonlocal done
        with lock:
            done += n_bytes
            if events is not None:
                events(done, total_bytes)

    def work() -> None:
        nonlocal waiting
        while True:
            with lock:
                numbered = next(waiting, None)
            if numbered is None:
                return
            try:
                results[numbered[0]] = function(numbered[1], advance)
            except BaseException:
                waiting = iter(())
                raise

    n_jobs = min(jobs or default_jobs(), max(1, len(items)))
    with ThreadPoolExecutor(n_jobs) as pool:
        workers = [pool.submit(work) for _ in range(n_jobs)]
    for worker in workers:
        worker.result()
    return cast("list[R]", results)


def read_values(tensor: Tensor, box: Box, name: str) -> Array:
    """The values of a box; a fault says which tensor it is in."""
    try:
        return tensor.numpy(box)
    except CheckpointError as error:
        raise located(error, f"tensor {name}") from error


def widened(values: Array) -> Array:
    """Values in the type that arithmetic on them is exact in: float64, complex128, or integers as they are."""
    if values.dtype.kind == "c":
        return values.astype(np.complex128)
    if values.dtype.kind in "iub":
        return values
    if values.dtype.itemsize < 4:  # ml_dtypes are far faster by way of float32
        values = values.astype(np.float32)
    return values.astype(np.float64)


def inner(a: Array, b: Array) -> float:
    """The real part of the inner product. Not through BLAS, whose own threads and ours would crowd each other out."""
    if a.dtype.kind == "c":
        return inner(a.real, b.real) + inner(a.imag, b.imag)
    return float(np.einsum("i,i->", a, b))


def blocks(flat: Array) -> Iterator[Array]:
    """Cut a flat array into pieces of BLOCK elements."""
    for i in range(0, flat.size, BLOCK):
        yield flat[i : i + BLOCK]


def refuse_damaged(checkpoint: Checkpoint) -> None:
    """Raise the first error finding: what is described may not be all that was saved.

    A hostile pickle is not among them: its tensors are read without running any of it.
    """
    for finding in checkpoint.findings:
        if finding.severity == "error" and finding.code != "dangerous-code":
            raise CheckpointError(finding)


def tensor_named(checkpoint: Checkpoint, name: str) -> tuple[str, Tensor]:
    """A tensor by its name among weights, `parameter/slot` and paths in the rest.

    Raises UsageError with the names most like it where there is none.
    """
    from difflib import get_close_matches

    names: Mapping[str, Tensor] = checkpoint.weights
    if name not in names:
        names = {**other_tensors(checkpoint), **optimizer_tensors(checkpoint), **checkpoint.weights}
    if name in names:
        return name, names[name]
    ending = [n for n in names if n.endswith(f".{name}")]
    if len(ending) == 1:
        return ending[0], names[ending[0]]
    near = ending[:3] or get_close_matches(name, list(names)[:20_000], 3, 0.5)
    hint = f"there is {', '.join(near)}" if near else f"there are {len(names):,} tensors"
    raise UsageError(f"no tensor is called {name!r}", hint=hint)


def whole_box(tensor: Tensor) -> Box:
    """All of a tensor."""
    return whole(tensor.shape)
