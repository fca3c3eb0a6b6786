"""Files made of others: a part of a file, and bytes in memory."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256

from anyckpt.core.source import File
from anyckpt.io.bounds import check_range


@dataclass(frozen=True, slots=True)
class SubFile:
    """The bytes [start, start + size) of `file`. Made by `sub_file`, so that `file` is never a SubFile itself."""

    file: File
    start: int
    size: int
    name: str

    def read(self, offset: int, length: int) -> bytes:
        check_range(self.name, self.size, offset, length)
        return self.file.read(self.start + offset, length)

    def readinto(self, offset: int, buffer: memoryview) -> None:
        check_range(self.name, self.size, offset, buffer.nbytes)
        self.file.readinto(self.start + offset, buffer)

    def on_disk(self) -> tuple[File, int] | None:
        found = self.file.on_disk()
        return found and (found[0], found[1] + self.start)

    def fileno(self) -> None:
        return None


def sub_file(file: File, offset: int, length: int, name: str = "") -> SubFile:
    """The bytes [offset, offset + length) of `file` as a file; raises [truncated] where `file` ends before.

    >>> outer = sub_file(MemoryFile("m", b"0123456789"), 2, 6)
    >>> inner = sub_file(outer, 1, 3)
    >>> inner.start, inner.read(0, 3)
    (3, b'345')
    """
    check_range(name or file.name, file.size, offset, length)
    if isinstance(file, SubFile):
        return SubFile(file.file, file.start + offset, length, name or file.name)
    return SubFile(file, offset, length, name or file.name)


@dataclass(frozen=True, slots=True)
class MemoryFile:
    """Bytes in memory as a file, for what is made rather than read: a config, a tokenizer put together again."""

    name: str
    data: bytes

    @property
    def size(self) -> int:
        return len(self.data)

    @property
    def fingerprint(self) -> str:
        """What tells it from another of the same name, for the digest of a plan."""
        return sha256(self.data).hexdigest()

    def read(self, offset: int, length: int) -> bytes:
        check_range(self.name, len(self.data), offset, length)
        return self.data[offset : offset + length]

    def readinto(self, offset: int, buffer: memoryview) -> None:
        check_range(self.name, len(self.data), offset, buffer.nbytes)
        buffer.cast("B")[:] = memoryview(self.data)[offset : offset + buffer.nbytes]

    def on_disk(self) -> None:
        return None

    def fileno(self) -> None:
        return None
