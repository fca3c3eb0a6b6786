"""GGUF files put together by hand, without the writer under test."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

Pair = tuple[str, int, bytes]
"""(key, type of its value, the value as it lies in the file)"""
Info = tuple[str, tuple[int, ...], int, int]
"""(name, dims with the contiguous one first, type, offset)"""


@pytest.fixture(scope="session")
def gguf_bytes() -> Callable[..., bytes]:
    """A GGUF file of key-value pairs, tensor descriptions and data."""

    def make(
        pairs: Sequence[Pair] = (),
        infos: Sequence[Info] = (),
        data: bytes = b"",
        *,
        version: int = 3,
        big: bool = False,
    ) -> bytes:
        o, size = ">" if big else "<", "I" if version == 1 else "Q"

        def text(value: str) -> bytes:
            raw = value.encode()
            return struct.pack(f"{o}{size}", len(raw)) + raw

        out = b"GGUF" + struct.pack(f"{o}I{size}{size}", version, len(infos), len(pairs))
        for key, kind, value in pairs:
            out += text(key) + struct.pack(o + "I", kind) + value
        for name, dims, kind, offset in infos:
            out += text(name) + struct.pack(f"{o}I{len(dims)}{size}IQ", len(dims), *dims, kind, offset)
        return out + bytes(-len(out) % 32) + data if infos else out

    return make


@pytest.fixture(scope="session")
def string() -> Callable[[str], bytes]:
    """A string value."""
    return lambda value: struct.pack("<Q", len(value.encode())) + value.encode()


@pytest.fixture(scope="session")
def official(corpus: Path) -> Path:
    """Files of llama.cpp's own converter and quantizer."""
    return corpus / "gguf"


@pytest.fixture(scope="session")
def case(official: Path) -> Callable[[str], dict[str, Any]]:
    """What a case of the corpus says of itself."""
    import json

    return lambda name: dict(json.loads((official / name / "case.json").read_text()))
