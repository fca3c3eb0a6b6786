"""Values of blocks: uint8 (n, bytes) -> float32 (n, values), with the order of operations of ggml's `dequantize_row_*`.

Layouts are in the comments of each function, byte offsets first; `d` is the block's float16 scale. A quant q is an
unsigned number, s a sub-block's scale. Source: `ggml-quants.c`, llama.cpp build 11434; held by official vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from anyckpt.core.ggml.grids import SIGNS, grid
from anyckpt.core.ggml.types import BLOCK_TYPES

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]

F32 = np.float32
CHUNK = 1 << 18  # values of which the temporaries of one pass are made

IQ4_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)
FP4_VALUES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)  # doubled


def unpack(name: str, raw: Array, shape: tuple[int, ...]) -> Array:
    """The values of `raw` (bytes of whole blocks) as float32 of `shape`."""
    row = BLOCK_TYPES[name]
    blocks = np.ascontiguousarray(raw).reshape(-1).view(np.uint8).reshape(-1, row.n_bytes)
    out = np.empty((len(blocks), row.block), F32)
    step = max(1, CHUNK // row.block)
    with np.errstate(all="ignore"):
        for i in range(0, len(blocks), step):
            out[i : i + step] = UNPACKERS[name](blocks[i : i + step])
    flat = out.reshape(-1)
    return flat[: prod(shape)].reshape(shape)


def half(blocks: Array, offset: int) -> Array:
    """The float16 at a byte offset of every block, as float32 of shape (n, 1)."""
    return np.ascontiguousarray(blocks[:, offset : offset + 2]).view("<f2").astype(F32)


def nibbles(packed: Array) -> Array:
    """(n, bytes) -> (n, 2·bytes): all low halves, then all high ones."""
    return np.concatenate([packed & 15, packed >> 4], axis=1)


def bits_of(packed: Array, n: int) -> Array:
    """(n, bytes) -> (n, n bits): bit 0 of byte 0 first."""
    return np.unpackbits(np.ascontiguousarray(packed), axis=1, count=n, bitorder="little")


def _q4_0(b: Array) -> Array:  # 0 d, 2 nibbles: byte j has values j and j + 16
    return np.asarray((nibbles(b[:, 2:]).astype(np.int8) - np.int8(8)).astype(F32) * half(b, 0))


def _q4_1(b: Array) -> Array:  # 0 d, 2 m, 4 nibbles
    return nibbles(b[:, 4:]).astype(F32) * half(b, 0) + half(b, 2)


def _q5_0(b: Array) -> Array:  # 0 d, 2 fifth bits, 6 nibbles
    q = nibbles(b[:, 6:]) | bits_of(b[:, 2:6], 32) << 4
    return np.asarray((q.astype(np.int8) - np.int8(16)).astype(F32) * half(b, 0))


def _q5_1(b: Array) -> Array:  # 0 d, 2 m, 4 fifth bits, 8 nibbles
    return np.asarray((nibbles(b[:, 8:]) | bits_of(b[:, 4:8], 32) << 4).astype(F32) * half(b, 0) + half(b, 2))


def _q8_0(b: Array) -> Array:  # 0 d, 2 int8
    return np.ascontiguousarray(b[:, 2:]).view(np.int8).astype(F32) * half(b, 0)


def _q1_0(b: Array) -> Array:  # 0 d, 2 sign bits: set is +d
    d = half(b, 0)
    return np.where(bits_of(b[:, 2:], 128) != 0, d, -d)


def _q2_0(b: Array) -> Array:  # 0 d, 2 quants of 2 bits, four consecutive values a byte
    q = b[:, 2:, None] >> np.arange(0, 8, 2, dtype=np.uint8) & 3
    return np.asarray((q.reshape(len(b), 64).astype(np.int8) - np.int8(1)).astype(F32) * half(b, 0))


def crumbs(packed: Array) -> Array:
    """(n, 64) -> (n, 256) of 2 bits: byte 32·h + l has values 128·h + l + {0, 32, 64, 96}, lowest bits first."""
    q = packed.reshape(-1, 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[None, None, :, None] & 3
    return q.reshape(-1, 256)


def _q2_k(b: Array) -> Array:  # 0 scales of 16 values: low half s, high half m; 16 quants; 80 d, 82 dmin
    s, d, dmin = b[:, :16], half(b, 80), half(b, 82)
    q = crumbs(b[:, 16:80]).reshape(-1, 16, 16).astype(F32)
    scale, low = d * (s & 15).astype(F32), dmin * (s >> 4).astype(F32)
    return np.asarray((scale[:, :, None] * q - low[:, :, None]).reshape(-1, 256))


def scales_q3_k(packed: Array) -> Array:
    """(n, 12) -> (n, 16) of 6 bits: low halves of bytes 0-7, then high halves; bytes 8-11 hold the upper two bits."""
    low = nibbles(packed[:, :8])
    high = packed[:, 8:12, None] >> np.arange(0, 8, 2, dtype=np.uint8) & 3  # [byte i, shift t] belongs to scale 4t + i
    return np.asarray(low | (high.transpose(0, 2, 1).reshape(-1, 16) << 4))


def _q3_k(b: Array) -> Array:  # 0 third bits (clear: subtract 4), 32 quants, 96 scales, 108 d
    hidden = (b[:, :32, None] >> np.arange(8, dtype=np.uint8) & 1).transpose(0, 2, 1).reshape(-1, 256)
    q = crumbs(b[:, 32:96]).astype(np.int8) - ((hidden ^ 1) << 2).astype(np.int8)
    scale = half(b, 108) * (scales_q3_k(b[:, 96:108]).astype(np.int8) - np.int8(32)).astype(F32)
    return np.asarray((scale[:, :, None] * q.reshape(-1, 16, 16).astype(F32)).reshape(-1, 256))


def scales_q4_k(packed: Array) -> tuple[Array, Array]:
    """(n, 12) -> eight scales and eight minima of 6 bits each."""
    a, b, c = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    return (
        np.concatenate([a & 63, (c & 15) | (a >> 6 << 4)], axis=1),
        np.concatenate([b & 63, (c >> 4) | (b >> 6 << 4)], axis=1),
    )


def halves_of_64(packed: Array) -> Array:
    """(n, 128) -> (n, 256) of 4 bits: byte 32·g + l has values 64·g + l and 64·g + 32 + l."""
    q = packed.reshape(-1, 4, 1, 32) >> np.array([0, 4], np.uint8)[None, None, :, None] & 15
    return q.reshape(-1, 256)


def _with_minimum(b: Array, q: Array) -> Array:
    s, m = scales_q4_k(b[:, 4:16])
    scale, low = half(b, 0) * s.astype(F32), half(b, 2) * m.astype(F32)
    return np.asarray((scale[:, :, None] * q.reshape(-1, 8, 32).astype(F32) - low[:, :, None]).reshape(-1, 256))


def _q4_k(b: Array) -> Array:  # 0 d, 2 dmin, 4 scales and minima, 16 quants
    return _with_minimum(b, halves_of_64(b[:, 16:]))


def _q5_k(b: Array) -> Array:  # 0 d, 2 dmin, 4 scales and minima, 16 fifth bits (bit k of byte l: value 32k + l), 48
    fifth = (b[:, 16:48, None] >> np.arange(8, dtype=np.uint8) & 1).transpose(0, 2, 1).reshape(-1, 256)
    return _with_minimum(b, halves_of_64(b[:, 48:]) | fifth << 4)


def _q6_k(b: Array) -> Array:  # 0 low 4 bits, 128 upper 2 bits, 192 int8 scales of 16 values, 208 d
    low = b[:, :128].reshape(-1, 2, 1, 64) >> np.array([0, 4], np.uint8)[None, None, :, None] & 15
    high = b[:, 128:192].reshape(-1, 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[None, None, :, None] & 3
    q = (low.reshape(-1, 256) | high.reshape(-1, 256) << 4).astype(np.int8) - np.int8(32)
    scale = half(b, 208) * np.ascontiguousarray(b[:, 192:208]).view(np.int8).astype(F32)
    return np.asarray((scale[:, :, None] * q.reshape(-1, 16, 16).astype(F32)).reshape(-1, 256))


def _tq1_0(b: Array) -> Array:  # 0 base-3 digits, five a byte (32 bytes of 160 values, 16 of 80), 48 four a byte, 52 d
    parts = []
    for start, stop, n in ((0, 32, 5), (32, 48, 5), (48, 52, 4)):
        powers = np.array([1, 3, 9, 27, 81][:n], np.uint8)
        q = b[:, None, start:stop] * powers[None, :, None]  # modulo 256
        parts.append((q.astype(np.uint16) * 3 >> 8).reshape(len(b), -1))
    q = np.concatenate(parts, axis=1).astype(np.int8) - np.int8(1)
    return np.asarray(q.astype(F32) * half(b, 52))


def _tq2_0(b: Array) -> Array:  # 0 quants, 64 d
    return np.asarray((crumbs(b[:, :64]).astype(np.int8) - np.int8(1)).astype(F32) * half(b, 64))


def _iq4_nl(b: Array) -> Array:  # 0 d, 2 nibbles that choose from a table
    return half(b, 0) * IQ4_VALUES[nibbles(b[:, 2:])].astype(F32)


def _iq4_xs(b: Array) -> Array:  # 0 d, 2 upper bits of scales (u16), 4 lower, 8 nibbles by 32 values
    high = np.ascontiguousarray(b[:, 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    low = (b[:, 4:8, None] >> np.array([0, 4], np.uint8) & 15).reshape(-1, 8)
    scale = half(b, 0) * ((low | high << 4).astype(np.int16) - 32).astype(F32)
    q = IQ4_VALUES[nibbles(b[:, 8:].reshape(-1, 16))].astype(F32).reshape(-1, 8, 32)
    return (scale[:, :, None] * q).reshape(-1, 256)


def e8m0_half(e: Array) -> Array:
    """Half of 2^(e - 127), as float32; the two smallest are subnormal."""
    e = e.astype(np.uint32)
    bits = np.where(e < 2, np.uint32(0x00200000) << np.minimum(e, 1), (np.maximum(e, 1) - 1) << 23)
    return np.asarray(bits.astype(np.uint32).view(F32))


def _mxfp4(b: Array) -> Array:  # 0 exponent, 1 nibbles
    return FP4_VALUES[nibbles(b[:, 1:])].astype(F32) * e8m0_half(b[:, :1])


def ue4m3(code: Array) -> Array:
    """Half of an unsigned float of 4 exponent and 3 mantissa bits, as float32; 0x7F is 0, as ggml has it."""
    exponent, mantissa = (code >> 3 & 15).astype(np.int32), (code & 7).astype(F32)
    normal = np.ldexp(F32(1) + mantissa / F32(8), exponent - 7)
    value = np.where(exponent == 0, np.ldexp(mantissa, -9), normal)
    return np.asarray(np.where((code == 0) | (code == 0x7F), F32(0), value * F32(0.5)).astype(F32))


def _nvfp4(b: Array) -> Array:  # 0 four scales of 16 values, 4 nibbles: byte j of eight has values j and j + 8
    q = FP4_VALUES[nibbles(b[:, 4:].reshape(-1, 8))].reshape(-1, 4, 16)
    return (q.astype(F32) * ue4m3(b[:, :4])[:, :, None]).reshape(-1, 64)


def _signed(points: Array, signs: Array) -> Array:
    """Points (…, 8) with the signs of bits (…): set is minus. float32."""
    minus = signs[..., None] >> np.arange(8, dtype=np.uint8) & 1
    return np.where(minus != 0, -points.astype(F32), points.astype(F32))


def _words(b: Array, start: int, stop: int, kind: str) -> Array:
    return np.ascontiguousarray(b[:, start:stop]).view(kind)


def _iq2_xxs(b: Array) -> Array:  # 0 d; per 32 values: four indices, then u32 of four 7-bit signs and a 4-bit scale
    groups = np.ascontiguousarray(b[:, 2:]).reshape(-1, 8, 8)
    index, rest = groups[:, :, :4], np.ascontiguousarray(groups[:, :, 4:]).view("<u4")
    scale = half(b, 0) * (F32(0.5) + (rest[:, :, 0] >> 28).astype(F32)) * F32(0.25)
    signs = SIGNS[rest >> np.array([0, 7, 14, 21], np.uint32) & 127]
    return np.asarray((scale[:, :, None, None] * _signed(grid("iq2xxs")[index], signs)).reshape(-1, 256))


def _two_scales(b: Array, start: int) -> Array:
    """Sixteen 4-bit scales, each of 16 values: d · (0.5 + s) / 4, of shape (n, 16)."""
    s = (b[:, start : start + 8, None] >> np.array([0, 4], np.uint8) & 15).reshape(-1, 16)
    return np.asarray(half(b, 0) * (F32(0.5) + s.astype(F32)) * F32(0.25))


def _iq2_xs(b: Array) -> Array:  # 0 d, 2 u16: 9-bit index and 7-bit signs, 66 scales
    q = _words(b, 2, 66, "<u2")
    points = _signed(grid("iq2xs")[q & 511], SIGNS[q >> 9]).reshape(-1, 16, 16)
    return (_two_scales(b, 66)[:, :, None] * points).reshape(-1, 256)


def _iq2_s(b: Array) -> Array:  # 0 d, 2 low index bits, 34 signs, 66 upper index bits, 74 scales
    high = (b[:, 66:74, None] >> np.arange(0, 8, 2, dtype=np.uint8) & 3).reshape(-1, 32).astype(np.uint16)
    points = _signed(grid("iq2s")[b[:, 2:34] | high << 8], b[:, 34:66]).reshape(-1, 16, 16)
    return (_two_scales(b, 74)[:, :, None] * points).reshape(-1, 256)


def _iq3_xxs(b: Array) -> Array:  # 0 d, 2 indices of four values, 66 u32 of four 7-bit signs and a scale
    rest = _words(b, 66, 98, "<u4")
    scale = half(b, 0) * (F32(0.5) + (rest >> 28).astype(F32)) * F32(0.5)
    signs = SIGNS[rest[:, :, None] >> np.array([0, 7, 14, 21], np.uint32) & 127]
    points = grid("iq3xxs")[b[:, 2:66]].reshape(-1, 8, 4, 8)
    return np.asarray((scale[:, :, None, None] * _signed(points, signs)).reshape(-1, 256))


def _iq3_s(b: Array) -> Array:  # 0 d, 2 indices, 66 ninth bits, 74 signs, 106 scales of 32 values
    index = b[:, 2:66] | bits_of(b[:, 66:74], 64).astype(np.uint16) << 8
    s = (b[:, 106:110, None] >> np.array([0, 4], np.uint8) & 15).reshape(-1, 8)
    scale = half(b, 0) * (1 + 2 * s.astype(np.int32)).astype(F32)
    points = _signed(grid("iq3s")[index].reshape(-1, 32, 8), b[:, 74:106]).reshape(-1, 8, 32)
    return (scale[:, :, None] * points).reshape(-1, 256)


def _iq1_s(b: Array) -> Array:  # 0 d, 2 low index bits, 34 u16: four times 3 index bits, scale at 12, sign of 1/8 at 15
    word = _words(b, 34, 50, "<u2")
    scale = half(b, 0) * (2 * (word >> 12 & 7) + 1).astype(F32)
    delta = np.where(word & 0x8000, F32(-0.125), F32(0.125))
    high = (word[:, :, None] >> np.array([0, 3, 6, 9], np.uint16) & 7).reshape(-1, 32)
    points = grid("iq1s")[b[:, 2:34] | high << 8].reshape(-1, 8, 32).astype(F32)
    return np.asarray((scale[:, :, None] * (points + delta[:, :, None])).reshape(-1, 256))


def _iq1_m(
    b: Array,
) -> Array:  # 0 low index bits, 32 3 upper bits and sign of 1/8 by half bytes, 48 scales; d in their tops
    word = _words(b, 48, 56, "<u2")
    d_bits = word[:, 0] >> 12 | word[:, 1] >> 8 & 0x00F0 | word[:, 2] >> 4 & 0x0F00 | word[:, 3] & 0xF000
    d = d_bits.astype("<u2").view("<f2").astype(F32)[:, None]
    s = (word[:, :, None] >> np.array([0, 3, 6, 9], np.uint16) & 7).reshape(-1, 16)
    scale = d * (2 * s + 1).astype(F32)
    extra = (b[:, 32:48, None] >> np.array([0, 4], np.uint8) & 15).reshape(-1, 32)
    delta = np.where(extra & 8, F32(-0.125), F32(0.125))
    index = b[:, :32] | (extra & 7).astype(np.uint16) << 8
    points = grid("iq1s")[index].astype(F32) + delta[:, :, None]
    return np.asarray((scale[:, :, None] * points.reshape(-1, 16, 16)).reshape(-1, 256))


UNPACKERS: Mapping[str, Callable[[Array], Array]] = {
    "q4_0": _q4_0, "q4_1": _q4_1, "q5_0": _q5_0, "q5_1": _q5_1, "q8_0": _q8_0, "q1_0": _q1_0, "q2_0": _q2_0,
    "q2_k": _q2_k, "q3_k": _q3_k, "q4_k": _q4_k, "q5_k": _q5_k, "q6_k": _q6_k, "tq1_0": _tq1_0, "tq2_0": _tq2_0,
    "iq4_nl": _iq4_nl, "iq4_xs": _iq4_xs, "mxfp4": _mxfp4, "nvfp4": _nvfp4, "iq2_xxs": _iq2_xxs, "iq2_xs": _iq2_xs,
    "iq2_s": _iq2_s, "iq3_xxs": _iq3_xxs, "iq3_s": _iq3_s, "iq1_s": _iq1_s, "iq1_m": _iq1_m,
}  # fmt: skip
"""type -> function(blocks) -> values."""
