"""What `torch.load(weights_only=True)` accepts, and since when torch knows each rebuild function.

Facts from torch 2.13 `torch/_weights_only_unpickler.py` (`_get_allowed_globals`); the names that importing
`torch.distributed.tensor` or `torch.nested` adds are not among them, for a bare torch refuses those.
"""

from __future__ import annotations

from itertools import product

_STORED = "BFloat16 Bool Byte Char Double Float Half Int Long Short".split()
_COMPLEX = ("ComplexDouble", "ComplexFloat")
_QUANTIZED = ("QInt32", "QInt8", "QUInt2x4", "QUInt4x2", "QUInt8")
_SPARSE = [kind for kind in _STORED if kind != "Bool"]
_DTYPES = """
bfloat16 bits16 bits1x8 bits2x4 bits4x2 bits8 bool complex128 complex32 complex64 float16 float32 float4_e2m1fn_x2
float64 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu int1 int16 int2 int3 int32 int4 int5
int6 int64 int7 int8 qint32 qint8 quint2x4 quint4x2 quint8 uint1 uint16 uint2 uint3 uint32 uint4 uint5 uint6 uint64
uint7 uint8
""".split()
_REBUILD = """
_rebuild_device_tensor_from_cpu_tensor _rebuild_device_tensor_from_numpy _rebuild_meta_tensor_no_storage
_rebuild_nested_tensor _rebuild_parameter _rebuild_parameter_with_state _rebuild_qtensor _rebuild_sparse_tensor
_rebuild_tensor _rebuild_tensor_v2 _rebuild_tensor_v3 _rebuild_wrapper_subclass
""".split()
_QSCHEMES = """
per_channel_affine per_channel_affine_float_qparams per_channel_symmetric per_tensor_affine per_tensor_symmetric
""".split()

TORCH_DTYPES: tuple[str, ...] = tuple(_DTYPES)
QSCHEMES: tuple[str, ...] = tuple(_QSCHEMES)

WEIGHTS_ONLY: frozenset[str] = frozenset(
    [
        "_codecs.encode", "builtins.bytearray", "builtins.complex", "builtins.set", "collections.Counter",
        "collections.OrderedDict", "torch.Size", "torch.Tensor", "torch.device", "torch.nn.parameter.Parameter",
        "torch.serialization._get_layout", "torch.storage.TypedStorage", "torch.storage.UntypedStorage",
        "torch._tensor._rebuild_from_type_v2",
        *(f"torch._utils.{name}" for name in _REBUILD),
        *(f"torch.{name}" for name in (*_DTYPES, *_QSCHEMES)),
        *(f"torch.{kind}Storage" for kind in (*_STORED, *_COMPLEX, *_QUANTIZED)),
        *(f"torch.cuda.{kind}Storage" for kind in (*_STORED, *_COMPLEX)),
        *(f"torch.{kind}Tensor" for kind in _STORED),
        *(f"torch.cuda.{kind}Tensor" for kind in _STORED),
        *(f"{place}.{kind}Tensor" for place, kind in product(("torch.sparse", "torch.cuda.sparse"), _SPARSE)),
    ]
)

SINCE_TORCH: dict[str, str] = {
    "torch._utils._rebuild_tensor": "0.1",
    "torch._utils._rebuild_tensor_v2": "0.4",
    "torch._utils._rebuild_parameter": "0.4",
    "torch._utils._rebuild_sparse_tensor": "1.0",
    "torch._utils._rebuild_qtensor": "1.3",
    "torch._utils._rebuild_xla_tensor": "1.6",
    "torch._tensor._rebuild_from_type": "1.7",
    "torch._utils._rebuild_meta_tensor_no_storage": "1.10",
    "torch._utils._rebuild_wrapper_subclass": "1.11",
    "torch._tensor._rebuild_from_type_v2": "1.12",
    "torch._utils._rebuild_device_tensor_from_numpy": "1.13",
    "torch._utils._rebuild_parameter_with_state": "2.0",
    "torch._utils._rebuild_nested_tensor": "2.0",
    "torch._utils._rebuild_tensor_v3": "2.1",
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": "2.6",
}
"""The first torch release that has each rebuild function, and so can load a file that names it.

From the history of `torch/_utils.py` and `torch/_tensor.py`; only 2.13 was run.
"""
