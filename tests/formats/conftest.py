"""What the tests of formats share: files made from a header, and layouts written down without the runner."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from anyckpt import formats
from anyckpt.core.checkpoint import Checkpoint
from anyckpt.core.layout import FileLayout
from anyckpt.core.tensor import Tensor
from anyckpt.finding import Report
from anyckpt.io.place import Place

Read = Callable[[Path], tuple[Checkpoint, Report]]


@pytest.fixture(scope="session")
def read() -> Read:
    """Open a path; gives the checkpoint and the report it was read with."""

    def read(path: Path) -> tuple[Checkpoint, Report]:
        report = Report()
        return formats.read(Place.at(path), report), report

    return read


@pytest.fixture(scope="session")
def codes(read: Read) -> Callable[[Path], list[str]]:
    """The codes of all findings of a path, with those of the format's own deep check."""

    def codes(path: Path) -> list[str]:
        checkpoint, report = read(path)
        place = Place.at(path)
        hook = getattr(formats.table.BUILT_IN[checkpoint.format].load(), "verify", None)
        if hook is not None:
            hook(place if place.is_folder else place.open(), checkpoint, report)
        return [finding.code for finding in report.findings]

    return codes


@pytest.fixture(scope="session")
def safetensors_bytes() -> Callable[..., bytes]:
    """A safetensors file of a header (a dict, or JSON text) and data; padded as writers do."""

    def make(header: dict[str, Any] | str, data: bytes = b"", *, pad: bool = True) -> bytes:
        text = (header if isinstance(header, str) else json.dumps(header)).encode()
        text += b" " * (-len(text) % 8 if pad else 0)
        return len(text).to_bytes(8, "little") + text + data

    return make


@pytest.fixture(scope="session")
def lay_down() -> Callable[[Sequence[FileLayout], Path], None]:
    """Write layouts as they are described, to hold the description itself against other readers."""

    def lay_down(layouts: Sequence[FileLayout], target: Path) -> None:
        for layout in layouts:
            path = target / layout.name if layout.name else target
            path.parent.mkdir(parents=True, exist_ok=True)
            data = bytearray(layout.size)
            for part in layout.parts:
                content = part.content
                if isinstance(content, Tensor):
                    raw = content.tobytes()
                elif isinstance(content, bytes):
                    raw = content
                else:
                    raw = content.file.read(content.offset, content.length)
                assert len(raw) == part.length
                data[part.offset : part.offset + part.length] = raw
            path.write_bytes(data)

    return lay_down
