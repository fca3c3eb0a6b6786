"""What is written is read back by our own machine; `test_torch.py` asks torch itself."""

from __future__ import annotations

import pickletools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anyckpt.core.dtypes import DTYPES
from anyckpt.core.inert import Global, Mapping, NumpyArray, Opaque, TensorSubclass, Text
from anyckpt.core.source import Inline
from anyckpt.core.tensor import Tensor, from_array, from_source
from anyckpt.errors import Refused
from anyckpt.pickle.emit import StorageRef, emit
from anyckpt.pickle.machine import run
from anyckpt.pickle.result import Result
from anyckpt.pickle.storage import Storage, storage_id


class Store:
    """Records in memory, one for each tensor."""

    def __init__(self) -> None:
        self.records: dict[str, bytes] = {}

    def __call__(self, tensor: Tensor) -> StorageRef:
        key, data = str(len(self.records)), tensor.tobytes()
        self.records[key] = data
        strides = tuple(int(np.prod(tensor.shape[axis + 1 :])) for axis in range(tensor.ndim))
        return StorageRef(key, len(data), 0, strides)

    def load(self, pid: Any) -> Storage:
        found = storage_id(pid)
        data = self.records[found.key]
        assert len(data) == found.n_bytes
        return Storage(Inline(data), found.dtype, found.key, found.location, found.n_bytes, found.n_elements)


def again(value: Any, **options: Any) -> Result:
    """Emit, check that torch's restricted reader knows every opcode and name, and read."""
    store = Store()
    data = emit(value, storage=store, **options)
    assert data == emit(value, storage=Store(), **options)
    unknown = {op.name for op, _, _ in pickletools.genops(data)} - READER
    assert not unknown, unknown
    result = run(data, persistent=store.load)
    assert result.complete and not result.findings
    assert all(item.weights_only for item in result.imports)
    return result


READER = set(
    """
    APPEND APPENDS BINFLOAT BINGET BININT BININT1 BININT2 BINPERSID BINPUT BINUNICODE BUILD EMPTY_DICT EMPTY_LIST
    EMPTY_SET EMPTY_TUPLE GLOBAL LONG1 LONG_BINGET LONG_BINPUT MARK NEWFALSE NEWOBJ NEWTRUE NONE PROTO REDUCE SETITEM
    SETITEMS SHORT_BINSTRING STOP TUPLE TUPLE1 TUPLE2 TUPLE3
    """.split()
)
"""The opcodes of torch 2.13 `_weights_only_unpickler.py`."""

scalars = st.none() | st.booleans() | st.integers(-(2**500), 2**500) | st.floats(allow_nan=False) | st.text()
keys = st.text() | st.integers(-(2**63), 2**63 - 1) | st.tuples(st.text(), st.booleans())
plain = st.recursive(
    scalars | st.binary(max_size=20) | st.complex_numbers(allow_nan=False),
    lambda inner: (
        st.lists(inner, max_size=6)
        | st.dictionaries(keys, inner, max_size=5)
        | st.lists(inner, max_size=5).map(tuple)
        | st.sets(keys, max_size=4)
    ),
    max_leaves=25,
)


@settings(max_examples=150, deadline=None)
@given(plain)
def test_plain_data(value: Any) -> None:
    """Equal when read again."""
    assert again(value).value == value


def test_sharing_and_cycles() -> None:
    """One object is written once; lists, dicts and Namespaces may hold themselves."""
    shared, loop = [1], []
    loop.append(loop)
    space = Opaque(Global("argparse", "Namespace"))
    space.state = {"me": space, "x": 1}
    tied = from_array(np.arange(4, dtype=np.float32))
    got = again({"a": shared, "b": shared, "loop": loop, "args": space, "w": tied, "v": tied}).value
    assert got["a"] is got["b"] and got["loop"][0] is got["loop"] and got["w"] is got["v"]
    assert got["args"]["me"] is got["args"] and got["args"]["x"] == 1


def test_what_objects_become() -> None:
    """The table of the module's docstring."""
    tensor = from_array(np.arange(6, dtype=np.int64).reshape(2, 3))
    state = Mapping({"w": tensor})
    state.attributes = {"_metadata": Mapping({"": {"version": 2}})}
    got = again(
        {
            "state": state, "counter": Mapping({"x": 2}, kind="collections.Counter"),
            "default": Mapping({"y": 1}, kind="collections.defaultdict"), "path": Text("/a/b", "pathlib.PosixPath"),
            "device": Text("cuda:1", "torch.device"), "dtype": DTYPES["bfloat16"], "frozen": frozenset("ab"),
            "scalar": NumpyArray(from_array(np.float32(1.5).reshape(())), True), "array": NumpyArray(tensor),
            "queue": Opaque(Global("collections", "deque"), ([1, 2],), items=[3]),
        }
    ).value
    assert got["state"].kind == "collections.OrderedDict" and got["state"]["w"] is got["array"]
    assert got["state"].attributes["_metadata"] == {"": {"version": 2}}
    assert got["counter"].kind == "collections.Counter" and type(got["default"]) is dict
    assert got["path"] == "/a/b" and got["device"] == Text("cuda:1", "torch.device")
    assert got["dtype"] is DTYPES["bfloat16"] and got["frozen"] == {"a", "b"}
    assert got["scalar"] == 1.5 and got["queue"] == [1, 2, 3]
    assert got["array"].tobytes() == tensor.tobytes()


@pytest.mark.parametrize("name", ["float32", "bfloat16", "bool", "complex128", "float8_e5m2", "uint16", "complex32"])
def test_dtypes(name: str) -> None:
    """Types with a storage class and those over bytes."""
    dtype = DTYPES[name]
    got = again(from_source(dtype, (3, 2), Inline(bytes(range(6 * dtype.itemsize))))).value
    assert got.dtype is dtype and got.shape == (3, 2) and got.tobytes() == bytes(range(6 * dtype.itemsize))


def test_more_than_a_view() -> None:
    """Quantized, sparse and attributed tensors come back as what they were."""
    raw = from_source(DTYPES["qint8"], (2, 3), Inline(bytes(6)))
    quantized = TensorSubclass(
        Global("torch._utils", "_rebuild_qtensor"), raw,
        {"scheme": "per_tensor_affine", "scale": 0.5, "zero_point": 1, "axis": None}, raw.dtype, raw.shape,
    )
    assert again(quantized).value.state == quantized.state
    indices, values = from_array(np.array([[0, 1]])), from_array(np.ones(2, np.float32))
    sparse = TensorSubclass(
        Global("torch._utils", "_rebuild_sparse_tensor"), None,
        {"layout": "torch.sparse_coo", "indices": indices, "values": values, "is_coalesced": True},
        values.dtype, (4,),
    )
    got = again(sparse).value
    assert got.shape == (4,) and got.state["is_coalesced"] is True
    assert got.state["indices"].tobytes() == indices.tobytes()
    noted = TensorSubclass(Global("torch", "Tensor"), values, {"note": "x"}, values.dtype, values.shape)
    assert again(noted).value.attributes() == {"note": "x"}


def test_refusals() -> None:
    """What torch would not accept is refused, or replaced where the caller says by what."""
    thing = Opaque(Global("project", "Thing"))
    for value in (thing, Global("project", "make"), {frozenset("a"): 1}, 1 << 3000):
        with pytest.raises(Refused):
            emit({"x": value} if not isinstance(value, dict) else value, storage=Store())
    assert again([thing, Global("os", "system")], on_opaque=lambda value: f"<{value}>").value == [
        "<Opaque(project.Thing)>", "<os.system>",
    ]
    inner: list[Any] = []
    inner.append((inner,))
    with pytest.raises(Refused, match="tuple"):
        emit(inner[0], storage=Store())
    with pytest.raises(Refused, match="no element type"):
        emit(from_source(DTYPES["float4_e2m1fn"], (2,), Inline(b"\0")), storage=Store())


def test_deep_and_long() -> None:
    """Neither depth nor length needs recursion."""
    deep: list[Any] = []
    for _ in range(50_000):
        deep = [deep]
    emit(deep, storage=Store())
    long = {f"k{i}": (i, [i]) for i in range(3001)}
    assert again(long).value == long
