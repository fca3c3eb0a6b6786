"""Where each parameter lies in the flat buffers of Megatron's distributed optimizer. Pure arithmetic.

A buffer holds the parameters of one kind in reverse order of registration, each starting at a multiple of 64 elements,
cut into buckets; a bucket ends where it is large enough, and around a tied embedding, which has one to itself:

    | p9 .. p8 .. p7 ....| p6 .. p5 .....| tied ....|        .. up to a multiple of 64     .... padding of the bucket

In memory a bucket's end is padded to a multiple of lcm(DP, 128); files leave that padding out, and keep the gaps within
a bucket. Facts: megatron/core/distributed/param_and_grad_buffer.py (core 0.8 to 0.16) and files of 0.16.1.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import lcm

PARAMETER_ALIGNMENT = 64
BUCKET_ALIGNMENT = 128
BUSBW_ALIGNMENT = 1 << 16
"""What buckets are padded to besides with `pad_buckets_for_high_nccl_busbw`."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """One bucket: where it starts in memory and in the file, its elements without padding, its parameters.

    `offsets[name]`: the parameter's first element, counted from the bucket's start.
    """

    memory_start: int
    file_start: int
    n_elements: int
    offsets: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Buffer:
    """The layout of one buffer. `n_elements` is what a file holds of it, `n_padded` its size in memory."""

    buckets: tuple[Bucket, ...]
    n_padded: int

    @property
    def n_elements(self) -> int:
        """Elements of all buckets without their padding: `numel_unpadded`."""
        return sum(bucket.n_elements for bucket in self.buckets)

    def file_offsets(self) -> dict[str, int]:
        """Parameter -> its first element in the file's flat tensor."""
        return {name: b.file_start + at for b in self.buckets for name, at in b.offsets.items()}

    def memory_offsets(self) -> dict[str, int]:
        """Parameter -> its first element in the padded buffer."""
        return {name: b.memory_start + at for b in self.buckets for name, at in b.offsets.items()}


def lay_out(
    parameters: Sequence[tuple[str, int]],
    *,
    dp: int,
    bucket_size: int | None = None,
    own_bucket: Collection[str] = (),
    high_busbw: bool = False,
) -> Buffer:
    """Lay out parameters, given as (name, elements) in the order of the model.

    `bucket_size`: elements after which a bucket ends, None for one bucket. `own_bucket`: tied embeddings.

    >>> lay_out([("a", 100), ("b", 10)], dp=2).file_offsets()
    {'b': 0, 'a': 64}
    """
    unit = lcm(dp, BUCKET_ALIGNMENT, BUSBW_ALIGNMENT) if high_busbw else lcm(dp, BUCKET_ALIGNMENT)
    buckets: list[Bucket] = []
    offsets: dict[str, int] = {}
    position = start = file_start = 0

    def close(end: int) -> int:
        nonlocal offsets, start, file_start
        buckets.append(Bucket(start, file_start, end - start, offsets))
        file_start += end - start
        offsets, start = {}, _up(end, unit)
        return start

    for name, size in reversed(parameters):
        position = _up(position, PARAMETER_ALIGNMENT)
        if name in own_bucket and offsets:
            position = close(position)
        offsets[name] = position - start
        position += size
        if name in own_bucket or (bucket_size is not None and position - start >= bucket_size):
            position = close(position)
    if offsets:
        close(position)
    return Buffer(tuple(buckets), start)


def _up(n: int, unit: int) -> int:
    return -(-n // unit) * unit


def bucket_sizes(args: Mapping[str, object], n_elements: int, dp: int, *, first_chunk: bool) -> Iterator[int | None]:
    """Bucket sizes that a run may have had, the likeliest first. `first_chunk`: of the first stage and virtual chunk.

    Megatron cuts buckets only with `overlap_grad_reduce`, and only where gradients are final early (PP rank 0).
    """
    sizes: list[int | None] = [None]
    chosen, n_buckets = args.get("ddp_bucket_size"), args.get("ddp_num_buckets")
    if isinstance(chosen, int):
        sizes.append(chosen)
    if isinstance(n_buckets, int) and n_buckets > 0:
        sizes.append(n_elements // n_buckets)
    sizes.append(max(40_000_000, 1_000_000 * dp))
    if args.get("overlap_grad_reduce") and first_chunk:
        sizes = [*sizes[1:], None]
    yield from dict.fromkeys(sizes)
