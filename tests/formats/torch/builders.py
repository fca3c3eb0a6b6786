"""Small torch files made without torch: what the tests read and damage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from anyckpt import formats
from anyckpt.core.checkpoint import Checkpoint
from anyckpt.core.layout import FileLayout
from anyckpt.core.tensor import Tensor, from_array
from anyckpt.finding import Report
from anyckpt.formats.torch.zipwrite import archive
from anyckpt.io.local import open_local
from anyckpt.io.view import MemoryFile


def array(*shape: int, dtype: str = "float32", start: float = 1) -> Tensor:
    """Consecutive numbers."""
    return from_array((np.arange(np.prod(shape, dtype=int)) + start).astype(dtype).reshape(shape))


def fill(layout: FileLayout) -> bytes:
    """The bytes of a small file that is planned: what the runner would write."""
    import zlib

    out = bytearray(layout.size)
    for part in layout.parts:
        content = part.content.tobytes() if isinstance(part.content, Tensor) else part.content
        assert isinstance(content, bytes)
        assert len(content) == part.length
        out[part.offset : part.offset + part.length] = content
    for checksum in layout.checksums:
        crc = zlib.crc32(out[checksum.start : checksum.stop])
        out[checksum.offset : checksum.offset + 4] = crc.to_bytes(4, "little")
    return bytes(out)


def saved(root: Any, top: str = "model") -> bytes:
    """`root` as a file of torch.save."""
    return fill(archive(root, top))


def read_bytes(data: bytes, name: str = "model.pt") -> tuple[Checkpoint, Report]:
    """Read bytes as a file, whatever it is."""
    report = Report()
    return formats.read_file(MemoryFile(name, data), report), report


def read_path(path: Path) -> tuple[Checkpoint, Report]:
    """Read a file."""
    report = Report()
    return formats.read_file(open_local(path), report), report


def codes(report: Report) -> set[str]:
    """The codes of what was found."""
    return {finding.code for finding in report.findings}
