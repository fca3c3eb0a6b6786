"""Local files: opened once, checked on the open descriptor, read at offsets, never mapped.

Mapped pages fault one by one on network disks and kill the process with SIGBUS where a file shrinks, so all reads are
`pread`. A checkpoint may have more files than a process may have descriptors; a pool keeps the latest ones open and
makes sure, whenever it opens one again, that it is still the file that was checked.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from anyckpt.core.source import File
from anyckpt.errors import CheckpointError, UsageError
from anyckpt.finding import fail
from anyckpt.io.bounds import check_range
from anyckpt.io.paths import kind_of, printable

MAX_OPEN_FILES = 256
_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_NO_FOLLOW: int = getattr(os, "O_NOFOLLOW", 0)


class Fingerprint(NamedTuple):
    """What tells one state of a file from another."""

    device: int
    inode: int
    size: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class LocalFile:
    """A regular file. `path` is real (no links); `name` is what the user calls it."""

    path: str
    name: str
    fingerprint: Fingerprint

    @property
    def size(self) -> int:
        return self.fingerprint.size

    def read(self, offset: int, length: int) -> bytes:
        check_range(self.name, self.size, offset, length)
        fd = _pool.take(self)
        try:
            data = os.pread(fd, length, offset)
            if len(data) == length:
                return data
            parts = [data]  # one call returns at most 2 GiB, and less over some network file systems
            done = len(data)
            while done < length:
                if not (data := os.pread(fd, length - done, offset + done)):
                    raise self._changed()
                parts.append(data)
                done += len(data)
        finally:
            _pool.give(self)
        return b"".join(parts)

    def readinto(self, offset: int, buffer: memoryview) -> None:
        buffer = buffer.cast("B")
        check_range(self.name, self.size, offset, len(buffer))
        with self.descriptor() as fd:
            done = 0
            while done < len(buffer):
                n = _pread_into(fd, buffer[done:], offset + done)
                if n == 0:
                    raise self._changed()
                done += n

    def on_disk(self) -> tuple[File, int]:
        return self, 0

    def fileno(self) -> int:
        """An open descriptor, valid in this thread until it asks any file for one again."""
        _held.lease = lease = _Lease(self, _pool)
        return lease.fd

    @contextmanager
    def descriptor(self) -> Iterator[int]:
        """Lend an open descriptor for the length of a `with` block."""
        fd = _pool.take(self)
        try:
            yield fd
        finally:
            _pool.give(self)

    def _changed(self) -> CheckpointError:
        return fail(
            "inconsistent",
            "the file changed while it was being read",
            where=self.name,
            hint="wait until whatever writes this file is done, then try again",
        )


def open_local(path: str | os.PathLike[str], name: str = "") -> LocalFile:
    """Open the regular file at `path`, whose links the caller has already judged.

    >>> open_local("no/such/file")
    Traceback (most recent call last):
    anyckpt.errors.UsageError: no/such/file: no such file
    """
    real = os.path.realpath(path)
    shown = printable(name or os.fspath(path))
    fd = _open(real, shown)
    try:
        fingerprint = _check(fd, shown)
    except BaseException:
        os.close(fd)
        raise
    file = LocalFile(real, shown, fingerprint)
    _pool.adopt(file, fd)
    return file


def fingerprint_of(path: Path) -> Fingerprint:
    """The fingerprint of the file at `path` as it is now."""
    s = os.stat(path)
    return Fingerprint(s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns)


def _open(real: str, shown: str) -> int:
    """Open without waiting for a pipe's writer and without following a link put there since it was resolved."""
    try:
        fd = os.open(real, _FLAGS | _NO_FOLLOW)
    except FileNotFoundError as error:
        raise UsageError(f"{shown}: no such file") from error
    except PermissionError as error:
        raise UsageError(f"{shown}: permission denied") from error
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.ENODEV, errno.EOPNOTSUPP):
            raise fail("special-file", "is not a regular file", where=shown) from error
        raise
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    return fd


def _check(fd: int, shown: str) -> Fingerprint:
    s = os.fstat(fd)
    if (kind := kind_of(s.st_mode)) != "file":
        raise fail("special-file", f"is a {kind}, not a regular file", where=shown)
    return Fingerprint(s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns)


if hasattr(os, "preadv"):

    def _pread_into(fd: int, buffer: memoryview, offset: int) -> int:
        return os.preadv(fd, [buffer[: 1 << 30]], offset)

else:  # macOS before 11

    def _pread_into(fd: int, buffer: memoryview, offset: int) -> int:
        data = os.pread(fd, min(len(buffer), 1 << 24), offset)
        buffer[: len(data)] = data
        return len(data)


class _Lease:
    """Keeps a descriptor from being closed for as long as this object lives."""

    __slots__ = ("fd", "file", "pool")

    def __init__(self, file: LocalFile, pool: _Pool) -> None:
        self.fd = pool.take(file)
        self.file, self.pool = file, pool

    def __del__(self) -> None:
        if hasattr(self, "pool"):
            self.pool.give(self.file)


class _Held(threading.local):
    lease: _Lease | None = None


class _Pool:
    """The latest descriptors by fingerprint, closed least recently used first, never while one is in use."""

    def __init__(self) -> None:
        # Reentrant: a lease may be dropped by the garbage collector while this very thread holds the lock.
        self._lock = threading.RLock()
        self._fds: OrderedDict[Fingerprint, int] = OrderedDict()
        self._users: dict[Fingerprint, int] = {}

    def take(self, file: LocalFile) -> int:
        key = file.fingerprint
        with self._lock:
            self._users[key] = self._users.get(key, 0) + 1  # first, so that nothing closes it meanwhile
            try:
                fd = self._fds.get(key)
                if fd is None:
                    self._fds[key] = fd = self._open_again(file)
            except BaseException:
                self.give(file)
                raise
            self._fds.move_to_end(key)
            self._trim()
            return fd

    def give(self, file: LocalFile) -> None:
        key = file.fingerprint
        with self._lock:
            n_users = self._users.pop(key, 0) - 1  # 0: a lease from before a fork
            if n_users > 0:
                self._users[key] = n_users
            else:
                self._trim()

    def adopt(self, file: LocalFile, fd: int) -> None:
        with self._lock:
            if file.fingerprint in self._fds:
                os.close(fd)
            else:
                self._fds[file.fingerprint] = fd
            self._trim()

    def forget_after_fork(self) -> None:
        """A child shares its parent's descriptors, which is right for `pread`; its lock and users start afresh."""
        self._lock = threading.RLock()
        self._users = {}

    def _open_again(self, file: LocalFile) -> int:
        try:
            fd = _open(file.path, file.name)
        except UsageError as error:
            raise file._changed() from error
        try:
            if _check(fd, file.name) != file.fingerprint:
                raise file._changed()
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _trim(self) -> None:
        if len(self._fds) <= MAX_OPEN_FILES:
            return
        for key in [k for k in self._fds if k not in self._users][: len(self._fds) - MAX_OPEN_FILES]:
            os.close(self._fds.pop(key))


_pool = _Pool()
_held = _Held()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.forget_after_fork)
