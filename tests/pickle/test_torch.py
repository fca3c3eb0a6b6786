"""torch itself judges: its tables, what it wrote, and what we write."""

from __future__ import annotations

import io
import zipfile
from typing import Any

import pytest

from anyckpt.core.inert import TensorSubclass, Text
from anyckpt.core.source import Inline
from anyckpt.core.tensor import Tensor
from anyckpt.pickle.emit import StorageRef, emit
from anyckpt.pickle.machine import run
from anyckpt.pickle.storage import STORAGE_DTYPES, Storage, storage_id
from anyckpt.pickle.weights_only import WEIGHTS_ONLY

pytestmark = pytest.mark.frameworks
torch: Any = pytest.importorskip("torch", reason="needs torch: pip install -e '.[frameworks]'")


def read(saved: io.BytesIO) -> Any:
    """A torch zip through Python's zipfile and our machine."""
    archive = zipfile.ZipFile(saved)
    root = archive.namelist()[0].split("/")[0]

    def load(pid: Any) -> Storage:
        found = storage_id(pid)
        data = archive.read(f"{root}/data/{found.key}")
        return Storage(Inline(data), found.dtype, found.key, found.location, found.n_bytes, found.n_elements)

    result = run(archive.read(f"{root}/data.pkl"), persistent=load)
    assert result.complete and result.verdict == "safe" and not result.findings
    return result.value


def write(value: Any) -> io.BytesIO:
    """What we emit, in a zip made by Python's zipfile."""
    records: dict[str, bytes] = {}

    def store(tensor: Tensor) -> StorageRef:
        key, data, strides = str(len(records)), tensor.tobytes(), [1] * tensor.ndim
        for axis in range(tensor.ndim - 2, -1, -1):
            strides[axis] = strides[axis + 1] * max(tensor.shape[axis + 1], 1)
        records[key] = data
        return StorageRef(key, len(data), 0, tuple(strides))

    saved = io.BytesIO()
    with zipfile.ZipFile(saved, "w") as archive:
        archive.writestr("archive/data.pkl", emit(value, storage=store))
        archive.writestr("archive/version", "3\n")
        for key, data in records.items():
            archive.writestr(f"archive/data/{key}", data)
    saved.seek(0)
    return saved


def saved(value: Any) -> io.BytesIO:
    out = io.BytesIO()
    torch.save(value, out)
    out.seek(0)
    return out


def same(a: Any, b: Any) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bool(torch.equal(a.cpu(), b.cpu()))


def test_allowed_names_are_torchs_own() -> None:
    """The table is what this torch allows before anything is added to it."""
    from torch._weights_only_unpickler import _get_allowed_globals

    assert set(_get_allowed_globals()) == WEIGHTS_ONLY


def test_storage_classes() -> None:
    """Every storage class, and the element type torch gives it."""
    for cls in torch._storage_classes:
        ours = STORAGE_DTYPES[f"{cls.__module__}.{cls.__name__}"]
        if ours is not None:
            assert str(cls.dtype).removeprefix("torch.") == ours.name


DTYPES = [
    "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool", "complex64",
    "complex128", "complex32", "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz",
    "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2",
]


@pytest.mark.parametrize("name", DTYPES)
def test_there_and_back(name: str) -> None:
    """torch.save -> our machine -> emit -> torch.load(weights_only=True): the same bytes."""
    dtype = getattr(torch, name)
    raw = torch.arange(96, dtype=torch.uint8) % 2
    value = raw.view(dtype).reshape(-1, 2) if dtype != torch.bool else raw.bool().reshape(-1, 2)
    got = torch.load(write(read(saved({"w": value, "t": value.t(), "part": value[1:, :1]}))), weights_only=True)
    for key, want in {"w": value, "t": value.t(), "part": value[1:, :1]}.items():
        assert got[key].dtype == dtype and got[key].shape == want.shape
        assert bytes(got[key].contiguous().view(torch.uint8).flatten()) == bytes(
            want.contiguous().view(torch.uint8).flatten()
        )


@pytest.mark.filterwarnings("ignore")
def test_objects_there_and_back() -> None:
    """Modules' state dicts, optimizers, quantized and sparse tensors, views with conj and neg bits."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.randn(5, 4)).sum().backward()
    optimizer.step()
    value = {
        "model": model.state_dict(), "optimizer": optimizer.state_dict(), "size": torch.Size([2, 3]),
        "device": torch.device("cpu"), "dtype": torch.bfloat16,
        "conj": torch.tensor([1 + 2j, 3 - 1j]).conj(), "neg": torch.tensor([1 + 2j]).conj().imag,
        "q": torch.quantize_per_tensor(torch.randn(3, 4), 0.1, 3, torch.quint8),
        "qc": torch.quantize_per_channel(torch.randn(2, 3), torch.rand(2) + 0.1, torch.zeros(2), 0, torch.qint8),
        "coo": torch.eye(3).to_sparse(), "csr": torch.eye(3).to_sparse_csr(), "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 4), "parameter": torch.nn.Parameter(torch.ones(2)),
        "meta": torch.empty(3, 2, device="meta"),
    }
    ours = read(saved(value))
    assert isinstance(ours["q"], TensorSubclass) and ours["device"] == Text("cpu", "torch.device")
    assert ours["model"].attributes["_metadata"] == dict(value["model"]._metadata)
    got = torch.load(write(ours), weights_only=True)
    for name, tensor in value["model"].items():
        assert same(got["model"][name], tensor)
    assert got["model"]._metadata == value["model"]._metadata
    assert got["optimizer"]["param_groups"] == value["optimizer"]["param_groups"]
    assert same(got["optimizer"]["state"][0]["exp_avg"], value["optimizer"]["state"][0]["exp_avg"])
    for key in ("scalar", "empty"):
        assert same(got[key], value[key])
    for key in ("conj", "neg"):
        assert same(got[key], value[key].resolve_conj().resolve_neg())
    for key in ("q", "qc"):
        assert torch.equal(got[key].dequantize(), value[key].dequantize())
    for key in ("coo", "csr"):
        assert got[key].layout == value[key].layout and torch.equal(got[key].to_dense(), value[key].to_dense())
    assert got["meta"].device.type == "meta" and got["meta"].shape == (3, 2)
    assert got["size"] == (2, 3) and got["dtype"] == torch.bfloat16
