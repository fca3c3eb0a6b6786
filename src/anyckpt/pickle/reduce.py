"""How objects that are not plain data are written: as calls of names that torch's restricted reader allows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from anyckpt.core.dtypes import DType
from anyckpt.core.inert import Global, Mapping, NumpyArray, Opaque, TensorSubclass, Text
from anyckpt.core.tensor import Tensor
from anyckpt.errors import Refused
from anyckpt.pickle.storage import STORAGE_CLASSES
from anyckpt.pickle.weights_only import TORCH_DTYPES, WEIGHTS_ONLY

if TYPE_CHECKING:
    from anyckpt.pickle.emit import StorageRef

Storing = Callable[[Tensor], "StorageRef"]
Replacing = Callable[[Any], Any] | None


@dataclass(frozen=True, slots=True)
class Name:
    """A global that is surely allowed."""

    module: str
    name: str


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """`function(*args)`, a persistent id where `function` is None; then items of a dict, then BUILD's state.

    `new`: `function` is a class, and its instance is made without calling it (`cls.__new__(cls, *args)`).
    """

    function: Name | None
    args: tuple[Any, ...]
    items: dict[Any, Any] | None = None
    state: Any = None
    new: bool = False


def dtype_name(dtype: DType) -> Name:
    """torch's name of an element type. Raises Refused where torch has no such type."""
    if dtype.name not in TORCH_DTYPES:
        raise Refused(f"torch has no element type {dtype.name}", hint="convert these tensors to another type first")
    return Name("torch", dtype.name)


def named(value: Global, on_opaque: Replacing) -> Any:
    """A class or function that the data name."""
    if str(value) in WEIGHTS_ONLY:
        return Name(value.module, value.name)
    return _stand_in(value, str(value), on_opaque)


def lowered(value: Any, storage: Storing, on_opaque: Replacing) -> Any:
    """The value in terms of plain data, names and calls."""
    for kind, lower in _LOWERING:
        if isinstance(value, kind):
            return lower(value, storage, on_opaque)
    return _stand_in(value, type(value).__name__, on_opaque)


def _stand_in(value: Any, what: str, on_opaque: Replacing) -> Any:
    if on_opaque is None:
        raise Refused(f"{what} can't be written so that torch.load(weights_only=True) accepts it")
    stand_in = on_opaque(value)
    if not isinstance(stand_in, str | int | float | bool | None):
        raise TypeError(f"on_opaque must give a plain value, not a {type(stand_in).__name__}")
    return stand_in


def _no_hooks() -> Call:
    """Backward hooks: an empty OrderedDict of each tensor's own, for torch keeps the very object."""
    return Call(Name("collections", "OrderedDict"), ())


def _view(tensor: Tensor, ref: StorageRef) -> tuple[Call, int, tuple[int, ...], tuple[int, ...]]:
    """The (storage, offset, size, stride) that every rebuild function begins with."""
    cls = STORAGE_CLASSES.get(tensor.dtype.name)
    if cls is None:
        dtype_name(tensor.dtype)
        storage, n = Name("torch.storage", "UntypedStorage"), ref.n_bytes
    else:
        # Packed quantized storages count bytes.
        storage, n = Name("torch", cls), ref.n_bytes // tensor.dtype.itemsize
    pid = Call(None, (("storage", storage, ref.key, ref.location, n),))
    return pid, ref.offset, tensor.shape, ref.stride


def _rebuild(tensor: Tensor, storage: Storing) -> tuple[Name, tuple[Any, ...]]:
    if tensor.dtype.kind == "quantized":
        raise Refused(f"a {tensor.dtype} tensor without its scale can't be written for torch")
    if not tensor.is_stored:
        strides = _contiguous(tensor.shape)
        return Name("torch._utils", "_rebuild_meta_tensor_no_storage"), (tensor.dtype, tensor.shape, strides, False)
    args = (*_view(tensor, storage(tensor)), False, _no_hooks())
    if tensor.dtype.name in STORAGE_CLASSES:
        return Name("torch._utils", "_rebuild_tensor_v2"), args
    return Name("torch._utils", "_rebuild_tensor_v3"), (*args, tensor.dtype)


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(prod(max(n, 1) for n in shape[axis + 1 :]) for axis in range(len(shape)))


def _tensor(value: Tensor, storage: Storing, on_opaque: Replacing) -> Any:
    return Call(*_rebuild(value, storage))


def _array(value: NumpyArray, storage: Storing, on_opaque: Replacing) -> Any:
    if not value.is_scalar:
        return value.tensor
    number = value.tensor.numpy().item()
    return float(number) if not isinstance(number, bool | int | float | complex) else number


def _subclass(value: TensorSubclass, storage: Storing, on_opaque: Replacing) -> Any:
    path, state = str(value.cls), value.state
    if path == "torch._utils._rebuild_qtensor" and value.base is not None:
        parts = [state["scale"], state["zero_point"]] + ([] if state["axis"] is None else [state["axis"]])
        params = (Name("torch", state["scheme"]), *parts)
        args: tuple[Any, ...] = (*_view(value.base, storage(value.base)), params, False, _no_hooks())
        return Call(Name("torch._utils", "_rebuild_qtensor"), args)
    if path == "torch._utils._rebuild_sparse_tensor":
        names = [name for name in state if name not in ("layout", "values", "is_coalesced")]
        size = Call(Name("torch", "Size"), (value.shape,))
        data = (*(state[name] for name in names), state["values"], size)
        if state.get("is_coalesced") is not None:
            data += (state["is_coalesced"],)
        layout = Call(Name("torch.serialization", "_get_layout"), (state["layout"],))
        return Call(Name("torch._utils", "_rebuild_sparse_tensor"), (layout, data))
    if path == "torch._utils._rebuild_nested_tensor":
        return Call(Name("torch._utils", "_rebuild_nested_tensor"), tuple(state.values()))
    if value.base is not None and path in ("torch.Tensor", "torch.nn.parameter.Parameter"):
        function, args = _rebuild(value.base, storage)
        of_type = (function, Name("torch", "Tensor"), args, value.attributes())
        return Call(Name("torch._tensor", "_rebuild_from_type_v2"), of_type)
    if value.base is not None:
        return value.base
    return _stand_in(value, path, on_opaque)


def _mapping(value: Mapping, storage: Storing, on_opaque: Replacing) -> Any:
    if value.kind == "collections.Counter":
        return Call(Name("collections", "Counter"), (dict(value),))
    if value.kind == "collections.OrderedDict":
        return Call(Name("collections", "OrderedDict"), (), items=dict(value), state=value.attributes or None)
    return dict(value)


_KEYS = (str, int, float, bool, bytes, complex, type(None), DType, Tensor)


def checked_key(key: Any, on_opaque: Replacing) -> Any:
    """A dict key or set member that is hashable when loaded: frozensets and Namespaces lose that on the way."""
    if isinstance(key, (*_KEYS, Call)) or (isinstance(key, tuple) and all(isinstance(part, _KEYS) for part in key)):
        return key
    if isinstance(key, Text | NumpyArray) and not (isinstance(key, NumpyArray) and not key.is_scalar):
        return key
    return _stand_in(key, f"a key of type {type(key).__name__}", on_opaque)


def _order(member: Any) -> tuple[str, str]:
    """Sets of text have another order in every process; sorting makes the bytes the same."""
    return type(member).__name__, repr(member) if isinstance(member, str | bytes | int | float) else ""


def _set(value: Any, storage: Storing, on_opaque: Replacing) -> Any:
    members = [checked_key(member, on_opaque) for member in sorted(value, key=_order)]
    return Call(Name("builtins", "set"), (members,))


def _text(value: Text, storage: Storing, on_opaque: Replacing) -> Any:
    if value.kind == "torch.device":
        return Call(Name("torch", "device"), (value.text,))
    if value.kind == "torch.layout":
        return Call(Name("torch.serialization", "_get_layout"), (value.text,))
    return value.text


def _bytes(value: bytes | bytearray, storage: Storing, on_opaque: Replacing) -> Any:
    return Call(Name("_codecs", "encode"), (value.decode("latin-1"), "latin1"))


def _complex(value: complex, storage: Storing, on_opaque: Replacing) -> Any:
    return Call(Name("builtins", "complex"), (value.real, value.imag))


_NAMESPACES = ("argparse.Namespace", "types.SimpleNamespace")


def _opaque(value: Opaque, storage: Storing, on_opaque: Replacing) -> Any:
    if value.class_name in _NAMESPACES:
        return value.attributes() | (value.kwargs or {})
    if value.class_name == "collections.deque" and (not value.args or isinstance(value.args[0], list | tuple)):
        return [*(value.args[0] if value.args else ()), *value.items]
    return _stand_in(value, value.class_name, on_opaque)


_LOWERING: tuple[tuple[Any, Callable[[Any, Storing, Replacing], Any]], ...] = (
    (Tensor, _tensor),
    (Mapping, _mapping),
    (dict, lambda value, storage, on_opaque: dict(value)),
    (NumpyArray, _array),
    (TensorSubclass, _subclass),
    (Opaque, _opaque),
    (Text, _text),
    (bytes | bytearray, _bytes),
    (set | frozenset, _set),
    (complex, _complex),
    # Subclasses (named tuples, numpy's float64 and str_) become what they derive from.
    *((kind, lambda value, storage, on_opaque, kind=kind: kind(value)) for kind in (int, float, str, list, tuple)),
)
