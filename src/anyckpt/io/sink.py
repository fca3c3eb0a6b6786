"""Writing files: positional writes that are complete, copies by the kernel, and files that appear whole or not at all.

A file is made under a unique temporary name in its own folder, forced to disk, checked, given its name by a rename, and
the folder is forced to disk: after a crash there is the old file or the new one. `workspace.py` does so for a whole
destination.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from anyckpt.core.source import File
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


class FileSink:
    """A file in the making, under a temporary name until `commit`. Threads may write to it at different offsets.

    As a context manager it is removed at the end unless it was committed.
    """

    def __init__(self, target: Path, size: int) -> None:
        self.target, self.size = target, size
        target.parent.mkdir(parents=True, exist_ok=True)
        self._path = target.parent / f".anyckpt-{secrets.token_hex(8)}"
        # Mode 0666: the kernel takes the umask off, which a process cannot read without changing it for all threads.
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0)
        with out_of_space_named():
            self.fd = os.open(self._path, flags, 0o666)
            try:
                os.ftruncate(self.fd, size)
            except BaseException:
                self.close()
                raise

    def write(self, offset: int, data: bytes | bytearray | memoryview) -> None:
        """Write at an offset; what is never written stays zero."""
        self._inside(offset, memoryview(data).nbytes)
        write_at(self.fd, offset, data)

    def copy(self, source: File, source_offset: int, length: int, offset: int) -> None:
        """Copy bytes that lie in another file as they are: by the kernel from a local file, else through a buffer."""
        self._inside(offset, length)
        found = source.on_disk()
        if found and (source_fd := found[0].fileno()) is not None:
            source.read(source_offset + length, 0)  # raises [truncated] if the range is not inside
            copy_range(source_fd, found[1] + source_offset, self.fd, offset, length)
            return
        buffer = memoryview(bytearray(min(length, _BUFFER_BYTES)))
        for done in range(0, length, _BUFFER_BYTES):
            part = buffer[: min(length - done, _BUFFER_BYTES)]
            source.readinto(source_offset + done, part)
            write_at(self.fd, offset + done, part)

    def commit(self, *, mode_of: Path | None = None) -> None:
        """Force the bytes to disk, give the file its name, and force that to disk. `mode_of`: the file it replaces."""
        sync_file(self.fd)
        size = os.fstat(self.fd).st_size
        if size != self.size:
            raise OSError(errno.EIO, f"{self.target.name} has {size:,} bytes after writing, not {self.size:,}")
        if mode_of is not None:
            os.fchmod(self.fd, stat.S_IMODE(os.stat(mode_of).st_mode))
        os.replace(self._path, self.target)
        os.close(self.fd)
        self.fd = -1
        sync_folder(self.target.parent)

    def close(self) -> None:
        """Remove the unfinished file; nothing after `commit`."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            with suppress(FileNotFoundError):
                os.unlink(self._path)

    def __enter__(self) -> FileSink:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _inside(self, offset: int, length: int) -> None:
        if offset < 0 or offset + length > self.size:
            raise ValueError(f"[{offset}, {offset + length}) is outside of a file of {self.size} bytes")
