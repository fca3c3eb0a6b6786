"""Remote files through fsspec's in-memory store."""

from __future__ import annotations

from typing import Any

import pytest

from anyckpt.core.source import File
from anyckpt.errors import CheckpointError, UsageError
from anyckpt.io.remote import is_remote, list_remote, open_remote
from anyckpt.io.view import sub_file

fsspec = pytest.importorskip("fsspec", reason="the optional package fsspec is not installed")


@pytest.fixture
def store() -> Any:
    system = fsspec.filesystem("memory")
    system.pipe({"/m/a.bin": b"0123456789", "/m/sub/b.bin": b"b"})
    yield system
    system.rm("/m", recursive=True)


def test_ranges_of_an_object(store: Any) -> None:
    file = open_remote("memory://m/a.bin")
    assert isinstance(file, File) and file.size == 10
    assert file.read(2, 3) == b"234" and file.read(10, 0) == b""
    buffer = bytearray(2)
    sub_file(file, 1, 5).readinto(1, memoryview(buffer))
    assert buffer == b"23" and file.on_disk() is None
    with pytest.raises(CheckpointError, match="bytes 8-12"):
        file.read(8, 4)
    store.pipe("/m/a.bin", b"short")
    with pytest.raises(CheckpointError, match="gave 0 of 2"):
        file.read(8, 2)
    with pytest.raises(CheckpointError, match="changed"):
        file.check_unchanged()


def test_listing_and_missing_files(store: Any) -> None:
    assert list_remote("memory://m") == {"a.bin": 10, "sub/b.bin": 1}
    with pytest.raises(UsageError):
        open_remote("memory://m/none")
    with pytest.raises(CheckpointError):
        open_remote("memory://m/sub")
    with pytest.raises(UsageError):
        open_remote("nosuch://x")
    assert is_remote("s3://b/x") and not is_remote("/a/b") and not is_remote("file:///x")
