"""Handlers for numpy: arrays, scalars, dtypes and random generators.

    dtype('f4', False, True)                        BUILD (3, '<', subdtype, names, fields, size, alignment, flags…)
    _reconstruct(ndarray, (0,), b'b')               BUILD (1, shape, dtype, fortran_order, bytes or list of objects)
    scalar(dtype, bytes)                            _frombuffer(bytes, dtype, shape, order)          protocol 5

A dtype stays an Opaque until an array needs it. Structured, text, date and object arrays are kept as Opaque.
Facts from numpy 1.26 and 2.4 `_core/src/multiarray/methods.c`, `descriptor.c`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from anyckpt.core.box import Shape
from anyckpt.core.dtypes import DTYPES, DType
from anyckpt.core.inert import Global, NumpyArray, Opaque
from anyckpt.core.source import Inline
from anyckpt.core.tensor import Tensor, from_source
from anyckpt.finding import fail
from anyckpt.pickle.call import Call, Context, Row, record
from anyckpt.pickle.storage import sketch
from anyckpt.pickle.tensors import checked_size

_KINDS = {
    "f2": "float16", "f4": "float32", "f8": "float64", "b1": "bool", "c8": "complex64", "c16": "complex128",
    "i1": "int8", "i2": "int16", "i4": "int32", "i8": "int64", "u1": "uint8", "u2": "uint16", "u4": "uint32",
    "u8": "uint64",
}
_ML_DTYPES = ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
_CORES = ("numpy.core", "numpy._core")
_NDARRAY = frozenset(("numpy.ndarray",))


@dataclass(frozen=True, slots=True)
class _Layout:
    """What the bytes of an array are: `dtype` for numbers, `text` "U" or "S" for strings."""

    dtype: DType | None
    itemsize: int
    big: bool
    text: str = ""


def _layout(value: Any) -> _Layout | None:
    """Interpret a `numpy.dtype` object; None for what is not numbers or text."""
    if isinstance(value, Global):
        value = Opaque(Global("numpy", "dtype"), (value,))
    if not isinstance(value, Opaque) or str(value.cls) != "numpy.dtype" or not value.args:
        raise fail("malformed-pickle", f"the dtype of an array is {sketch(value)}")
    spec, state = value.args[0], value.state
    big = isinstance(state, tuple) and len(state) > 1 and state[1] in (">", b">")
    if isinstance(spec, bytes):
        spec = spec.decode("latin-1")
    if isinstance(spec, Global):
        name = spec.name if spec.module == "ml_dtypes" else ""
        return _Layout(DTYPES[name], DTYPES[name].itemsize, big) if name in _ML_DTYPES else None
    if not isinstance(spec, str) or len(spec) > 20:
        return None
    order, code = (spec[0], spec[1:]) if spec[:1] in ("<", ">", "|", "=") else ("", spec)
    big = big or order == ">"
    if code in _KINDS:
        dtype = DTYPES[_KINDS[code]]
        return _Layout(dtype, dtype.itemsize, big)
    if code[:1] in ("U", "S") and code[1:].isascii() and code[1:].isdigit():
        return _Layout(None, int(code[1:]) * (4 if code[0] == "U" else 1), big, code[0])
    return None


def _to_bytes(data: Any) -> bytes:
    """Array data; Python 2 wrote it as a byte string that our machine may have decoded as UTF-8."""
    if isinstance(data, str):
        return data.encode("utf-8", "surrogatepass")
    if not isinstance(data, bytes):
        raise fail("malformed-pickle", f"the data of an array are {sketch(data)}")
    return data


def _array(layout: _Layout, shape: Any, fortran: Any, data: bytes, context: Context) -> Tensor:
    """A tensor over array bytes, little-endian; Fortran order becomes strides."""
    dtype = layout.dtype
    assert dtype is not None
    sizes = checked_size(shape, dtype.itemsize)
    if prod(sizes) * dtype.itemsize != len(data):
        raise fail("size-mismatch", f"an array of size {list(sizes)[:8]} and type {dtype} has {len(data)} bytes")
    unit = dtype.unit or dtype.itemsize
    if layout.big and unit > 1:
        import numpy as np

        context.spend(len(data))
        data = np.frombuffer(data, np.dtype(f"u{unit}")).byteswap().tobytes()
    return from_source(dtype, sizes, Inline(data), _fortran_strides(sizes) if fortran and len(sizes) > 1 else None)


def _fortran_strides(shape: Shape) -> Shape:
    strides = [1] * len(shape)
    for axis in range(1, len(shape)):
        strides[axis] = strides[axis - 1] * max(shape[axis - 1], 1)
    return tuple(strides)


def _reconstruct(call: Call) -> Any:
    call.expect(3)
    if not isinstance(call.args[0], Global):
        raise fail("malformed-pickle", f"an array of the class {sketch(call.args[0])}")
    if str(call.args[0]) != "numpy.ndarray":
        call.context.suspect("unknown", f"an array is made of the class {call.args[0]}")
    return call.opaque()


def _build_array(target: Opaque, state: Any, context: Context) -> Any:
    if not isinstance(state, tuple) or len(state) not in (4, 5):
        raise fail("malformed-pickle", f"an array is given {sketch(state)} for its state")
    shape, dtype, fortran, data = state[-4:]
    layout = _layout(dtype)
    if layout is None or layout.dtype is None or isinstance(data, list) or str(target.args[0]) not in _NDARRAY:
        target.state = state
        return target
    return NumpyArray(_array(layout, shape, fortran, _to_bytes(data), context))


def _scalar(call: Call) -> Any:
    call.expect(1, 2)
    layout = _layout(call.args[0])
    if layout is None or len(call.args) == 1:
        return call.opaque()
    data = _to_bytes(call.args[1])
    if len(data) != layout.itemsize:
        raise fail("size-mismatch", f"a numpy scalar of {layout.itemsize} bytes has {len(data)}")
    if layout.text:
        call.context.spend(len(data))
        if layout.text == "S":
            return data.rstrip(b"\0")
        return data.decode("utf-32-be" if layout.big else "utf-32-le", "replace").rstrip("\0")
    return NumpyArray(_array(layout, (), False, data, call.context), is_scalar=True)


def _frombuffer(call: Call) -> Any:
    call.expect(4)
    data, dtype, shape, order = call.args
    layout = _layout(dtype)
    if layout is None or layout.dtype is None:
        return call.opaque()
    if order not in ("C", "F"):
        raise fail("malformed-pickle", f"an array has the order {sketch(order)}")
    return NumpyArray(_array(layout, shape, order == "F", _to_bytes(data), call.context))


def _dtype(call: Call) -> Any:
    call.expect(1, 2, 3)
    if not isinstance(call.args[0], str | bytes | Global):
        raise fail("malformed-pickle", f"numpy.dtype of {sketch(call.args[0])}")
    return call.opaque()


_GENERATORS = {
    "numpy.random._mt19937.MT19937", "numpy.random._pcg64.PCG64", "numpy.random._pcg64.PCG64DXSM",
    "numpy.random._philox.Philox", "numpy.random._sfc64.SFC64", "numpy.random.bit_generator.SeedSequence",
}
_CTORS = "numpy.random._pickle."


def _generator(call: Call) -> Any:
    """The four constructors call what they are given: only numpy's own generators may stand there."""
    for arg in call.args:
        named = isinstance(arg, Global) and (str(arg) in _GENERATORS or str(arg).startswith(_CTORS))
        made = isinstance(arg, Opaque) and str(arg.cls).startswith(_CTORS)
        if not (named or made or arg is None or isinstance(arg, str | int)):
            call.context.suspect("unknown", f"{call.function} is told to call {sketch(arg)}")
    return call.opaque()


_TYPES = """
bool bool_ int8 int16 int32 int64 uint8 uint16 uint32 uint64 intp uintp float16 float32 float64 float128 longdouble
complex64 complex128 str_ bytes_ object_ void datetime64 timedelta64 generic number integer floating ndarray
""".split()

ROWS: dict[str, Row] = {
    "numpy.dtype": Row(_dtype),
    **{f"numpy.{name}": Row() for name in _TYPES},
    **{f"ml_dtypes.{name}": Row() for name in _ML_DTYPES},
    **{f"{core}.multiarray._reconstruct": Row(_reconstruct, _build_array) for core in _CORES},
    **{f"{core}.multiarray.scalar": Row(_scalar) for core in _CORES},
    **{f"{core}.numeric._frombuffer": Row(_frombuffer) for core in _CORES},
    **{
        f"{_CTORS}{name}": Row(_generator)
        for name in ("__randomstate_ctor", "__generator_ctor", "__bit_generator_ctor", "__legacy_ctor")
    },
    "numpy.random.bit_generator.__pyx_unpickle_SeedSequence": Row(_generator),
    **{name: Row(record) for name in _GENERATORS},
}
