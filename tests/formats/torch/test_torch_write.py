"""What we write is what torch.save would have written, and torch loads it."""

from __future__ import annotations

import io
import struct
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import array, fill, read_bytes, read_path, saved

from anyckpt.core.dtypes import DTYPES
from anyckpt.core.inert import Global, Mapping, Opaque
from anyckpt.core.source import Fill
from anyckpt.core.tensor import Tensor, filled, from_source
from anyckpt.errors import Refused, UsageError
from anyckpt.formats.table import WriteOptions
from anyckpt.formats.torch.ziplayout import Record, lay_out
from anyckpt.formats.torch.zipwrite import write

GIB4 = 1 << 32


def written(checkpoint: Any, **extra: Any) -> bytes:
    (layout,) = write(checkpoint, WriteOptions("out.pt", extra=extra))
    return fill(layout)


def test_members_begin_at_the_alignment_and_pass_every_zip_reader() -> None:
    data = saved(Mapping({"a": array(3, 5), "empty": array(0, 4), "b": array(7, dtype="int64")}))
    archive = zipfile.ZipFile(io.BytesIO(data))
    assert archive.testzip() is None
    assert [n.partition("/")[2] for n in archive.namelist()] == [
        "data.pkl", ".format_version", ".storage_alignment", "byteorder", "data/0", "data/1", "data/2", "version",
        ".data/serialization_id",
    ]
    for info in archive.infolist():
        n_name, n_extra = struct.unpack_from("<2H", data, info.header_offset + 26)
        assert (info.header_offset + 30 + n_name + n_extra) % 64 == 0


def test_what_was_written_reads_back_with_ties_and_module_versions() -> None:
    shared = array(4, 4)
    weights = Mapping({"embed": shared, "head": shared, "norm": array(4)})
    weights.attributes = {"_metadata": Mapping({"": {"version": 1}})}
    checkpoint, _ = read_bytes(saved(weights))
    again, report = read_bytes(written(checkpoint))
    assert again.aliases == {"head": "embed"}
    assert again.facts["metadata"][""] == {"version": 1}
    assert again.facts["storages"] == 2
    assert [f.code for f in report.findings] == ["tied"]
    (clone,) = write(checkpoint, WriteOptions("x.pt", tied="clone"))
    assert not read_bytes(fill(clone))[0].aliases
    (dropped,) = write(checkpoint, WriteOptions("x.pt", tied="drop"))
    assert list(read_bytes(fill(dropped))[0].weights) == ["embed", "norm"]


def test_views_are_written_without_the_rest_of_their_storage(corpus: Path) -> None:
    checkpoint, _ = read_path(corpus / "torch/zip_views/views.pt")
    again, report = read_bytes(written(checkpoint))
    assert again.facts["dead_bytes"] == 0
    assert not report.errors
    for name, tensor in checkpoint.weights.items():
        assert again.weights[name].tobytes() == tensor.tobytes()


def test_a_training_dict_goes_round(data: Path) -> None:
    checkpoint, _ = read_path(data / "trainer/checkpoint.pt")
    again, report = read_bytes(written(checkpoint, training=True))
    assert again.facts["weights_only"] is None
    assert (again.step, again.epoch) == (checkpoint.step, checkpoint.epoch)
    assert not report.errors
    assert checkpoint.optimizer is not None
    assert again.optimizer is not None
    assert not again.optimizer.names_inferred  # the names went along
    for slot, by_name in checkpoint.optimizer.slots.items():
        for name, tensor in by_name.items():
            assert again.optimizer.slots[slot][name].tobytes() == tensor.tobytes()
    assert [dict(g) for g in again.optimizer.groups] == [dict(g) for g in checkpoint.optimizer.groups]


def test_two_optimizers_in_a_list_stay_two() -> None:
    one = {"state": {0: {"exp_avg": array(2)}}, "param_groups": [{"lr": 1, "params": [0]}]}
    two = {"state": {0: {"exp_avg": array(3)}}, "param_groups": [{"lr": 2, "params": [0]}]}
    checkpoint, _ = read_bytes(saved({"state_dict": {"a": array(2), "b": array(3)}, "optimizer_states": [one, two]}))
    again, _ = read_bytes(written(checkpoint, training=True))
    first, second = again.facts["object"]["optimizer_states"]
    assert first["param_groups"][0]["lr"] == 1
    assert second["state"][0]["exp_avg"].shape == (3,)


def test_an_object_is_made_plain_and_the_changes_are_listed() -> None:
    config = Opaque(Global("my", "Config"), state={"depth": 3, "mode": Opaque(Global("my", "Mode"), ("train",))})
    checkpoint, _ = read_bytes(saved({"model": {"w": array(2)}, "epoch": 1}))
    hostile = {**checkpoint.facts["object"], "cfg": config, "fn": Global("my", "loss")}
    checkpoint = replace(checkpoint, facts={**checkpoint.facts, "object": hostile})
    replaced: list[dict[str, str]] = []
    again, report = read_bytes(written(checkpoint, object=True, replaced=replaced))
    assert report.verdict == "safe"
    assert again.facts["object"]["cfg"] == {"depth": 3, "mode": "train"}
    assert [entry["place"] for entry in replaced] == ["cfg", "cfg.mode", "fn"]


def test_without_an_object_there_is_nothing_to_make_plain() -> None:
    checkpoint, _ = read_bytes(saved({"w": array(2)}))
    with pytest.raises(UsageError, match="no single object"):
        written(replace(checkpoint, facts={}), object=True)


def test_a_type_that_torch_lacks_is_refused_by_name() -> None:
    checkpoint, _ = read_bytes(saved({"w": array(2)}))
    odd = filled(DTYPES["float6_e2m3fn"], (4,), b"\0\0\0")
    with pytest.raises(Refused, match="float6_e2m3fn"):
        written(checkpoint.with_weights({"w": odd}))


def huge(n_bytes: int) -> Tensor:
    return from_source(DTYPES["uint8"], (n_bytes,), Fill(b"\0", n_bytes))


def test_members_over_4_gib_have_their_zip64_fields(tmp_path: Path) -> None:
    """A sparse file, laid out and read by Python's zipfile; nothing of its 9 GB is stored."""
    records = [Record("data.pkl", b"x"), Record("data/0", huge(GIB4)), Record("data/1", huge(5)),
               Record("data/2", huge(GIB4 + 1)), Record("version", b"3\n")]
    layout = lay_out("big", records)
    path = tmp_path / "big.pt"
    with path.open("wb") as file:
        file.truncate(layout.size)
        for part in layout.parts:
            if isinstance(part.content, bytes):
                file.seek(part.offset)
                file.write(part.content)
    with zipfile.ZipFile(path) as archive:
        sizes = {info.filename: info.file_size for info in archive.infolist()}
        assert sizes == {f"big/{r.name}": r.n_bytes for r in records}
        assert archive.read("big/version") == b"3\n"
        starts = {p.offset: p.length for p in layout.parts if isinstance(p.content, Tensor)}
        for info in archive.infolist():
            with path.open("rb") as file:
                file.seek(info.header_offset + 26)
                n_name, n_extra = struct.unpack("<2H", file.read(4))
            start = info.header_offset + 30 + n_name + n_extra
            assert start % 64 == 0
            if info.filename.startswith("big/data/"):
                assert starts[start] == info.file_size


@pytest.mark.frameworks
def test_the_layout_is_torchs_byte_for_byte(tmp_path: Path) -> None:
    """The members of a file that torch wrote, a 4 GiB one among them, laid out again: the same file but for one id."""
    import torch

    path = tmp_path / "big.pt"
    with torch.serialization.skip_data():  # storages become holes, so the file is sparse
        torch.save({"a": torch.empty(GIB4, dtype=torch.uint8), "b": torch.arange(5.0), "c": torch.empty(0)}, path)
    with zipfile.ZipFile(path) as archive:
        tensors = {"big/data/0": huge(GIB4), "big/data/1": huge(20)}
        records = [
            Record(n.partition("/")[2], tensors[n] if n in tensors else archive.read(n)) for n in archive.namelist()
        ]
    layout = lay_out("big", records)
    assert layout.size == path.stat().st_size
    with path.open("rb") as file:
        for part in layout.parts:
            if isinstance(part.content, bytes):
                file.seek(part.offset)
                assert file.read(part.length) == part.content


@pytest.mark.frameworks
@pytest.mark.parametrize("case", ["zip_dtypes/dtypes.pt", "zip_tied_bf16/model.pth", "zip_views/views.pt"])
def test_torch_loads_what_we_wrote_with_equal_values(corpus: Path, case: str) -> None:
    import torch

    checkpoint, _ = read_path(corpus / "torch" / case)
    got = torch.load(io.BytesIO(written(checkpoint)), weights_only=True)
    want = torch.load(corpus / "torch" / case, weights_only=True)
    assert list(got) == list(want)
    for name, tensor in want.items():
        assert (got[name].dtype, got[name].shape) == (tensor.dtype, tensor.shape)
        plain = tensor.resolve_conj().resolve_neg().contiguous()
        if plain.numel():
            assert torch.equal(got[name].reshape(-1).view(torch.uint8), plain.reshape(-1).view(torch.uint8)), name
    for tied, kept in checkpoint.aliases.items():
        assert got[tied].data_ptr() == got[kept].data_ptr()


@pytest.mark.frameworks
def test_torch_loads_quantized_and_sparse_tensors_again(corpus: Path) -> None:
    import torch

    checkpoint, _ = read_path(corpus / "torch/zip_exotic/exotic.pt")
    keep = ("q_", "coo", "cs", "bs", "parameter", "nested/")
    weights = {n: t for n, t in checkpoint.weights.items() if n.startswith(keep)}
    got = torch.load(io.BytesIO(written(checkpoint.with_weights(weights))), weights_only=True)
    want = torch.load(corpus / "torch/zip_exotic/exotic.pt", weights_only=False)
    for name in ("q_tensor", "q_int8", "q_int32", "q_channel"):
        assert torch.equal(got[name].dequantize(), want[name].dequantize()), name
    for name in ("coo", "coo_uncoalesced", "csr", "csc", "bsr", "bsc"):
        assert got[name].layout == want[name].layout
        assert torch.equal(got[name].to_dense(), want[name].to_dense()), name


@pytest.mark.frameworks
def test_training_goes_on_from_what_we_wrote(data: Path) -> None:
    """A real optimizer takes the state dict, and has the very state that it was saved with."""
    import torch

    checkpoint, _ = read_path(data / "trainer/checkpoint.pt")
    got = torch.load(io.BytesIO(written(checkpoint, training=True)), weights_only=True)
    want = torch.load(data / "trainer/checkpoint.pt", weights_only=False)
    shapes = [want["optimizer"]["state"][i]["exp_avg"].shape for i in sorted(want["optimizer"]["state"])]
    numbers = iter(range(len(shapes)))
    optimizer = torch.optim.AdamW(
        {"params": [torch.nn.Parameter(torch.zeros(shapes[next(numbers)])) for _ in group["params"]]}
        for group in want["optimizer"]["param_groups"]
    )
    optimizer.load_state_dict(got["optimizer"])
    loaded = optimizer.state_dict()
    for i, state in want["optimizer"]["state"].items():
        assert all(torch.equal(loaded["state"][i][slot], value) for slot, value in state.items())
    for a, b in zip(loaded["param_groups"], want["optimizer"]["param_groups"], strict=True):
        assert all(a[key] == b[key] for key in b)
    assert got["epoch"] == want["epoch"]
    assert got["scheduler"] == want["scheduler"]
