"""Sharded tensors that a rank pickled: what part of which tensor it holds, from the pickle alone.

    DTensor        state (None, {"_local_tensor", "_spec": DTensorSpec {mesh, placements, tensor_meta, shard_order}})
                   DeviceMesh: _layout, _rank_map, _coordinate_on_dim, _rank since 2.9; before that a tensor `mesh`,
                   and only the file's name tells whose it is
    ShardedTensor  state ([Shard {tensor, metadata {shard_offsets, shard_sizes}}], ShardedTensorMetadata
                   {shards_metadata, size}, ProcessGroupState, spec, …); a rank without a part has an empty list

Read from torch 2.1 to 2.13.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from anyckpt.core.box import Box, Shape, c_strides, whole
from anyckpt.core.inert import Opaque, TensorSubclass
from anyckpt.core.source import Span
from anyckpt.core.tensor import Piece, Tensor
from anyckpt.finding import fail
from anyckpt.sharding.grid import Split, coordinate_of, local_boxes


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """What one rank holds of a tensor of `shape`: (box of the tensor, box of the local one, the local one).

    `n_ranks` is the size of the mesh or group.
    """

    shape: Shape
    held: tuple[tuple[Box, Box, Tensor], ...]
    n_ranks: int


def is_sharded(value: Any) -> bool:
    """Whether a value is a DTensor or ShardedTensor."""
    return isinstance(value, TensorSubclass) and value.cls.name in ("DTensor", "ShardedTensor")


def part_of(value: TensorSubclass, rank: int) -> Part:
    """What `rank` holds. Raises CheckpointError where the object does not say it, or says what can't be."""
    return _of_dtensor(value, rank) if value.cls.name == "DTensor" else _of_sharded_tensor(value)


def pieces_of(part: Part) -> Iterator[tuple[Box, Piece]]:
    """The part as pieces of the whole tensor, by box."""
    for box, inner, local in part.held:
        yield box, _piece(local, inner, box)


def _piece(local: Tensor, inner: Box, box: Box) -> Piece:
    """The region `inner` of a stored tensor as the piece `box` of another."""
    if local.op is not None or len(local.pieces) != 1 or local.pieces[0].box is not None:
        raise fail("unsupported", "a shard is conjugated, negated or put together of parts")
    piece = local.pieces[0]
    if inner == whole(local.shape):
        return Piece(piece.source, box, piece.strides)
    strides = piece.strides or c_strides(local.shape)
    source = piece.source
    if not isinstance(source, Span):
        raise fail("unsupported", "a shard that is held in several runs does not lie in its file as it is")
    skip = sum(a * s for a, s in zip(inner.start, strides, strict=True)) * local.dtype.itemsize
    return Piece(Span(source.file, source.offset + skip, source.length - skip, source.swap), box, strides)


# -- DTensor ---------------------------------------------------------------------------------------------------------


def _of_dtensor(value: TensorSubclass, rank: int) -> Part:
    attributes = value.attributes()
    local, spec = _plain(attributes.get("_local_tensor")), attributes.get("_spec")
    if local is None or not isinstance(spec, Opaque):
        raise fail("malformed-pickle", "a DTensor has no local tensor or no spec")
    described = spec.attributes()
    mesh_shape, coordinate = mesh_of(described.get("mesh"), rank)
    placements = described.get("placements")
    if not isinstance(placements, tuple | list) or len(placements) != len(mesh_shape):
        raise fail("malformed-pickle", "a DTensor has another number of placements than its mesh has axes")
    shape = _shape_of(described.get("tensor_meta"), value)
    splits = _splits(placements, mesh_shape, coordinate, len(shape))
    pairs = local_boxes(shape, _ordered(splits, described.get("shard_order")))
    if sum(b.volume for b, _ in pairs) != local.size:
        raise fail(
            "inconsistent", f"a DTensor of shape {list(shape)} has {local.size:,} elements on rank {rank}, not "
            f"{sum(b.volume for b, _ in pairs):,}",
        )
    return Part(shape, tuple((box, inner, local) for box, inner in pairs if box.volume), prod(mesh_shape))


def mesh_of(mesh: Any, rank: int) -> tuple[Shape, Shape]:
    """A DeviceMesh's sizes, and where `rank` stands in it."""
    saved = mesh.attributes() if isinstance(mesh, Opaque) else {}
    sizes = _mesh_sizes(saved)
    if sizes is None:
        raise fail("malformed-pickle", "a DTensor's mesh has no shape that is known here")
    coordinate = saved.get("_coordinate_on_dim")
    if isinstance(coordinate, list | tuple) and len(coordinate) == len(sizes):
        found: Shape | None = tuple(int(i) for i in coordinate)
    else:
        own = saved.get("_rank")
        table = saved.get("mesh") if isinstance(saved.get("mesh"), Tensor) else saved.get("_rank_map")
        known = isinstance(table, Tensor) and table.size < 1 << 20
        ranks = [int(r) for r in table.numpy().reshape(-1)] if known and isinstance(table, Tensor) else []
        found = coordinate_of(own if isinstance(own, int) else rank, sizes, ranks)
    if found is None or any(not 0 <= i < n for i, n in zip(found, sizes, strict=True)):
        raise fail("inconsistent", f"rank {rank} is not in the mesh of its own tensor")
    return sizes, found


def _mesh_sizes(saved: dict[str, Any]) -> Shape | None:
    table = saved.get("mesh")
    if isinstance(table, Tensor):
        return table.shape
    layout = saved.get("_layout")
    axes = layout.attributes().get("axes") if isinstance(layout, Opaque) else None
    if axes is None and isinstance(layout, Opaque):  # torch 2.9 to 2.12: one layout with shapes nested or flat
        shape = layout.attributes().get("shape")
        shape = layout.args[0] if shape is None and layout.args else shape
        axes = [shape] if isinstance(shape, int) else shape
    if not isinstance(axes, tuple | list):
        return None
    sizes = []
    for axis in axes:
        shape = axis.attributes().get("shape") if isinstance(axis, Opaque) else axis
        sizes.append(prod(_flat_ints(shape)))
    return tuple(sizes)


def _flat_ints(value: Any) -> list[int]:
    if isinstance(value, int):
        return [value]
    return [n for part in value for n in _flat_ints(part)] if isinstance(value, tuple | list) else [-1]


def _shape_of(meta: Any, value: TensorSubclass) -> Shape:
    size = meta.args[0] if isinstance(meta, Opaque) and meta.args else value.shape
    return tuple(size) if isinstance(size, tuple | list) and all(isinstance(n, int) for n in size) else value.shape


def _splits(placements: Sequence[Any], mesh_shape: Shape, coordinate: Shape, n_axes: int) -> list[tuple[int, Split]]:
    """The sharding mesh axes, left to right, each with its number."""
    splits = []
    for i, placement in enumerate(placements):
        name = placement.cls.name if isinstance(placement, Opaque) else ""
        if name in ("Replicate", "_Replicate"):
            continue
        if name not in ("Shard", "_StridedShard"):
            raise fail("unsupported", f"a DTensor is placed as {name or placement!r:.40}: its values are not final")
        saved = {**(placement.kwargs or {}), **placement.attributes()}
        axis = saved.get("dim", placement.args[0] if placement.args else None)
        factor = saved.get("split_factor", placement.args[1] if len(placement.args) > 1 else 1)
        if not isinstance(axis, int) or not -n_axes <= axis < n_axes or not isinstance(factor, int) or factor < 1:
            raise fail("malformed-pickle", f"a DTensor of {n_axes} axes is sharded along axis {axis!r:.20}")
        splits.append((i, Split(axis % n_axes, mesh_shape[i], coordinate[i], factor)))
    return splits


def _ordered(splits: list[tuple[int, Split]], shard_order: Any) -> list[Split]:
    """Splits in the order in which they were cut: strided ones say it themselves, else `shard_order` does."""
    if any(split.factor > 1 for _, split in splits) or not isinstance(shard_order, tuple | list):
        return [split for _, split in splits]
    place: dict[int, int] = {}
    for entry in shard_order:
        mesh_axes = entry.args[1] if isinstance(entry, Opaque) and len(entry.args) > 1 else ()
        if isinstance(mesh_axes, tuple | list):
            place.update({axis: i for i, axis in enumerate(mesh_axes) if isinstance(axis, int)})
    return [split for _, split in sorted(splits, key=lambda one: place.get(one[0], one[0]))]


# -- ShardedTensor ---------------------------------------------------------------------------------------------------


def _of_sharded_tensor(value: TensorSubclass) -> Part:
    state = value.state
    if not isinstance(state, tuple) or len(state) < 2 or not isinstance(state[0], list | tuple):
        raise fail("malformed-pickle", "a ShardedTensor has no list of shards")
    metadata = state[1].attributes() if isinstance(state[1], Opaque) else {}
    size = metadata.get("size")
    shape = tuple(size) if isinstance(size, tuple | list) else value.shape
    held = []
    for shard in state[0]:
        saved = shard.attributes() if isinstance(shard, Opaque) else {}
        local, where = _plain(saved.get("tensor")), saved.get("metadata")
        described = where.attributes() if isinstance(where, Opaque) else {}
        offsets, sizes = described.get("shard_offsets"), described.get("shard_sizes")
        if local is None or not isinstance(offsets, list | tuple) or not isinstance(sizes, list | tuple):
            raise fail("malformed-pickle", "a shard of a ShardedTensor does not say where it belongs")
        box = Box(tuple(offsets), tuple(a + n for a, n in zip(offsets, sizes, strict=True)))
        if len(box.start) != len(shape) or local.shape != box.shape or any(
            a < 0 or b > n for a, b, n in zip(box.start, box.stop, shape, strict=True)
        ):
            message = f"a shard {box.start}-{box.stop} leaves its tensor of shape {list(shape)}"
            raise fail("offset-out-of-bounds", message)
        if box.volume:
            held.append((box, whole(local.shape), local))
    group = state[2] if len(state) > 2 else None
    world = group.attributes().get("global_world_size") if isinstance(group, Opaque) else None
    n_ranks = world if isinstance(world, int) else len(metadata.get("shards_metadata") or ())
    return Part(shape, tuple(held), n_ranks)


def _plain(value: Any) -> Tensor | None:
    if isinstance(value, TensorSubclass):
        return value.base
    return value if isinstance(value, Tensor) else None
