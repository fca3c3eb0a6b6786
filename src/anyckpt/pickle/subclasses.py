"""Handlers for tensors that are more than a view of a storage: quantized, sparse, nested, with attributes, wrapped.

    _rebuild_qtensor(storage, offset, size, stride, (scheme, …), requires_grad, hooks)
        (per_tensor_affine, scale, zero_point) or (per_channel_affine[_float_qparams], scales, zero_points, axis)
    _rebuild_sparse_tensor(layout, (indices, values, size[, is_coalesced]))                 coo
    _rebuild_sparse_tensor(layout, (compressed, plain, values, size))                       csr csc bsr bsc
    _rebuild_nested_tensor(buffer, sizes, strides, offsets)
    _rebuild_from_type_v2(rebuild function, class, its arguments, state)
    _rebuild_wrapper_subclass(class, dtype, size, stride, offset, layout, device, requires_grad)   data are in the state

Facts from torch 2.13 `torch/_utils.py` and `torch/_tensor.py`.
"""

from __future__ import annotations

from typing import Any

from anyckpt.core.inert import Global, Opaque, TensorSubclass, Text
from anyckpt.core.tensor import Tensor
from anyckpt.finding import fail
from anyckpt.pickle.call import Call, Row, unreadable
from anyckpt.pickle.storage import sketch
from anyckpt.pickle.tensors import checked_dtype, checked_size, view

_PLAIN_CLASSES = frozenset(
    ("torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer", "torch.nn.Parameter")
)
_BUFFER_MARKS = frozenset(("persistent", "_is_buffer"))


def _tensor(value: Any, what: str) -> Tensor:
    if not isinstance(value, Tensor):
        raise fail("malformed-pickle", f"the {what} of a tensor is {sketch(value)}")
    return value


def _qtensor(call: Call) -> Any:
    call.expect(7)
    storage, offset, size, stride, params = call.args[:5]
    base = view(storage, offset, size, stride)
    if base.dtype.kind != "quantized":
        raise fail("malformed-pickle", f"a quantized tensor lies over a storage of {base.dtype}")
    if not isinstance(params, tuple) or not params or not isinstance(params[0], Global):
        raise fail("malformed-pickle", f"the parameters of a quantized tensor are {sketch(params)}")
    scheme = params[0].name
    if scheme == "per_tensor_affine" and len(params) == 3:
        scale, zero_point, axis = params[1], params[2], None
        if type(scale) is not float or type(zero_point) is not int:
            raise fail("malformed-pickle", "the scale or zero point of a quantized tensor is no number")
    elif scheme in ("per_channel_affine", "per_channel_affine_float_qparams") and len(params) == 4:
        scale, zero_point, axis = params[1:]
        if type(axis) is not int or not 0 <= axis < base.ndim:
            raise fail("malformed-pickle", f"the axis of a quantized tensor is {sketch(axis)}")
        for what, given in (("scales", scale), ("zero points", zero_point)):
            n = given.size if isinstance(given, Tensor) else len(given) if isinstance(given, list) else -1
            if n != base.shape[axis]:
                raise fail("size-mismatch", f"a quantized tensor of size {list(base.shape)} has {n} {what}")
    else:
        raise fail("unsupported", f"the quantization scheme {sketch(params[0])}")
    state = {"scheme": scheme, "scale": scale, "zero_point": zero_point, "axis": axis}
    return TensorSubclass(call.function, base, state, base.dtype, base.shape)


_COMPRESSED = frozenset(("torch.sparse_csr", "torch.sparse_csc", "torch.sparse_bsr", "torch.sparse_bsc"))


def _sparse(call: Call) -> Any:
    call.expect(2)
    layout, data = call.args
    name = layout.text if isinstance(layout, Text) else ""
    if not isinstance(data, tuple) or name not in _COMPRESSED | {"torch.sparse_coo"}:
        raise fail("malformed-pickle", f"a sparse tensor has the layout {name[:40]!r} and data {sketch(data)}")
    if name == "torch.sparse_coo" and len(data) in (3, 4):
        values, size = _tensor(data[1], "values"), data[2]
        state: dict[str, Any] = {
            "layout": name, "indices": _tensor(data[0], "indices"), "values": values,
            "is_coalesced": data[3] if len(data) == 4 else None,
        }
    elif name in _COMPRESSED and len(data) == 4:
        values, size = _tensor(data[2], "values"), data[3]
        state = {
            "layout": name, "compressed_indices": _tensor(data[0], "compressed indices"),
            "plain_indices": _tensor(data[1], "plain indices"), "values": values,
        }
    else:
        raise fail("malformed-pickle", f"a sparse tensor ({name}) has {len(data)} parts")
    shape = checked_size(size, values.dtype.itemsize)
    return TensorSubclass(Global("torch._utils", "_rebuild_sparse_tensor"), None, state, values.dtype, shape)


def _nested(call: Call) -> Any:
    call.expect(4)
    parts = ("buffer", "sizes", "strides", "offsets")
    state = {name: _tensor(value, name) for name, value in zip(parts, call.args, strict=True)}
    return TensorSubclass(call.function, None, state, state["buffer"].dtype, ())


def _jagged(call: Call) -> Any:
    """`_rebuild_njt(constructor arguments)`: a nested tensor of the jagged layout, kept as its parts."""
    call.expect(1)
    state = call.args[0]
    if not isinstance(state, dict):
        raise fail("malformed-pickle", f"{call.function} is given {sketch(state)}")
    values = state.get("values")
    return TensorSubclass(call.function, None, state, values.dtype if isinstance(values, Tensor) else None, ())


def _wrapper(call: Call) -> Any:
    call.expect(8)
    cls, dtype, size = call.args[:3]
    if not isinstance(cls, Global):
        raise fail("malformed-pickle", f"a tensor subclass is {sketch(cls)}, not a class")
    kind = checked_dtype(dtype)
    return TensorSubclass(cls, None, None, kind, checked_size(size, kind.itemsize))


def _parameter_with_state(call: Call) -> Any:
    call.expect(4)
    base, state = call.args[0], call.args[3]
    return _with_state(call, Global("torch.nn.parameter", "Parameter"), base, state)


def _from_type(call: Call) -> Any:
    call.expect(4)
    function, cls, args, state = call.args
    if not isinstance(function, Global) or not rebuilds(str(function)):
        call.context.suspect("dangerous", f"{call.function} is told to call {sketch(function)}, no rebuild function")
        return call.opaque()
    if not isinstance(cls, Global) or not isinstance(args, tuple):
        raise fail("malformed-pickle", f"{call.function} is given {sketch(cls)} and {sketch(args)}")
    return _with_state(call, cls, call.context.invoke(function, args), state)


def rebuilds(path: str) -> bool:
    """Whether a rebuild function may be called on behalf of another one."""
    from anyckpt.pickle.allow import ALLOW

    row = ALLOW.get(path)
    return row is not None and row.rebuilds


def _with_state(call: Call, cls: Global, base: Any, state: Any) -> Any:
    """A tensor of class `cls` with Python attributes, reduced to the plain tensor where that loses nothing."""
    if unreadable(base):
        return base
    for part in state if isinstance(state, tuple) else (state,):
        call.context.spend(len(part) if isinstance(part, dict) else 1)
    attributes = Opaque(cls, state=state).attributes()
    if isinstance(base, TensorSubclass):
        if base.state is None:
            return TensorSubclass(cls, None, state, base.dtype, base.shape)
        if not attributes:
            return base
        return TensorSubclass(cls, None, {"tensor": base, **attributes}, base.dtype, base.shape)
    if not isinstance(base, Tensor):
        raise fail("malformed-pickle", f"a tensor with attributes is made of {sketch(base)}")
    if str(cls) in _PLAIN_CLASSES:
        # FSDP1 leaves `_has_been_cloned`, dynamo `_dynamo_*`, nn.Buffer its two marks: nothing that a value depends on.
        kept = {k: v for k, v in attributes.items() if not k.startswith("_") and k not in _BUFFER_MARKS}
        attributes = attributes if kept else {}
    return TensorSubclass(cls, base, state, base.dtype, base.shape) if attributes else base


def _restore_type_tag(call: Call) -> Any:
    """TorchScript's `restore_type_tag(value, "Dict[str, Tensor]")`: the value itself."""
    call.expect(2)
    return call.args[0]


ROWS: dict[str, Row] = {
    "torch._utils._rebuild_qtensor": Row(_qtensor, rebuilds=True),
    "torch._utils._rebuild_sparse_tensor": Row(_sparse, rebuilds=True),
    "torch._utils._rebuild_sparse_csr_tensor": Row(_sparse, rebuilds=True),
    "torch._utils._rebuild_nested_tensor": Row(_nested, rebuilds=True),
    "torch.nested._internal.nested_tensor._rebuild_njt": Row(_jagged, rebuilds=True),
    "torch._utils._rebuild_wrapper_subclass": Row(_wrapper, rebuilds=True),
    "torch._utils._rebuild_parameter_with_state": Row(_parameter_with_state, rebuilds=True),
    "torch._tensor._rebuild_from_type_v2": Row(_from_type),
    "torch._tensor._rebuild_from_type": Row(_from_type),
    "torch.tensor._rebuild_from_type": Row(_from_type),
    "torch.jit._pickle.restore_type_tag": Row(_restore_type_tag),
    # TorchScript's typed lists: `build_intlist([…])` and kin give the list itself.
    **{
        f"torch.jit._pickle.build_{kind}list": Row(lambda call: call.args[0] if call.args else [])
        for kind in ("int", "tensor", "double", "bool")
    },
}
