"""DCP folders: what `.metadata` says, chunks into tensors, items, the object again, and the folder that is written."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import anyckpt
from anyckpt.core import ops
from anyckpt.core.box import Box
from anyckpt.core.checkpoint import Checkpoint, Optimizer
from anyckpt.core.dtypes import DTYPES
from anyckpt.core.tensor import Tensor, from_array
from anyckpt.errors import CheckpointError
from anyckpt.finding import Report
from anyckpt.formats.dcp import metadata as reading
from anyckpt.formats.dcp.chunks import check_chunks
from anyckpt.formats.dcp.records import Chunks, Item
from anyckpt.formats.dcp.tree import optimizer, unflatten
from anyckpt.formats.dcp.write import leaves
from anyckpt.io.view import MemoryFile
from anyckpt.pickle import machine
from anyckpt.verbs.convert import convert


def read(data: bytes) -> reading.Metadata:
    report = Report()
    found = reading.read_metadata(MemoryFile(".metadata", data), report)
    assert not report.findings
    return found


@pytest.mark.parametrize("sharing", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_rows_read_at_once_are_what_the_opcodes_say(
    torch_metadata: Callable[..., bytes], monkeypatch: pytest.MonkeyPatch, seed: int, sharing: bool
) -> None:
    data = torch_metadata(24, 60, seed, sharing=sharing)
    monkeypatch.setattr(machine, "STAMP_BYTES", 0)
    quick = read(data)
    plain = {name: replace(row, stamp=None) for name, row in reading.ROWS.items()}
    monkeypatch.setattr(reading, "ROWS", plain)
    slow = read(data)
    assert list(quick.items.items()) == list(slow.items.items())
    assert (quick.paths, quick.bytes_items) == (slow.paths, slow.bytes_items)
    assert list(quick.tensors) == list(slow.tensors)
    for name, chunks in quick.tensors.items():
        other = slow.tensors[name]
        assert (chunks.dtype, chunks.shape) == (other.dtype, other.shape)
        assert chunks.shape == (18_000, 5_000_000_000)
        np.testing.assert_array_equal(chunks.starts, other.starts)
        np.testing.assert_array_equal(chunks.sizes, other.sizes)
    assert [(i.path, i.called) for i in quick.imports] == [(i.path, i.called) for i in slow.imports]
    assert quick.items["model.layer0.w", (300, 0)] == slow.items["model.layer0.w", (300, 0)]


def test_a_cut_metadata_is_told_as_cut(torch_metadata: Callable[..., bytes]) -> None:
    data = torch_metadata(3, 4, 0, sharing=False)
    with pytest.raises(CheckpointError) as caught:
        reading.read_metadata(MemoryFile(".metadata", data[: len(data) // 2]), Report())
    assert caught.value.finding.code == "truncated"


def chunks_of(shape: tuple[int, ...], *boxes: tuple[tuple[int, ...], tuple[int, ...]]) -> Chunks:
    starts, sizes = ([box[i] for box in boxes] for i in (0, 1))
    shape_of = (len(boxes), len(shape))
    arrays = [np.array(rows, np.int64).reshape(shape_of) for rows in (starts, sizes)]
    return Chunks(DTYPES["float32"], shape, *arrays)


@pytest.mark.parametrize(
    ("chunks", "code"),
    [
        (chunks_of((5, 4), ((0, 0), (3, 4)), ((3, 0), (2, 4))), None),
        (chunks_of((5, 4), ((3, 0), (2, 4)), ((0, 0), (3, 4)), ((5, 0), (0, 4))), None),
        (chunks_of((4, 4), ((0, 0), (2, 2)), ((0, 2), (2, 2)), ((2, 0), (2, 4))), None),
        (chunks_of((), ((), ())), None),
        (chunks_of((0, 3)), None),
        (chunks_of(()), "offset-hole"),
        (chunks_of((5, 4), ((0, 0), (3, 4))), "offset-hole"),
        (chunks_of((4, 4), ((0, 0), (2, 2)), ((2, 0), (2, 4))), "offset-hole"),
        (chunks_of((5, 4), ((0, 0), (3, 4)), ((2, 0), (3, 4))), "offset-overlap"),
        (chunks_of((), ((), ()), ((), ())), "offset-overlap"),
        (chunks_of((5, 4), ((0, 0), (6, 4))), "offset-out-of-bounds"),
        (chunks_of((5, 4), ((0, 0), (2**63 - 1, 4))), "offset-out-of-bounds"),
        (chunks_of((5, 4), ((-1, 0), (5, 4))), "negative-size"),
    ],
)
def test_chunks_must_cover_their_tensor_once(chunks: Chunks, code: str | None) -> None:
    report = Report()
    try:
        check_chunks("w", chunks, report)
    except CheckpointError as error:
        report.extend([error.finding])
    assert [f.code for f in report.findings] == ([code] if code else [])


def test_names_become_the_object_again_by_their_paths() -> None:
    values = {"model.a.b": 1, "optim.groups.0.lr": 2, "optim.groups.1.lr": 3, "step": 4}
    paths = {"model.a.b": ("model", "a.b"), "optim.groups.0.lr": ("optim", "groups", 0, "lr")}
    paths["optim.groups.1.lr"] = ("optim", "groups", 1, "lr")
    assert unflatten(values, paths, Report()) == {
        "model": {"a.b": 1}, "optim": {"groups": [{"lr": 2}, {"lr": 3}]}, "step": 4,
    }  # fmt: skip


def test_an_entry_in_the_place_of_another_is_kept_and_told() -> None:
    report = Report()
    found = unflatten({"x": 1, "x.y": 2}, {"x": ("x",), "x.y": ("x", "y")}, report)
    assert found == {"x": 1, "x.y": 2}
    assert [f.code for f in report.findings] == ["inconsistent"]


def test_a_flattened_optimizer_has_its_groups_again() -> None:
    flat = {"state.a.w.exp_avg": 1, "state.b.exp_avg": 2}
    flat |= {f"param_groups.{name}.lr": 0.1 if name != "c" else 0.2 for name in ("a.w", "b", "c")}
    assert optimizer(flat) == {
        "state": {"a.w": {"exp_avg": 1}, "b": {"exp_avg": 2}},
        "param_groups": [{"lr": 0.1, "params": ["a.w", "b"]}, {"lr": 0.2, "params": ["c"]}],
    }


def test_lists_become_one_item_unless_they_hold_a_tensor_or_a_dict() -> None:
    tensor = from_array(np.zeros(2, np.float32))
    root = {"a": [1, [2]], "b": [1, tensor], "c": [{"d": 3}], "e": (1, tensor), "f": {}}
    assert [path for path, _ in leaves(root)] == [("a",), ("b", 0), ("b", 1), ("c", 0, "d"), ("e",)]


# -- folders ---------------------------------------------------------------------------------------------------------


def training(rng: np.random.Generator) -> Checkpoint:
    def tensor(*shape: int) -> Tensor:
        return from_array(rng.standard_normal(shape).astype(np.float32))

    shapes = {"embed.weight": (13, 6), "norm.bias": (6,), "gain": (), "empty": (0, 4), "one": (1, 3)}
    weights = {name: tensor(*shape) for name, shape in shapes.items()}
    moments = {slot: {n: tensor(*s) for n, s in shapes.items()} for slot in ("exp_avg", "exp_avg_sq")}
    groups = ({"lr": 0.1, "betas": (0.9, 0.99), "params": list(shapes)},)
    return Checkpoint("memory", "m", weights, optimizer=Optimizer(moments, groups), step=7, state={"note": "kept"})


@pytest.mark.parametrize("world", [1, 2, 3, 16])
def test_what_is_written_for_any_world_reads_the_same(tmp_path: Path, world: int) -> None:
    source = training(np.random.default_rng(0))
    convert(source, tmp_path / "out", to="dcp", world=world, prove=True)
    written = anyckpt.open(tmp_path / "out")
    assert not [f for f in written.findings if f.severity == "error"]
    assert {n: t.tobytes() for n, t in written.weights.items()} == {n: t.tobytes() for n, t in source.weights.items()}
    assert written.optimizer is not None
    assert source.optimizer is not None
    for slot, tensors in source.optimizer.slots.items():
        assert {n: t.tobytes() for n, t in written.optimizer.slots[slot].items()} == {
            n: t.tobytes() for n, t in tensors.items()
        }
    assert written.optimizer.groups == source.optimizer.groups
    assert (written.step, written.state) == (7, {"note": "kept"})
    assert anyckpt.verify(tmp_path / "out", deep=True).ok


def test_masters_are_told_as_lost_or_written_in_place_of_the_weights(tmp_path: Path) -> None:
    source = training(np.random.default_rng(0))
    assert source.optimizer is not None
    rounded = {n: ops.cast(t, DTYPES["bfloat16"]) for n, t in source.weights.items()}
    optimizer_ = replace(source.optimizer, slots={**source.optimizer.slots, "master": source.weights})
    mixed = replace(source, weights=rounded, optimizer=optimizer_)
    done = convert(mixed, tmp_path / "compute", to="dcp", world=2)
    assert [f.code for f in done.findings if f.severity == "warning"] == ["lossy"]
    done = convert(mixed, tmp_path / "master", to="dcp", world=2, weights="master")
    assert not done.findings
    written = anyckpt.open(tmp_path / "master")
    assert {n: t.tobytes() for n, t in written.weights.items()} == {n: t.tobytes() for n, t in source.weights.items()}
    assert written.optimizer is not None
    assert set(written.optimizer.slots) == {"exp_avg", "exp_avg_sq"}


def test_parts_are_cut_as_torch_chunks_them(tmp_path: Path) -> None:
    convert(training(np.random.default_rng(0)), tmp_path / "out", to="dcp", world=4)
    boxes = [piece.box for piece in anyckpt.open(tmp_path / "out").weights["embed.weight"].pieces]
    assert boxes == [Box((a, 0), (min(a + 4, 13), 6)) for a in (0, 4, 8, 12)]


def test_heads_that_are_equal_are_parsed_once(tmp_path: Path) -> None:
    convert(training(np.random.default_rng(0)), tmp_path / "out", to="dcp", world=3)
    checkpoint = anyckpt.open(tmp_path / "out")
    tensors = [checkpoint.weights["norm.bias"], *(s["norm.bias"] for s in checkpoint.optimizer.slots.values())]  # type: ignore[union-attr]
    for tensor in tensors:
        assert tensor.numpy().shape == (6,)
    known = tensors[0].pieces[0].source.file.known.heads  # type: ignore[union-attr]
    assert sum(len(same) for same in known.values()) == 1


def test_items_of_another_save_are_refused_when_they_are_read(corpus: Path, tmp_path: Path) -> None:
    shutil.copytree(corpus / "torch/dcp_fsdp2_w2/ckpt", tmp_path / "ckpt")
    data = tmp_path / "ckpt" / "__0_0.distcp"
    raw = bytearray(data.read_bytes())
    at = raw.index(b"FloatStorage")
    raw[at : at + 12] = b"HalfStorage\n"
    data.write_bytes(raw)
    checkpoint = anyckpt.open(tmp_path / "ckpt")
    with pytest.raises(CheckpointError):
        [tensor.numpy() for tensor in checkpoint.weights.values()]
    assert not anyckpt.verify(tmp_path / "ckpt", deep=True).ok


@pytest.mark.parametrize("gone", ["__1_0.distcp", ".metadata"])
def test_a_file_that_is_gone_is_named(corpus: Path, tmp_path: Path, gone: str) -> None:
    shutil.copytree(corpus / "torch/dcp_fsdp2_w2/ckpt", tmp_path / "ckpt")
    (tmp_path / "ckpt" / gone).unlink()
    found = anyckpt.verify(tmp_path / "ckpt")
    assert not found.ok
    assert found.findings[0].code == ("missing-shard" if gone != ".metadata" else "incomplete")


def test_the_place_of_an_item_is_four_things() -> None:
    assert Item("a", 1, 2) == ("a", 1, 2, ())


def test_most_of_a_large_metadata_is_read_in_rows(
    torch_metadata: Callable[..., bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    from anyckpt.formats.dcp import stamps

    taken = {"chunks": 0, "entries": 0}
    for name, width in (("chunks", 1), ("entries", 2)):
        stamp = getattr(stamps, name)

        def counting(stream: Any, at: int, stack: Any, name: Any = name, stamp: Any = stamp, width: Any = width) -> Any:
            before = len(stack)
            end = stamp(stream, at, stack)
            taken[name] += (len(stack) - before) // width
            return end

        rows = {k: replace(r, stamp=counting) if r.stamp is stamp else r for k, r in reading.ROWS.items()}
        monkeypatch.setattr(reading, "ROWS", rows)
    monkeypatch.setattr(machine, "STAMP_BYTES", 0)
    read(torch_metadata(40, 50, 1, sharing=False))
    assert taken["chunks"] > 0.9 * 40 * 50
    assert taken["entries"] > 0.7 * 40 * 50
