"""Where a rank stands: meshes of every torch that pickled them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from anyckpt.core.dtypes import DTYPES
from anyckpt.core.inert import Global, Opaque, TensorSubclass
from anyckpt.core.source import Span
from anyckpt.core.tensor import from_array, from_source
from anyckpt.errors import CheckpointError
from anyckpt.formats.ranks.located import mesh_of, part_of, pieces_of
from anyckpt.io.view import MemoryFile

PLACEMENTS = "torch.distributed.tensor.placement_types"


def mesh(**state: Any) -> Opaque:
    return Opaque(Global("torch.distributed.device_mesh", "DeviceMesh"), state=state)


def layout(*axes: int) -> Opaque:
    parts = [Opaque(Global("torch.distributed._mesh_layout", "_FlatLayout"), state={"shape": (n,)}) for n in axes]
    return Opaque(Global("torch.distributed._mesh_layout", "_MeshLayout"), state={"axes": tuple(parts)})


RANKS = from_array(np.arange(6, dtype=np.int32))


@pytest.mark.parametrize(
    "saved",
    [
        mesh(mesh=from_array(np.arange(6, dtype=np.int32).reshape(2, 3))),
        mesh(_layout=layout(2, 3), _rank_map=RANKS),
        mesh(_layout=layout(2, 3), _rank_map=RANKS, _rank=4, _coordinate_on_dim=[1, 1]),
    ],
)
def test_a_mesh_of_any_torch_tells_the_place_of_a_rank(saved: Opaque) -> None:
    assert mesh_of(saved, 4) == ((2, 3), (1, 1))


def test_a_rank_outside_of_its_mesh_is_an_error() -> None:
    with pytest.raises(CheckpointError):
        mesh_of(mesh(_layout=layout(2), _rank_map=from_array(np.array([0, 1], np.int32))), 5)


def dtensor(local_shape: tuple[int, ...], shape: tuple[int, ...], coordinate: list[int], *placements: Opaque) -> Any:
    n_bytes = 4 * int(np.prod(local_shape))
    file = MemoryFile("m", np.arange(n_bytes // 4, dtype="<f4").tobytes())
    local = from_source(DTYPES["float32"], local_shape, Span(file, 0, n_bytes))
    saved = mesh(_layout=layout(*([2] * len(placements))), _coordinate_on_dim=coordinate)
    spec = {"mesh": saved, "placements": placements}
    described = Opaque(Global("torch.distributed.tensor._dtensor_spec", "DTensorSpec"), state=spec)
    state = (None, {"_local_tensor": local, "_spec": described})
    return TensorSubclass(Global("torch.distributed.tensor", "DTensor"), None, state, DTYPES["float32"], shape)


def placed(name: str, **state: Any) -> Opaque:
    return Opaque(Global(PLACEMENTS, name), state=state)


def test_replicas_hold_the_same_box() -> None:
    value = dtensor((2, 3), (4, 3), [1, 0], placed("Replicate"), placed("Shard", dim=0))
    ((box, _),) = pieces_of(part_of(value, 0))
    assert (box.start, box.stop) == ((0, 0), (2, 3))


def test_values_that_are_not_final_are_refused() -> None:
    with pytest.raises(CheckpointError, match="not final"):
        part_of(dtensor((4, 3), (4, 3), [0], placed("Partial", reduce_op="sum")), 0)


def test_a_local_tensor_of_another_size_is_an_error() -> None:
    with pytest.raises(CheckpointError, match="elements"):
        part_of(dtensor((3, 3), (4, 3), [0], placed("Shard", dim=0)), 0)


def test_an_uneven_strided_shard_is_placed_run_by_run() -> None:
    value = dtensor((3,), (9,), [0, 0], placed("_StridedShard", dim=0, split_factor=2), placed("Replicate"))
    # Over two parts of two: elements 0-2 and 5-6 would be rank 0's, five in all.
    with pytest.raises(CheckpointError, match="elements"):
        part_of(value, 0)
    value = dtensor((5,), (9,), [0, 0], placed("_StridedShard", dim=0, split_factor=2), placed("Replicate"))
    pieces = list(pieces_of(part_of(value, 0)))
    assert [(b.start, b.stop) for b, _ in pieces] == [((0,), (3,)), ((5,), (7,))]
    assert [p.source.offset for _, p in pieces] == [0, 12]  # type: ignore[union-attr]
