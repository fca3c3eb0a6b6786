"""Writing to open files: positional writes that are complete, copies by the kernel, forcing to disk.

How a destination appears whole or not at all is in `workspace.py`.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from anyckpt.errors import OutOfSpace
from anyckpt.finding import fail
from anyckpt.io.bounds import byte_count
from anyckpt.io.paths import printable

_COPY_BYTES = 1 << 30  # a step of copy_file_range: Linux moves at most 2 GiB at once
_BUFFER_BYTES = 1 << 23
_NO_KERNEL_COPY = {
    errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF, errno.EPERM, errno.ETXTBSY, errno.EIO,
}  # fmt: skip
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def write_at(fd: int, offset: int, data: bytes | bytearray | memoryview) -> None:
    """Write all of `data` at `offset`, however many calls that takes; OutOfSpace where the disk is full."""
    left = memoryview(data).cast("B")
    with out_of_space_named():
        while left:
            n = os.pwrite(fd, left, offset)
            if n <= 0:
                raise OSError(errno.EIO, "a write made no progress")
            left = left[n:]
            offset += n


def copy_range(source_fd: int, source_offset: int, fd: int, offset: int, length: int) -> None:
    """Copy bytes between two open files, in the kernel where it can (Linux, on one or two file systems)."""
    if hasattr(os, "copy_file_range"):
        with out_of_space_named():
            while length:
                try:
                    n = os.copy_file_range(source_fd, fd, min(length, _COPY_BYTES), source_offset, offset)
                except OSError as error:
                    if error.errno not in _NO_KERNEL_COPY:
                        raise
                    break
                if n == 0:  # at the source's end, and on some file systems without a reason: read and see
                    break
                source_offset, offset, length = source_offset + n, offset + n, length - n
    buffer = memoryview(bytearray(min(length, _BUFFER_BYTES)))
    while length:
        n = _read_some(source_fd, source_offset, buffer[: min(length, len(buffer))])
        if n == 0:
            raise fail("inconsistent", "a source file became shorter while it was being copied")
        write_at(fd, offset, buffer[:n])
        source_offset, offset, length = source_offset + n, offset + n, length - n


def _read_some(fd: int, offset: int, buffer: memoryview) -> int:
    if hasattr(os, "preadv"):
        return os.preadv(fd, [buffer], offset)
    data = os.pread(fd, len(buffer), offset)
    buffer[: len(data)] = data
    return len(data)


@contextmanager
def out_of_space_named() -> Iterator[None]:
    """Turn the system's errors for a full disk or quota into OutOfSpace."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL and not isinstance(error, OutOfSpace):
            raise OutOfSpace(
                f"the destination is full ({os.strerror(error.errno or 0)})",
                hint="free some space and run the same command again; finished files are kept",
            ) from error
        raise


def require_space(folder: Path, n_bytes: int) -> None:
    """Raise OutOfSpace unless `n_bytes` and 1 % more fit on the disk of `folder` (or of its nearest parent)."""
    while not folder.exists():
        folder = folder.parent
    free, wanted = shutil.disk_usage(folder).free, n_bytes + n_bytes // 100
    if wanted > free:
        raise OutOfSpace(
            f"needs {byte_count(wanted)}, and {byte_count(free)} are free in {printable(os.fspath(folder))}",
            hint="free some space or choose another destination",
        )


def sync_file(fd: int) -> None:
    """Force a file to the disk itself; plain fsync on macOS stops at the disk's cache."""
    full = getattr(_fcntl(), "F_FULLFSYNC", None)
    if full is not None:
        with suppress(OSError):
            _fcntl().fcntl(fd, full)
            return
    with out_of_space_named():
        os.fsync(fd)


def sync_folder(folder: Path) -> None:
    """Force a folder's entries to the disk, where the file system has such a thing."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EBADF, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
    finally:
        os.close(fd)


def _fcntl() -> Any:
    import fcntl

    return fcntl
