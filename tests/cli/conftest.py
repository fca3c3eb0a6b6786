"""Running the command line in this process: exit status, both streams, and no exception let through."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anyckpt.cli import main


@dataclass(frozen=True)
class Ran:
    status: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        return dict(json.loads(self.out))


@pytest.fixture
def anyckpt() -> Callable[..., Ran]:
    """Run `anyckpt ARGUMENTS…` without a terminal."""

    def run(*arguments: str | Path) -> Ran:
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            status = main([os.fspath(a) for a in arguments])
        return Ran(status, out.getvalue(), err.getvalue())

    return run


Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write arrays as a safetensors file, by hand: `write("name.safetensors", {name: array})`."""

    def make(name: str, arrays: dict[str, np.ndarray[Any, Any]], spoil: Callable[[bytes], bytes] = bytes) -> Path:
        path = tmp_path / name
        path.write_bytes(spoil(safetensors(arrays)))
        return path

    return make


def safetensors(arrays: dict[str, np.ndarray[Any, Any]]) -> bytes:
    words = {"float32": "F32", "float16": "F16", "float64": "F64", "int64": "I64", "uint8": "U8"}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, array in arrays.items():
        header[name] = {
            "dtype": words[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [at, at + array.nbytes],
        }
        at += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + b"".join(a.tobytes() for a in arrays.values())
