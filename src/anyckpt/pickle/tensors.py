"""Handlers for torch's plain tensors: the rebuild functions, dtypes, sizes, devices and layouts.

    _rebuild_tensor(storage, offset, size, stride)                                              torch < 0.4
    _rebuild_tensor_v2(storage, offset, size, stride, requires_grad, hooks[, metadata])
    _rebuild_tensor_v3(bytes storage, offset, size, stride, requires_grad, hooks, dtype[, metadata])
    _rebuild_parameter(tensor, requires_grad, hooks)
    _rebuild_meta_tensor_no_storage(dtype, size, stride, requires_grad)
    _rebuild_device_tensor_from_numpy(array, dtype, device, requires_grad)      and ..._from_cpu_tensor

Offset, size and stride count elements of the tensor's own type. Facts from torch 2.13 `torch/_utils.py`.
"""

from __future__ import annotations

from math import prod
from typing import Any

from anyckpt.core.box import Shape
from anyckpt.core.dtypes import DTYPES, DType
from anyckpt.core.inert import Global, Mapping, NumpyArray, Opaque, Text
from anyckpt.core.source import Absent
from anyckpt.core.tensor import Tensor, from_source
from anyckpt.finding import fail
from anyckpt.pickle.call import Call, Context, Row
from anyckpt.pickle.storage import STORAGE_DTYPES, Storage, sketch
from anyckpt.pickle.weights_only import QSCHEMES, TORCH_DTYPES

MAX_INT = 2**63 - 1
MAX_AXES = 64  # what torch and numpy can make


def integers(value: Any, what: str) -> Shape:
    """A size or stride: a tuple or list of integers, none of them a bool, all within 64 bits."""
    if not isinstance(value, tuple | list):
        raise fail("malformed-pickle", f"the {what} of a tensor is {sketch(value)}, not integers")
    if len(value) > MAX_AXES:
        raise fail("limit-exceeded", f"the {what} of a tensor has {len(value)} axes")
    for item in value:
        if type(item) is not int:
            raise fail("malformed-pickle", f"the {what} of a tensor holds {sketch(item)}, not integers")
        if item < 0:
            raise fail("negative-size", f"the {what} of a tensor holds {sketch(item)}")
        if item > MAX_INT:
            raise fail("size-overflow", f"the {what} of a tensor is beyond 64 bits")
    return tuple(value)


def checked_size(value: Any, itemsize: int) -> Shape:
    """A tensor's shape. Raises CheckpointError [negative-size, size-overflow]."""
    shape = integers(value, "size")
    n_bytes = itemsize
    for n in shape:
        n_bytes *= n
    if n_bytes > MAX_INT:
        raise fail("size-overflow", f"the size {list(shape)[:8]} of a tensor is beyond 64 bits")
    return shape


def view(storage: Any, offset: Any, size: Any, stride: Any, dtype: DType | None = None) -> Tensor:
    """A tensor over a part of a storage, with every bound checked in exact integers.

    The piece's source is the smallest span that holds its elements; strides are given where the elements are not in C
    order (axes of one element don't matter). `dtype` overrides the storage's own.
    """
    if not isinstance(storage, Storage):
        raise fail("malformed-pickle", f"a tensor is made over {sketch(storage)} instead of a storage")
    kind = dtype or storage.dtype or DTYPES["uint8"]
    shape, strides = checked_size(size, kind.itemsize), integers(stride, "stride")
    (first,) = integers((offset,), "storage offset")
    if len(shape) != len(strides):
        raise fail("malformed-pickle", f"a tensor has {len(shape)} sizes and {len(strides)} strides")
    extent, in_order, expected = 1, True, 1
    for n, step in zip(reversed(shape), reversed(strides), strict=True):
        if n == 0:
            extent, in_order = 0, True
            break
        if n > 1:
            extent += (n - 1) * step
            in_order = in_order and step == expected
            expected *= n
    end = kind.nbytes(first + extent)
    if end > storage.n_bytes:
        raise fail(
            "offset-out-of-bounds",
            f"a tensor of size {list(shape)[:8]} reaches byte {end} of storage {sketch(storage.key)}, which has "
            f"{storage.n_bytes}",
        )
    if kind.block > 1 and (first % kind.block or not in_order):
        raise fail("unsupported", f"a strided view of packed {kind} elements in storage {sketch(storage.key)}")
    start = kind.nbytes(first)
    source = storage.part(start, end - start, kind.unit or kind.itemsize)
    return from_source(kind, shape, source, None if in_order else strides)


def _check_flags(call: Call, requires_grad: Any, hooks: Any) -> None:
    if type(requires_grad) is not bool:
        raise fail("malformed-pickle", f"requires_grad of a tensor is {sketch(requires_grad)}")
    if hooks is not None and not (isinstance(hooks, Mapping) and not hooks and not hooks.attributes):
        call.context.suspect("unknown", "a tensor carries backward hooks, which are code")


def _marked(tensor: Tensor, metadata: Any) -> Tensor:
    """The value under conj and neg bits: the file holds the bytes before either was applied."""
    if metadata is None:
        return tensor
    if not isinstance(metadata, dict) or not all(type(on) is bool for on in metadata.values()):
        raise fail("malformed-pickle", f"the metadata of a tensor is {sketch(metadata)}")
    from anyckpt.core.ops import Conj, Neg

    for name, op in (("conj", Conj), ("neg", Neg)):
        if metadata.get(name):
            if not tensor.dtype.numpy:
                raise fail("unsupported", f"a tensor of type {tensor.dtype} with its {name} bit set")
            tensor = Tensor(tensor.dtype, tensor.shape, op=op(tensor))
    return tensor


def _tensor_v1(call: Call) -> Any:
    call.expect(4)
    return view(*call.args)


def _tensor_v2(call: Call) -> Any:
    call.expect(6, 7)
    storage, offset, size, stride, requires_grad, hooks = call.args[:6]
    tensor = view(storage, offset, size, stride)
    _check_flags(call, requires_grad, hooks)
    return _marked(tensor, call.args[6]) if len(call.args) == 7 else tensor


def _tensor_v3(call: Call) -> Any:
    call.expect(7, 8)
    storage, offset, size, stride, requires_grad, hooks, dtype = call.args[:7]
    tensor = view(storage, offset, size, stride, checked_dtype(dtype))
    _check_flags(call, requires_grad, hooks)
    return _marked(tensor, call.args[7]) if len(call.args) == 8 else tensor


def checked_dtype(value: Any) -> DType:
    """An element type that a tensor can have. Raises CheckpointError [unknown-dtype, malformed-pickle]."""
    if isinstance(value, DType):
        return value
    if isinstance(value, Global) and value.module == "torch" and value.name in TORCH_DTYPES:
        raise fail("unknown-dtype", f"a tensor has the type {value}, whose bytes torch does not define")
    raise fail("malformed-pickle", f"the type of a tensor is {sketch(value)}")


def _parameter(call: Call) -> Any:
    call.expect(3)
    data, requires_grad, hooks = call.args
    _check_flags(call, requires_grad, hooks)
    return data


def _parameter_class(call: Call) -> Any:
    """`Parameter(data, requires_grad)`; torch < 0.4 made it empty and gave it its data with BUILD."""
    data = call.args[0] if call.args else None
    return data if isinstance(data, Tensor) else call.opaque()


def _build_tensor(target: Opaque, state: Any, context: Context) -> Any:
    """The `__setstate__` of torch < 0.4: (storage, offset, size, stride), or (data, …) for a Parameter."""
    if isinstance(state, tuple) and state and isinstance(state[0], Tensor):
        return state[0]
    if not isinstance(state, tuple) or len(state) != 4:
        raise fail("malformed-pickle", f"{target.cls} is given {sketch(state)} for its state")
    return view(*state)


def _tensor_class(call: Call) -> Any:
    call.expect(0)
    return call.opaque()


def _meta(call: Call) -> Any:
    call.expect(4)
    dtype = checked_dtype(call.args[0])
    shape = checked_size(call.args[1], dtype.itemsize)
    return from_source(dtype, shape, Absent(dtype.nbytes(prod(shape)), "a tensor on the meta device has no data"))


def _device_tensor(call: Call) -> Any:
    call.expect(4)
    data, dtype = call.args[0], checked_dtype(call.args[1])
    tensor = data.tensor if isinstance(data, NumpyArray) else data
    if not isinstance(tensor, Tensor):
        raise fail("malformed-pickle", f"{call.function} is given {sketch(data)} instead of an array")
    if tensor.dtype == dtype:
        return tensor
    from anyckpt.core.ops import cast

    return cast(tensor, dtype)


def _size(call: Call) -> Any:
    call.expect(0, 1)
    return integers(call.args[0], "size") if call.args else ()


def _device(call: Call) -> Any:
    call.expect(1, 2)
    kind, *index = call.args
    if not isinstance(kind, str) or not all(type(i) is int for i in index):
        raise fail("malformed-pickle", f"torch.device of {sketch(kind)}")
    return Text(":".join([kind, *map(str, index)]), "torch.device")


def _layout(call: Call) -> Any:
    call.expect(1)
    if not isinstance(call.args[0], str):
        raise fail("malformed-pickle", f"{call.function} of {sketch(call.args[0])}")
    return Text(call.args[0], "torch.layout")


_TENSOR_CLASSES = """
Tensor FloatTensor DoubleTensor HalfTensor BFloat16Tensor LongTensor IntTensor ShortTensor CharTensor ByteTensor
BoolTensor
""".split()
_CONSTANTS = """
contiguous_format channels_last channels_last_3d preserve_format strided sparse_coo sparse_csr sparse_csc sparse_bsr
sparse_bsc jagged
""".split()

ROWS: dict[str, Row] = {
    # Naming a dtype gives our own; the few that have no bytes of their own (int1…uint7) stay names.
    **{f"torch.{name}": Row(value=DTYPES.get(name)) for name in TORCH_DTYPES},
    **{f"torch.{name}": Row() for name in (*QSCHEMES, *_CONSTANTS)},
    **{name: Row() for name in STORAGE_DTYPES},
    **{f"torch.{name}": Row(_tensor_class, _build_tensor) for name in _TENSOR_CLASSES},
    **{f"torch.cuda.{name}": Row(_tensor_class, _build_tensor) for name in _TENSOR_CLASSES[1:]},
    "torch.nn.parameter.Parameter": Row(_parameter_class, _build_tensor),
    "torch.nn.parameter.Buffer": Row(_parameter_class, _build_tensor),
    "torch.Size": Row(_size), "torch.device": Row(_device), "torch.serialization._get_layout": Row(_layout),
    "torch._utils._rebuild_tensor": Row(_tensor_v1, rebuilds=True),
    "torch._utils._rebuild_tensor_v2": Row(_tensor_v2, rebuilds=True),
    "torch._utils._rebuild_tensor_v3": Row(_tensor_v3, rebuilds=True),
    "torch._utils._rebuild_parameter": Row(_parameter, rebuilds=True),
    "torch._utils._rebuild_meta_tensor_no_storage": Row(_meta, rebuilds=True),
    "torch._utils._rebuild_device_tensor_from_numpy": Row(_device_tensor, rebuilds=True),
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": Row(_device_tensor, rebuilds=True),
    "torch._utils._rebuild_xla_tensor": Row(_device_tensor, rebuilds=True),
}
