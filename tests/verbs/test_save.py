"""What save writes, the real loaders read back."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from anyckpt.errors import Refused, UsageError
from anyckpt.verbs.open import open
from anyckpt.verbs.save import from_tensors, save

X = np.random.default_rng(0).standard_normal((7, 5)).astype(np.float32)


@pytest.mark.parametrize("ending", ["safetensors", "pt"])
def test_numpy_arrays_of_any_order_and_type_come_back(tmp_path: Path, ending: str) -> None:
    arrays = {
        "x": X, "turned": X.T, "stepped": X[::2, 1:], "bf16": X.astype(ml_dtypes.bfloat16), "big": X.astype(">f4"),
        "scalar": np.float64(3.5), "none": np.zeros((0, 4), np.int64), "flag": np.array([True, False]),
    }  # fmt: skip
    path = tmp_path / f"m.{ending}"
    written = save(arrays, path)
    assert written.n_tensors == len(arrays)
    back = open(path).weights
    for name, array in arrays.items():
        got = back[name].numpy()
        assert got.shape == array.shape
        np.testing.assert_array_equal(got, np.asarray(array).astype(got.dtype))


def test_nested_dicts_are_joined_with_dots(tmp_path: Path) -> None:
    save({"a": {"b": X}}, tmp_path / "m.safetensors")
    assert list(open(tmp_path / "m.safetensors").weights) == ["a.b"]


def test_an_opened_checkpoint_is_written_in_another_format(tmp_path: Path, data: Path) -> None:
    source = open(data / "truth.safetensors")
    save(source, tmp_path / "m.pt")
    back = open(tmp_path / "m.pt")
    assert all(back.weights[n].tobytes() == t.tobytes() for n, t in source.weights.items())


def test_metadata_goes_where_there_is_a_place_for_it(tmp_path: Path) -> None:
    save({"x": X}, tmp_path / "m.safetensors", metadata={"made by": "me"})
    assert open(tmp_path / "m.safetensors").facts["metadata"] == {"format": "pt", "made by": "me"}
    with pytest.raises(UsageError, match="no place for metadata"):
        save({"x": X}, tmp_path / "m.pt", metadata={"made by": "me"})
    with pytest.raises(UsageError, match="metadata is text"):
        save({"x": X}, tmp_path / "n.safetensors", metadata={"step": 3})  # type: ignore[dict-item]


@pytest.mark.parametrize("value", [3, "text", [1, 2], np.array(["a"]), None])
def test_what_is_no_tensor_is_refused_by_name(tmp_path: Path, value: object) -> None:
    with pytest.raises(UsageError, match="w is "):
        save({"w": value}, tmp_path / "m.pt")
    assert not list(tmp_path.iterdir())


def test_an_existing_file_is_kept_unless_forced(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save({"x": X}, path)
    with pytest.raises(Refused):
        save({"x": X + 1}, path)
    save({"x": X + 1}, path, force=True)
    np.testing.assert_array_equal(open(path).weights["x"].numpy(), X + 1)


@pytest.mark.frameworks
def test_torch_tensors_ties_and_views_are_written_from_where_they_lie(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file

    base = torch.randn(6, 8)
    tensors = {
        "w": base, "tied": base, "view": base[1:3], "turned": base.t(), "bf16": base.bfloat16(),
        "fp8": base.to(torch.float8_e4m3fn), "conj": torch.randn(3, dtype=torch.complex64).conj(),
        "scalar": torch.tensor(3), "parameter": torch.nn.Parameter(base * 2), "wide": torch.ones(1).expand(4),
    }  # fmt: skip
    assert from_tensors(tensors).aliases == {"tied": "w"}
    save(tensors, tmp_path / "m.pt")
    back = torch.load(tmp_path / "m.pt", weights_only=True)
    assert all(torch.equal(back[n], t.detach()) and back[n].dtype == t.dtype for n, t in tensors.items())
    assert back["tied"].data_ptr() == back["w"].data_ptr()
    save(tensors, tmp_path / "m.safetensors")
    again = load_file(tmp_path / "m.safetensors")
    assert all(torch.equal(again[n], t.detach()) for n, t in tensors.items())


@pytest.mark.frameworks
@pytest.mark.parametrize("kind", ["sparse", "quantized", "meta"])
def test_torch_tensors_without_plain_values_are_refused(tmp_path: Path, kind: str) -> None:
    import torch

    x = torch.zeros(2, 2)
    made = {
        "sparse": lambda: x.to_sparse(), "quantized": lambda: torch.quantize_per_tensor(x, 1.0, 0, torch.qint8),
        "meta": lambda: x.to("meta"),
    }[kind]()  # fmt: skip
    with pytest.raises(UsageError, match=r"^w is "):
        save({"w": made}, tmp_path / "m.pt")
