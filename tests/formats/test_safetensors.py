"""safetensors files: what is read, what is refused, and that what is written is what the reference writer writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anyckpt import formats
from anyckpt.core.dtypes import BY_SAFETENSORS, DTYPES
from anyckpt.core.source import Absent
from anyckpt.core.tensor import filled, from_array, from_source
from anyckpt.errors import CheckpointError, UsageError
from anyckpt.finding import Report
from anyckpt.formats import safetensors
from anyckpt.formats.table import WriteOptions
from anyckpt.io.view import MemoryFile

A = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
B = {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}


def judge(data: bytes, name: str = "model.safetensors") -> list[tuple[str, str]]:
    """(code, severity) of what is wrong with a file of these bytes, a fault that ends the reading included."""
    report = Report()
    try:
        formats.read_file(MemoryFile(name, data), report)
    except CheckpointError as error:
        report.extend([error.finding])
    return [(f.code, f.severity) for f in report.findings if f.code != "no-format-tag"]


def test_every_tensor_is_described_with_its_dtype_shape_and_place(corpus: Path, read: Any) -> None:
    checkpoint, _ = read(corpus / "torch/safetensors_dtypes/all.safetensors")
    truth, _ = read(corpus / "torch/safetensors_dtypes/truth.safetensors")
    header = json.loads((corpus / "torch/safetensors_dtypes/case.json").read_text())["extra"]["header"]
    assert set(checkpoint.weights) == set(truth.weights)
    for name, tensor in checkpoint.weights.items():
        assert tensor.dtype is BY_SAFETENSORS[header[name]["dtype"]]
        assert list(tensor.shape) == header[name]["shape"]
        assert tensor.tobytes() == truth.weights[name].tobytes()
    assert checkpoint.facts["metadata"]["note"] == header["__metadata__"]["note"]
    assert checkpoint.step == 7


@pytest.mark.parametrize(
    ("header", "data", "expected"),
    [
        ({"a": A, "b": B}, bytes(16), []),
        ({"b": B, "a": A}, bytes(16), []),
        ({"e": {"dtype": "F32", "shape": [0], "data_offsets": [8, 8]}, "a": A}, bytes(8), []),
        ({"a": A}, bytes(7), [("truncated", "error")]),
        ({"a": A}, bytes(9), [("trailing-data", "error")]),
        ({"b": B}, bytes(16), [("offset-hole", "error")]),
        ({"a": A, "c": A}, bytes(8), [("offset-overlap", "error")]),
        ({"a": {**A, "dtype": "F33"}}, bytes(8), [("unknown-dtype", "error")]),
        ({"a": {**A, "dtype": 7}}, bytes(8), [("bad-header", "error")]),
        ({"a": {**A, "shape": [True, 2]}}, bytes(8), [("bad-header", "error")]),
        ({"a": {**A, "shape": [2.0]}}, bytes(8), [("bad-header", "error")]),
        ({"a": {**A, "shape": [-1, -2]}}, bytes(8), [("negative-size", "error")]),
        ({"a": {**A, "shape": [2**62 + 1, 4]}}, bytes(8), [("size-overflow", "error")]),
        ({"a": {**A, "shape": [3]}}, bytes(8), [("size-mismatch", "error")]),
        ({"a": {**A, "data_offsets": [8, 0]}}, bytes(8), [("negative-size", "error")]),
        ({"a": {**A, "data_offsets": [-8, 0]}}, bytes(8), [("negative-size", "error")]),
        ({"a": {"dtype": "F4", "shape": [3], "data_offsets": [0, 2]}}, bytes(2), [("size-mismatch", "error")]),
        ({"a": {**A, "extra": 1}}, bytes(8), [("unknown-field", "warning")]),
        ({"__metadata__": {"a": 1}, "a": A}, bytes(8), [("bad-header", "error")]),
        ({"": A}, bytes(8), [("bad-name", "warning")]),
        (f' {{"a":{json.dumps(A)}}}', bytes(8), [("bad-header", "warning")]),
        (f'{{"a":{json.dumps(A)},"a":{json.dumps(A)}}}', bytes(8), [("duplicate-key", "warning")]),
        (f'{{"a":{json.dumps(A)},"a":{json.dumps(B)}}}', bytes(16), [("duplicate-key", "error")]),
        ('{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,8]}}', bytes(8), [("bad-header", "error")]),
        ('{"a":' + "[" * 100_000, b"", [("too-deep", "error")]),
        ("[1]", b"", [("bad-header", "error")]),
    ],
)
def test_each_rule_of_the_header_has_its_word(
    header: Any, data: bytes, expected: list[tuple[str, str]], safetensors_bytes: Callable[..., bytes]
) -> None:
    assert judge(safetensors_bytes(header, data)) == expected


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"\x05", "truncated"),
        ((100).to_bytes(8, "little") + b"{", "truncated"),
        ((100_000_001).to_bytes(8, "little") + b"{}", "header-too-large"),
        (bytes(80), "zero-tail"),
        (bytes(8) + b"{}" * 20, "zero-head"),
        (b"PK\x03\x04 not really a zip", None),
    ],
)
def test_a_file_that_only_its_name_calls_safetensors_is_told_what_is_wrong(data: bytes, code: str | None) -> None:
    found = judge(data)
    assert found[0][1] == "error"
    assert code is None or found[0][0] == code
    assert judge(data[:8] + b"?" + data[9:], "model.xyz")[0][0] in ("not-a-checkpoint", "zero-head")


def test_a_name_that_belongs_to_another_format_is_told(data: Path, tmp_path: Path, codes: Any) -> None:
    source = data / "sharded/model-00001-of-00002.safetensors"
    (tmp_path / "model.pt").write_bytes(source.read_bytes())
    assert "wrong-extension" in codes(tmp_path / "model.pt")
    (tmp_path / "model.safetensors").write_bytes((data / "legacy.pth").read_bytes())
    assert "wrong-extension" in codes(tmp_path / "model.safetensors")


def test_data_that_are_also_a_zip_are_told(tmp_path: Path, codes: Any, safetensors_bytes: Callable[..., bytes]) -> None:
    end = b"PK\x05\x06" + bytes(18)
    header = {"a": {"dtype": "U8", "shape": [len(end)], "data_offsets": [0, len(end)]}}
    (tmp_path / "m.safetensors").write_bytes(safetensors_bytes(header, end))
    assert "polyglot" in codes(tmp_path / "m.safetensors")


def test_tensors_keep_their_identity_between_accesses(data: Path, read: Any) -> None:
    weights = read(data / "truth.safetensors")[0].weights
    name = next(iter(weights))
    assert weights[name] is weights[name]


# --- writing ---

kinds = st.sampled_from([d for d in DTYPES.values() if d.safetensors and d.block == 1])
shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)


@given(st.dictionaries(st.text(max_size=8), st.tuples(kinds, shapes), max_size=8))
@settings(max_examples=60, deadline=None)
def test_what_is_written_is_read_back_without_a_finding(
    lay_down: Callable[..., None], tmp_path_factory: pytest.TempPathFactory, kinds_by_name: dict[str, Any]
) -> None:
    names = {n: k for n, k in kinds_by_name.items() if n != "__metadata__" and n.isprintable() and n}
    weights = {n: filled(d, s, bytes([i + 1]) * d.itemsize) for i, (n, (d, s)) in enumerate(names.items())}
    layout = safetensors.layout("", weights, {"format": "pt"})
    path = tmp_path_factory.mktemp("written") / "m.safetensors"
    lay_down([layout], path)
    assert judge(path.read_bytes()) == []
    back = formats.read_file(MemoryFile("m.safetensors", path.read_bytes()), Report()).weights
    assert {n: (t.dtype, t.shape, t.tobytes()) for n, t in back.items()} == {
        n: (t.dtype, t.shape, t.tobytes()) for n, t in weights.items()
    }
    assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0


@pytest.mark.parametrize("name", ["complex128", "complex32", "qint8"])
def test_a_type_that_safetensors_lacks_is_refused_by_name(name: str) -> None:
    with pytest.raises(UsageError, match=f"w is {name}"):
        safetensors.layout("", {"w": filled(DTYPES[name], (2,), bytes(DTYPES[name].itemsize))}, {})


def test_values_that_were_never_saved_are_refused() -> None:
    meta = from_source(DTYPES["float32"], (2,), Absent(8, "meta device"))
    with pytest.raises(UsageError, match="never saved"):
        safetensors.layout("", {"w": meta}, {})


def test_tied_names_are_written_each_or_once_with_a_note(read: Any, data: Path, tmp_path: Path, lay_down: Any) -> None:
    checkpoint, _ = read(data / "sharded")
    assert dict(checkpoint.aliases) == {"lm_head.weight": "model.embed_tokens.weight"}
    for tied, stored in (("keep", True), ("drop", False)):
        target = tmp_path / f"{tied}.safetensors"
        lay_down(safetensors.write(checkpoint, WriteOptions(tied=tied)), target)
        text = target.read_bytes()
        header = json.loads(text[8 : 8 + int.from_bytes(text[:8], "little")])
        assert ("lm_head.weight" in header) is stored
        back, _ = read(target)
        assert set(back.weights) == set(checkpoint.weights)  # `drop` notes the tie in the metadata
        assert back.weights["lm_head.weight"].tobytes() == checkpoint.weights["lm_head.weight"].tobytes()


def test_a_million_tensors_are_described_in_time_linear_in_their_number() -> None:
    import time

    def seconds(n: int) -> float:
        entries = (f'"t{i}":{{"dtype":"U8","shape":[1],"data_offsets":[{i},{i + 1}]}}' for i in range(n))
        text = ("{" + ",".join(entries) + "}").encode()
        file = MemoryFile("m", len(text).to_bytes(8, "little") + text + bytes(n))
        start = time.process_time()
        report = Report()
        assert len(safetensors.read(file, report).weights) == n
        assert [f.code for f in report.findings] == ["no-format-tag"]
        return time.process_time() - start

    seconds(1000)
    small, large = seconds(4_000), seconds(40_000)
    assert large < 30 * small + 0.5


@pytest.mark.frameworks
def test_the_file_is_the_reference_writers_byte_for_byte(lay_down: Any, tmp_path: Path, read: Any) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    generator = torch.Generator().manual_seed(3)
    tensors = {
        f"layer.{i}.{dtype}".replace("torch.", ""): torch.randn(3, i + 1, generator=generator).to(dtype)
        for i in range(3)
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int8, torch.bool)
    } | {"scalar": torch.tensor(1.5), "empty": torch.zeros(0, 4), 'é\n"': torch.ones(2, dtype=torch.uint8)}
    save_file(tensors, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    checkpoint, _ = read(tmp_path / "theirs.safetensors")
    lay_down(safetensors.write(checkpoint, WriteOptions()), tmp_path / "ours.safetensors")
    assert (tmp_path / "ours.safetensors").read_bytes() == (tmp_path / "theirs.safetensors").read_bytes()
    loaded = load_file(tmp_path / "ours.safetensors")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


@pytest.mark.frameworks
def test_packed_float4_is_spelled_with_the_values_it_holds(lay_down: Any, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    packed = from_source(DTYPES["float4_e2m1fn_x2"], (2, 4), from_array(np.arange(8, dtype=np.uint8)).pieces[0].source)
    lay_down([safetensors.layout("", {"w": packed}, {"format": "pt"})], tmp_path / "f4.safetensors")
    assert tuple(load_file(tmp_path / "f4.safetensors")["w"].shape) == (2, 4)
