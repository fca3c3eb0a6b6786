"""The one table of element types.

A dtype names how elements lie in a file. Most have one element per `itemsize` bytes. Packed and block-quantized types
have `block` elements per `itemsize` bytes along the last axis (float4: 2 per byte; ggml q4_0: 32 per 18 bytes).

Names are torch's (`float8_e4m3fn`), or ggml's in lower case (`q4_k`). numpy is imported only when an array is made.
Sources: c10/core/ScalarType.h and torch/storage.py (torch 2.13), safetensors 0.8.0 `tensor.rs`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import numpy as np

Kind = Literal["float", "int", "uint", "bool", "complex", "quantized", "raw"]


@dataclass(frozen=True, slots=True)
class DType:
    """One element type.

    `itemsize` is the bytes of one block of `block` elements. `numpy` is the numpy or ml_dtypes name, "" where neither
    has the type: its arrays are then raw bytes. `safetensors` is that format's spelling, "" where it has none.
    `since_torch` is the first torch release that can load it. `unit` is the bytes reversed together when a file is of
    the other byte order (a complex number is two units).
    """

    name: str
    itemsize: int
    kind: Kind
    numpy: str = ""
    safetensors: str = ""
    block: int = 1
    unit: int = 0
    since_torch: str = ""

    def __repr__(self) -> str:
        return self.name

    def nbytes(self, n_elements: int) -> int:
        """Bytes of `n_elements` elements in a row; a last block that is not full counts whole."""
        return -(-n_elements // self.block) * self.itemsize

    @property
    def is_floating(self) -> bool:
        """Whether a cast to another float type means anything for it."""
        return self.kind == "float"

    def numpy_dtype(self) -> np.dtype[Any]:
        """The numpy dtype of an array of these elements; `V<itemsize>` (raw) where numpy has no such type."""
        import numpy as np

        if not self.numpy:
            return np.dtype(f"V{self.itemsize}") if self.block == 1 else np.dtype(np.uint8)
        if self.numpy in _ML_DTYPES:
            import ml_dtypes

            extended: np.dtype[Any] = np.dtype(getattr(ml_dtypes, self.numpy))
            return extended
        return np.dtype(self.numpy)


_ML_DTYPES = frozenset(
    ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
)


def _table() -> dict[str, DType]:
    rows = [
        DType("float64", 8, "float", "float64", "F64"),
        DType("float32", 4, "float", "float32", "F32"),
        DType("float16", 2, "float", "float16", "F16"),
        DType("bfloat16", 2, "float", "bfloat16", "BF16", since_torch="1.3"),
        DType("float8_e4m3fn", 1, "float", "float8_e4m3fn", "F8_E4M3", since_torch="2.1"),
        DType("float8_e5m2", 1, "float", "float8_e5m2", "F8_E5M2", since_torch="2.1"),
        DType("float8_e4m3fnuz", 1, "float", "float8_e4m3fnuz", "F8_E4M3FNUZ", since_torch="2.2"),
        DType("float8_e5m2fnuz", 1, "float", "float8_e5m2fnuz", "F8_E5M2FNUZ", since_torch="2.2"),
        DType("float8_e8m0fnu", 1, "float", "float8_e8m0fnu", "F8_E8M0", since_torch="2.7"),
        # torch counts packed bytes (two values each) as elements; safetensors counts the values.
        DType("float4_e2m1fn_x2", 1, "raw", since_torch="2.8"),
        DType("float4_e2m1fn", 1, "raw", safetensors="F4", block=2),
        DType("float6_e2m3fn", 3, "raw", safetensors="F6_E2M3", block=4),
        DType("float6_e3m2fn", 3, "raw", safetensors="F6_E3M2", block=4),
        DType("int64", 8, "int", "int64", "I64"),
        DType("int32", 4, "int", "int32", "I32"),
        DType("int16", 2, "int", "int16", "I16"),
        DType("int8", 1, "int", "int8", "I8"),
        DType("uint64", 8, "uint", "uint64", "U64", since_torch="2.3"),
        DType("uint32", 4, "uint", "uint32", "U32", since_torch="2.3"),
        DType("uint16", 2, "uint", "uint16", "U16", since_torch="2.3"),
        DType("uint8", 1, "uint", "uint8", "U8"),
        DType("bool", 1, "bool", "bool", "BOOL", since_torch="1.2"),
        DType("complex128", 16, "complex", "complex128", "", unit=8),
        DType("complex64", 8, "complex", "complex64", "C64", unit=4),
        DType("complex32", 4, "complex", unit=2, since_torch="1.12"),
        DType("qint8", 1, "quantized", "int8", since_torch="1.3"),
        DType("quint8", 1, "quantized", "uint8", since_torch="1.3"),
        DType("qint32", 4, "quantized", "int32", since_torch="1.3"),
        DType("quint4x2", 1, "quantized", block=2, since_torch="1.10"),
        DType("quint2x4", 1, "quantized", block=4, since_torch="1.12"),
        *(DType(f"bits{n}", 1, "raw", since_torch="2.0") for n in ("1x8", "2x4", "4x2", "8")),
        DType("bits16", 2, "raw", since_torch="2.0"),
    ]
    return {row.name: row for row in rows}


DTYPES: dict[str, DType] = _table()
"""Every element type by name. Families with types of their own (ggml) add theirs with `register`."""

BY_SAFETENSORS: dict[str, DType] = {d.safetensors: d for d in DTYPES.values() if d.safetensors}
ALIASES = {
    "fp32": "float32", "float": "float32", "f32": "float32", "fp16": "float16", "half": "float16", "f16": "float16",
    "bf16": "bfloat16", "fp64": "float64", "double": "float64", "f64": "float64", "long": "int64", "int": "int32",
    "short": "int16", "char": "int8", "byte": "uint8", "chalf": "complex32", "cfloat": "complex64",
    "cdouble": "complex128", "fp8": "float8_e4m3fn",
}


def dtype(name: str) -> DType:
    """Look a type up by torch's name or a common short one (`bf16`). Raises KeyError for an unknown name."""
    return DTYPES[ALIASES.get(name, name)]


def register(row: DType) -> DType:
    """Add a family's own type to the table and return it. Raises ValueError if another type has the name."""
    if DTYPES.setdefault(row.name, row) != row:
        raise ValueError(f"dtype {row.name} is already registered as something else")
    return row


def of_numpy(np_dtype: np.dtype[Any]) -> DType:
    """The table's type for a numpy dtype of either byte order. Raises KeyError where torch has none (strings…)."""
    return DTYPES[np_dtype.name]
