"""Rebuild functions: views over storages with every bound checked, and tensors that are more than a view."""

from __future__ import annotations

import pickle
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from pathlib import PurePosixPath
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anyckpt.core.dtypes import DTYPES
from anyckpt.core.inert import Global, Mapping, NumpyArray, Opaque, TensorSubclass, Text
from anyckpt.core.source import Inline
from anyckpt.core.tensor import Tensor
from anyckpt.errors import CheckpointError
from anyckpt.finding import fail
from anyckpt.pickle.machine import run
from anyckpt.pickle.result import Result
from anyckpt.pickle.storage import Storage
from anyckpt.pickle.tensors import view

Persistent = Callable[[Any], Any]


def number(n: int) -> bytes:
    return f"I{n}\n".encode()


def numbers(values: tuple[Any, ...]) -> bytes:
    return b"(" + b"".join(number(n) if isinstance(n, int) else f"F{n}\n".encode() for n in values) + b"t"


def text(value: str) -> bytes:
    return b"X" + len(value).to_bytes(4, "little") + value.encode()


def storage(cls: str = "FloatStorage", n: int = 24, module: str = "torch") -> bytes:
    return b"(" + text("storage") + f"c{module}\n{cls}\n".encode() + text("0") + text("cpu") + number(n) + b"tQ"


def tensor(
    size: tuple[Any, ...], stride: tuple[Any, ...], offset: int = 0, held: bytes = storage(), tail: bytes = b""
) -> bytes:
    hooks = b"ccollections\nOrderedDict\n)R"
    return (
        b"ctorch._utils\n_rebuild_tensor_v2\n(" + held + number(offset) + numbers(size) + numbers(stride) + b"\x89"
        + hooks + tail + b"tR"
    )


def test_a_view_is_the_smallest_span(persistent: Persistent) -> None:
    """Offset and strides count elements; C order needs no strides, and axes of one element don't matter."""
    whole: Tensor = run(tensor((2, 3), (3, 1), 4) + b".", persistent=persistent).value
    assert (whole.dtype, whole.shape) == (DTYPES["float32"], (2, 3))
    assert whole.pieces[0].strides is None
    source = whole.pieces[0].source
    assert isinstance(source, Inline) and source.data == bytes(i % 251 for i in range(16, 40))
    turned: Tensor = run(tensor((3, 2), (1, 3)) + b".", persistent=persistent).value
    assert turned.pieces[0].strides == (1, 3)
    assert run(tensor((2, 1, 3), (3, 99, 1)) + b".", persistent=persistent).value.pieces[0].strides is None
    assert run(tensor((), ()) + b".", persistent=persistent).value.shape == ()
    assert run(tensor((0, 5), (5, 1)) + b".", persistent=persistent).value.nbytes == 0
    huge: Tensor = run(tensor((2**40,), (0,)) + b".", persistent=persistent).value
    assert huge.shape == (2**40,) and huge.pieces[0].strides == (0,)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 30)), max_size=4), st.integers(0, 40))
def test_bounds_are_exact(axes: list[tuple[int, int]], offset: int) -> None:
    """A view is accepted exactly where numpy's own arithmetic of its farthest element stays inside."""
    held = Storage(Inline(bytes(200)), DTYPES["float32"], "0", "cpu", 200, 50)
    size, stride = tuple(n for n, _ in axes), tuple(s for _, s in axes)
    farthest = offset + (sum((n - 1) * s for n, s in axes) + 1 if 0 not in size else 0)
    if farthest <= 50:
        assert view(held, offset, size, stride).shape == size
    else:
        with pytest.raises(CheckpointError, match="reaches byte"):
            view(held, offset, size, stride)


@pytest.mark.parametrize(
    ("made", "code"),
    [
        (tensor((25,), (1,)), "offset-out-of-bounds"),
        (tensor((2,), (1,), -1), "negative-size"),
        (tensor((-2,), (1,)), "negative-size"),
        (tensor((2, 2), (-1, 1)), "negative-size"),
        (tensor((2.0,), (1,)), "malformed-pickle"),
        (tensor((2, 2), (1,)), "malformed-pickle"),
        (tensor((2**62, 2**62), (0, 0)), "size-overflow"),
        (tensor((2**70,), (1,)), "size-overflow"),
        (tensor((1,) * 65, (1,) * 65), "limit-exceeded"),
        (tensor((2,), (1,), held=b"N"), "malformed-pickle"),
        (tensor((2,), (1,), held=text("pid") + b"Q"), "malformed-pickle"),
        (tensor((2,), (1,), held=storage(n=-1)), "negative-size"),
        (tensor((2,), (1,), held=storage(n=2**62)), "size-overflow"),
        (tensor((2,), (1,), held=storage("Size")), "malformed-pickle"),
        (tensor((2,), (1,), held=storage("QUInt4x2Storage", 24), tail=b"N"), None),
        (tensor((3, 2), (1, 3), held=storage("QUInt4x2Storage", 24)), "unsupported"),
    ],
)
def test_hostile_arguments(made: bytes, code: str | None, persistent: Persistent) -> None:
    """Each is one finding with the right word, and hides nothing beside it."""
    result = run(b"(" + made + b"K\x07l.", persistent=persistent)
    assert [f.code for f in result.findings] == ([code] if code else [])
    assert result.value[1] == 7 and result.complete and result.verdict == "safe"
    assert isinstance(result.value[0], Opaque if code else Tensor)


def test_a_missing_storage_is_reported_once() -> None:
    """What is made over an unreadable storage is unreadable, without a finding of its own."""

    def missing(pid: Any) -> Any:
        raise fail("missing-record", "no such record")

    parameter = b"ctorch._utils\n_rebuild_parameter\n(" + tensor((2,), (1,)) + b"\x88ccollections\nOrderedDict\n)RtR."
    result = run(parameter, persistent=missing)
    assert [f.code for f in result.findings] == ["missing-record"] and result.verdict == "safe"


def test_hooks_are_code(persistent: Persistent) -> None:
    """A hooks argument that is not empty makes the verdict unknown; the tensor is still there."""
    made = tensor((2,), (1,)).replace(b"ccollections\nOrderedDict\n)R", b"cproject\nhook\n)R")
    result = run(made + b".", persistent=persistent)
    assert isinstance(result.value, Tensor) and result.verdict == "unknown"


def test_version_3_counts_bytes(persistent: Persistent) -> None:
    """Types without a storage class lie over bytes."""
    held = storage("UntypedStorage", 12, "torch.storage")
    made = tensor((6,), (2,), held=held, tail=b"ctorch\nfloat8_e4m3fn\n").replace(b"tensor_v2", b"tensor_v3")
    value = run(made + b".", persistent=persistent).value
    assert value.dtype.name == "float8_e4m3fn" and value.tobytes() == bytes(range(0, 12, 2))
    bad = made.replace(b"float8_e4m3fn", b"uint3")
    assert [f.code for f in run(bad + b".", persistent=persistent).findings] == ["unknown-dtype"]


def test_conjugate_and_negative_bits(persistent: Persistent) -> None:
    """The value is the conjugate of the bytes."""
    tail = b"}" + text("conj") + b"\x88s"
    value = run(tensor((2,), (1,), held=storage("ComplexFloatStorage"), tail=tail) + b".", persistent=persistent).value
    raw = np.array([i % 251 for i in range(16)], np.uint8).view(np.complex64)
    assert value.dtype.name == "complex64" and value.numpy().tobytes() == np.conjugate(raw).tobytes()


def test_quantized(persistent: Persistent) -> None:
    """Raw integers with their scheme; per-channel scales must fit the axis."""
    made = tensor((2, 3), (3, 1), held=storage("QInt8Storage")).replace(b"tensor_v2", b"qtensor")
    params = b"ctorch\nper_tensor_affine\nF0.5\nI3\n\x87"
    value = run(made.replace(b"\x89", params + b"\x89") + b".", persistent=persistent).value
    assert isinstance(value, TensorSubclass) and value.base is not None and value.base.dtype.name == "qint8"
    assert value.state == {"scheme": "per_tensor_affine", "scale": 0.5, "zero_point": 3, "axis": None}
    wrong = b"(ctorch\nper_channel_affine\n](F1\nF2\ne](I0\nI0\neI1\nt"
    result = run(made.replace(b"\x89", wrong + b"\x89") + b".", persistent=persistent)
    assert [f.code for f in result.findings] == ["size-mismatch"]


def from_type(cls: str, state: bytes) -> bytes:
    module, _, name = cls.rpartition(".")
    function, _, args = tensor((2,), (1,)).partition(b"\n(")
    return (
        b"ctorch._tensor\n_rebuild_from_type_v2\n(" + function + b"\n" + f"c{module}\n{name}\n".encode()
        + b"(" + args[:-1] + state + b"tR."
    )


def test_tensors_with_attributes(persistent: Persistent) -> None:
    """Private marks are dropped, other attributes kept; an unknown subclass is kept with its verdict."""
    private = b"}" + text("_has_been_cloned") + b"\x88s"
    named = b"}" + text("ds_id") + b"K\x01s"
    assert isinstance(run(from_type("torch.Tensor", private), persistent=persistent).value, Tensor)
    kept = run(from_type("torch.Tensor", named), persistent=persistent).value
    assert isinstance(kept, TensorSubclass) and kept.attributes() == {"ds_id": 1} and kept.shape == (2,)
    result = run(from_type("project.Odd", private), persistent=persistent)
    assert result.verdict == "unknown" and result.value.cls == Global("project", "Odd")


def test_wrapper_subclasses_hold_their_data_in_the_state(persistent: Persistent) -> None:
    """DTensor: the tensors are attributes, the shape is the global one."""
    args = b"(ctorch.distributed.tensor\nDTensor\nctorch\nfloat32\n" + numbers((8, 4)) + numbers((4, 1))
    args += b"I0\nctorch.serialization\n_get_layout\n" + text("torch.strided") + b"\x85R"
    args += b"ctorch\ndevice\n" + text("cpu") + b"\x85R\x89t"
    state = b"N}" + text("_local_tensor") + tensor((4, 4), (4, 1)) + b"s\x86"
    function = b"ctorch._utils\n_rebuild_wrapper_subclass\n"
    data = b"ctorch._tensor\n_rebuild_from_type_v2\n(" + function + b"ctorch.distributed.tensor\nDTensor\n"
    result = run(data + args + state + b"tR.", persistent=persistent)
    value = result.value
    assert result.verdict == "safe" and not result.findings
    assert value.base is None and value.shape == (8, 4) and value.attributes()["_local_tensor"].shape == (4, 4)


def test_small_things_of_torch() -> None:
    """Sizes, devices, layouts and dtypes are data."""
    assert run(b"ctorch\nSize\nI2\nI3\n\x86\x85R.").value == (2, 3)
    assert run(b"ctorch\ndevice\n" + text("cuda") + b"I1\n\x86R.").value == Text("cuda:1", "torch.device")
    assert run(b"ctorch\nbfloat16\n.").value is DTYPES["bfloat16"]
    meta = b"ctorch._utils\n_rebuild_meta_tensor_no_storage\n(ctorch\nfloat16\n"
    meta += numbers((5,)) + numbers((1,)) + b"\x89tR."
    assert not run(meta).value.is_stored


def loaded(value: Any, protocol: int) -> Result:
    result = run(pickle.dumps(value, protocol))
    assert result.verdict == "safe" and not result.findings, result
    return result


@pytest.mark.parametrize("protocol", range(6))
def test_standard_library(protocol: int) -> None:
    """Containers keep their kind and extras, paths become text, namespaces keep their attributes."""
    ordered: Any = OrderedDict(a=1)
    ordered._metadata = {"version": 1}
    got = loaded(ordered, protocol).value
    assert isinstance(got, Mapping) and got == {"a": 1} and got.attributes == {"_metadata": {"version": 1}}
    assert loaded(Counter("aab"), protocol).value == {"a": 2, "b": 1}
    factory = loaded(defaultdict(list, {"k": [1]}), protocol).value
    assert factory == {"k": [1]} and factory.kind == "collections.defaultdict" and factory.args
    assert loaded(PurePosixPath("/a/b"), protocol).value == Text("/a/b", "pathlib.PurePosixPath")
    assert loaded(SimpleNamespace(x=1), protocol).value.attributes() == {"x": 1}
    queue = loaded(deque([1, 2], 3), protocol).value
    assert queue.class_name == "collections.deque" and [*(queue.args[0] if queue.args else ()), *queue.items] == [1, 2]
    for value in (1 + 2j, b"", b"\x00\xff", bytearray(b"ab"), frozenset([1]), {1, 2}, bytearray()):
        assert loaded(value, protocol).value == value


arrays = [
    np.arange(6, dtype=np.float32).reshape(2, 3), np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    np.arange(4, dtype=">i4"), np.array([True, False]), np.array([1 + 2j], ">c16"), np.zeros((0, 3), np.int8),
    np.array(7, np.uint64), np.arange(6, dtype=np.int16)[::2],
]


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("array", arrays, ids=str)
def test_numpy_arrays(array: Any, protocol: int) -> None:
    """Both byte orders and memory orders, in every protocol's form."""
    got = loaded(array, protocol).value
    assert isinstance(got, NumpyArray) and not got.is_scalar
    assert got.tensor.shape == array.shape and np.array_equal(got.tensor.numpy(), array)


@pytest.mark.parametrize("protocol", range(6))
def test_numpy_scalars_and_the_rest(protocol: int) -> None:
    """Scalars, text, generators and shared arrays; objects and records are kept, not guessed."""
    got = loaded(np.float64(2.5), protocol).value
    assert got.is_scalar and got.tensor.numpy() == 2.5
    assert loaded(np.str_("añb"), protocol).value == "añb"
    one = np.arange(3)
    twice = loaded([one, one], protocol).value
    assert twice[0] is twice[1] and isinstance(twice[0], NumpyArray)
    for odd in (np.array([{"a": 1}, None], object), np.zeros(2, [("a", "i4")]), np.array(["x", "yy"])):
        assert isinstance(loaded(odd, protocol).value, Opaque)
    for state in (np.random.RandomState(0), np.random.default_rng(0), np.random.RandomState(0).get_state()):
        loaded(state, protocol)


def test_ml_dtypes_arrays() -> None:
    """bfloat16 arrays name their type by a global."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    array = np.arange(3).astype(ml_dtypes.bfloat16)
    for protocol in range(6):
        got = loaded(array, protocol).value
        assert got.tensor.dtype.name == "bfloat16" and got.tensor.tobytes() == array.tobytes()


def test_numpy_lies() -> None:
    """A shape that does not fit its bytes, and a class that is no ndarray."""
    data = pickle.dumps(np.arange(3, dtype=np.int32), 4).replace(b"K\x03\x85", b"K\x04\x85")
    result = run(data)
    assert [f.code for f in result.findings] == ["size-mismatch"]
    assert run(b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nmemmap\nI0\n\x85C\x01b\x87R.").verdict == "dangerous"
