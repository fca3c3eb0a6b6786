"""Boxes: axis-aligned regions of a tensor, and the arithmetic that sharding and planning are made of. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Box:
    """The elements with start <= index < stop on every axis. A box of no axes holds the one element of a scalar."""

    start: Shape
    stop: Shape

    @property
    def shape(self) -> Shape:
        """Elements along each axis."""
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    @property
    def volume(self) -> int:
        """How many elements it holds."""
        return prod(self.shape)

    def shifted(self, origin: Shape, sign: int = 1) -> Box:
        """The box moved by `origin` (by its negative with sign=-1)."""
        return Box(
            tuple(a + sign * o for a, o in zip(self.start, origin, strict=True)),
            tuple(b + sign * o for b, o in zip(self.stop, origin, strict=True)),
        )

    def slices(self) -> tuple[slice, ...]:
        """The box as numpy indexing."""
        return tuple(slice(a, b) for a, b in zip(self.start, self.stop, strict=True))


def whole(shape: Shape) -> Box:
    """The box of a whole tensor."""
    return Box((0,) * len(shape), shape)


def intersect(a: Box, b: Box) -> Box | None:
    """The common part, None where it is empty."""
    start = tuple(map(max, a.start, b.start))
    stop = tuple(map(min, a.stop, b.stop))
    if any(p >= q for p, q in zip(start, stop, strict=True)):
        return None
    return Box(start, stop)


def contains(outer: Box, inner: Box) -> bool:
    """Whether every element of `inner` lies in `outer`."""
    return all(
        o <= i and j <= p for o, p, i, j in zip(outer.start, outer.stop, inner.start, inner.stop, strict=True)
    )


def c_strides(shape: Shape) -> Shape:
    """Element strides of a tensor in C order."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * max(shape[axis + 1], 1)
    return tuple(strides)


def run_length(box: Box, shape: Shape) -> int:
    """How many elements of `box` follow each other in a tensor of `shape` in C order before the first gap."""
    run = 1
    for axis in range(len(shape) - 1, -1, -1):
        n = box.stop[axis] - box.start[axis]
        run *= n
        if n != shape[axis]:
            break
    return run


def flat_start(box: Box, shape: Shape) -> int:
    """The C-order index of the first element of `box`."""
    return sum(a * s for a, s in zip(box.start, c_strides(shape), strict=True))


def runs(box: Box, shape: Shape) -> Iterator[tuple[int, int]]:
    """Yield (flat start, length) of the contiguous runs of `box`, in C order."""
    if box.volume == 0:
        return
    length = run_length(box, shape)
    axis = len(shape)
    remaining = length
    while axis > 0 and remaining > 1:
        axis -= 1
        remaining //= box.stop[axis] - box.start[axis]
    # Axes before `axis` are walked; from `axis` on, the box is one run.
    strides = c_strides(shape)
    base = flat_start(box, shape)
    outer = [box.stop[i] - box.start[i] for i in range(axis)]
    index = [0] * axis
    while True:
        yield base + sum(i * s for i, s in zip(index, strides, strict=False)), length
        for i in range(axis - 1, -1, -1):
            index[i] += 1
            if index[i] < outer[i]:
                break
            index[i] = 0
        else:
            return


def boxes_of_range(shape: Shape, start: int, stop: int) -> list[Box]:
    """Cut the C-order range [start, stop) of a tensor into boxes, in order; at most 2·ndim - 1 of them."""
    if start >= stop:
        return []
    if not shape:
        return [Box((), ())]
    inner = prod(shape[1:])
    if len(shape) == 1:
        return [Box((start,), (stop,))]
    first, head = divmod(start, inner)
    last, tail = divmod(stop, inner)

    def within(row: int, a: int, b: int) -> list[Box]:
        return [Box((row, *c.start), (row + 1, *c.stop)) for c in boxes_of_range(shape[1:], a, b)]

    if first == last:
        return within(first, head, tail)
    out: list[Box] = []
    if head:
        out += within(first, head, inner)
        first += 1
    if first < last:
        out.append(Box((first, *([0] * (len(shape) - 1))), (last, *shape[1:])))
    if tail:
        out += within(last, 0, tail)
    return out


def slabs(shape: Shape, max_elements: int) -> Iterator[Box]:
    """Cut a tensor into boxes of at most `max_elements` (at least 1), each contiguous in C order, in order."""
    n = prod(shape)
    if n == 0:
        return
    if n <= max_elements or not shape:
        yield whole(shape)
        return
    axis, inner = 0, n // shape[0]
    while inner > max_elements:
        axis += 1
        inner //= shape[axis]
    step = max(1, max_elements // inner)
    zeros, tail = (0,) * (len(shape) - axis - 1), shape[axis + 1 :]
    for flat in range(prod(shape[:axis])):
        lead: list[int] = []
        for size in reversed(shape[:axis]):
            flat, i = divmod(flat, size)
            lead.insert(0, i)
        for a in range(0, shape[axis], step):
            b = min(a + step, shape[axis])
            yield Box((*lead, a, *zeros), (*(i + 1 for i in lead), b, *tail))


@dataclass(frozen=True, slots=True)
class Cover:
    """How boxes cover a tensor: elements that none holds, the first pair that overlaps, the first one outside."""

    missing: int
    overlap: tuple[int, int] | None
    outside: int | None

    @property
    def exact(self) -> bool:
        """Whether every element is held exactly once."""
        return not self.missing and self.overlap is None and self.outside is None


def cover(boxes: Sequence[Box], shape: Shape) -> Cover:
    """Check that `boxes` tile a tensor exactly. Near-linear for the layouts sharding makes.

    Returns indices into `boxes`. `missing` is exact where no two boxes overlap, otherwise a lower bound of 0.
    """
    all_of_it = whole(shape)
    outside = next((i for i, b in enumerate(boxes) if not contains(all_of_it, b)), None)
    held = [i for i, b in enumerate(boxes) if b.volume]
    overlap = _first_overlap(boxes, held, 0, len(shape)) if len(held) > 1 else None
    missing = max(0, prod(shape) - sum(boxes[i].volume for i in held)) if overlap is None else 0
    return Cover(missing, overlap, outside)


def _first_overlap(boxes: Sequence[Box], held: list[int], axis: int, ndim: int) -> tuple[int, int] | None:
    """Sweep one axis: boxes with equal intervals recurse on the next one, only real partial overlaps are paired."""
    if axis == ndim:
        return (held[0], held[1]) if len(held) > 1 else None
    groups: dict[tuple[int, int], list[int]] = {}
    for i in held:
        groups.setdefault((boxes[i].start[axis], boxes[i].stop[axis]), []).append(i)
    ordered = sorted(groups)
    disjoint = all(ordered[k][1] <= ordered[k + 1][0] for k in range(len(ordered) - 1))
    if disjoint:
        for members in groups.values():
            if len(members) > 1 and (found := _first_overlap(boxes, members, axis + 1, ndim)):
                return found
        return None
    open_: list[int] = []
    for i in sorted(held, key=lambda i: boxes[i].start[axis]):
        open_ = [j for j in open_ if boxes[j].stop[axis] > boxes[i].start[axis]]
        for j in open_:
            if intersect(boxes[i], boxes[j]):
                return (j, i)
        open_.append(i)
    return None
