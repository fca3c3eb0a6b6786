"""CRC-32 of a whole from the CRC-32s of its parts, so that parts can be read in any order by several threads.

Appending n zero bytes multiplies a CRC by x^(8n) modulo the CRC polynomial; then the second part's CRC is added
(the method of zlib's crc32_combine). Polynomials are bit-reversed integers: bit 31 is x^0.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

POLYNOMIAL = 0xEDB88320
ONE = 1 << 31


def _multiply(a: int, b: int) -> int:
    """a · b modulo the polynomial."""
    product = 0
    while a:
        if a & ONE:
            product ^= b
        a = (a << 1) & 0xFFFFFFFF
        b = (b >> 1) ^ POLYNOMIAL if b & 1 else b >> 1
    return product


@lru_cache(maxsize=256)
def _zeros(n_bytes: int) -> int:
    """x^(8·n_bytes) modulo the polynomial."""
    power, square = ONE, ONE >> 8  # x^0 and x^8
    while n_bytes:
        if n_bytes & 1:
            power = _multiply(power, square)
        square = _multiply(square, square)
        n_bytes >>= 1
    return power


def combine(parts: Iterable[tuple[int, int]]) -> int:
    """The CRC-32 of parts that follow each other, from (CRC-32, length in bytes) of each."""
    crc = 0
    for part, length in parts:
        crc = _multiply(crc, _zeros(length)) ^ part if length else crc
    return crc
