"""TorchScript, torch.export and the tar of 2016: weights out of archives that carry programs, which are never run."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
from builders import array, codes, read_bytes, read_path, saved

from anyckpt.core.inert import Mapping
from anyckpt.errors import CheckpointError


def zipped(members: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return out.getvalue()


def test_a_torchscript_program_is_listed_and_its_weights_are_read(corpus: Path) -> None:
    checkpoint, report = read_path(corpus / "torch/torchscript_traced/model.pt")
    assert report.verdict == "unknown"
    assert codes(report) == {"contains-code"}
    assert "code/__torch__/torch_common.py" in checkpoint.facts["code"]
    assert "blocks.0.qkv.weight" in checkpoint.weights
    assert "constants" in checkpoint.state


def test_an_exported_program_tells_the_paths_it_carries(corpus: Path) -> None:
    checkpoint, report = read_path(corpus / "torch/export_pt2/model.pt2")
    assert checkpoint.format == "torch-export"
    assert "privacy" in codes(report)
    assert report.verdict == "safe"
    assert "scratch" in checkpoint.state["constants"]


def test_exported_programs_of_torch_2_1_to_2_6_are_read() -> None:
    data = zipped({
        "version": b"5.1", "serialized_exported_program.json": b"{}",
        "serialized_state_dict.pt": saved(Mapping({"w": array(2, 2), "b": array(2)}), "archive"),
        "serialized_constants.pt": saved({"c": array(1)}, "archive"),
    })
    checkpoint, report = read_bytes(data, "model.pt2")
    assert checkpoint.format == "torch-export"
    assert checkpoint.weights["w"].tobytes() == array(2, 2).tobytes()
    assert "c" in checkpoint.state["constants"]
    assert not report.errors


META = {
    "dtype": 7, "sizes": [{"as_int": 2}, {"as_int": 2}], "strides": [{"as_int": 1}, {"as_int": 2}],
    "storage_offset": {"as_int": 1}, "layout": 7, "device": {"type": "cuda", "index": 0},
}


def exported(entry: Any, **records: bytes) -> bytes:
    return zipped({
        "m/archive_format": b"pt2", "m/byteorder": b"little",
        "m/data/weights/model_weights_config.json": json.dumps({"config": {"w": entry}}).encode(),
        **{f"m/data/weights/{name}": content for name, content in records.items()},
    })


def test_a_weight_of_an_export_is_a_view_of_its_record() -> None:
    entry = {"path_name": "weight_0", "use_pickle": False, "is_param": True, "tensor_meta": META}
    checkpoint, _ = read_bytes(exported(entry, weight_0=array(6).tobytes()))
    assert checkpoint.weights["w"].numpy().tolist() == [[2, 4], [3, 5]]
    assert checkpoint.facts["devices"] == {"cuda": 1}


def test_a_pickled_weight_of_an_export_is_read_and_judged() -> None:
    entry = {"path_name": "weight_0", "use_pickle": True, "is_param": True, "tensor_meta": META}
    checkpoint, report = read_bytes(exported(entry, weight_0=saved(array(3), "archive")))
    assert checkpoint.weights["w"].shape == (3,)
    assert report.verdict == "safe"


@pytest.mark.parametrize(
    ("entry", "code"),
    [
        ({"path_name": "weight_0", "tensor_meta": META}, "offset-out-of-bounds"),
        ({"path_name": "../weight_0", "tensor_meta": META}, "missing-record"),
        ({"path_name": "weight_0", "tensor_meta": {**META, "dtype": 99}}, "unknown-dtype"),
        ({"path_name": "weight_0", "tensor_meta": {**META, "sizes": [{"as_int": -1}, {"as_int": 2}]}}, "negative-size"),
        ({"path_name": "weight_0", "tensor_meta": {**META, "sizes": "22"}}, "malformed-pickle"),
        ({"path_name": "weight_0"}, "bad-header"),
        ("weight_0", "bad-header"),
    ],
)
def test_an_export_that_lies_has_its_word(entry: Any, code: str) -> None:
    with pytest.raises(CheckpointError) as raised:
        read_bytes(exported(entry, weight_0=array(2).tobytes()))
    assert raised.value.finding.code == code


def test_the_tar_of_2016_is_read_and_never_called_safe(corpus: Path) -> None:
    path = corpus / "torch/tar_2016/model.pth"
    checkpoint, report = read_path(path)
    assert report.verdict == "unknown"
    assert checkpoint.facts["weights_only"] == ("the tar container",)
    data = path.read_bytes()
    for length in range(512, len(data.rstrip(b"\0")), 97):  # zeros fill the last block
        try:
            _, report = read_bytes(data[:length])
        except CheckpointError:
            continue
        assert report.errors, length


def test_a_tar_that_runs_something_is_dangerous(corpus: Path) -> None:
    from anyckpt.finding import Report
    from anyckpt.formats.torch import tar
    from anyckpt.io.local import open_local

    report = Report()
    with pytest.raises(CheckpointError):
        tar.read(open_local(corpus / "hostile/ptl_evil_tar/files/model.pth"), report)
    assert report.verdict == "dangerous"


def test_a_pickle_in_a_torchscript_archive_is_judged() -> None:
    module = b"\x80\x02c__torch__\nNet\n)\x81}X\1\0\0\0nK\1sb."
    evil = b"cos\nsystem\n(S'true'\ntR."
    data = zipped({"m/data.pkl": module, "m/constants.pkl": b"\x80\x02).", "m/code/__torch__.py": b"", "m/x.pkl": evil})
    _, report = read_bytes(data)
    assert report.verdict == "dangerous"
    assert {"contains-code", "unexpected-member"} <= codes(report)
