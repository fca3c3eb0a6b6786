"""Where bytes are found: files, and the sources that pieces of tensors point at. No I/O of its own.

A `File` is anything of a fixed size that can be read at an offset: a local file, a member of a zip or tar, an inflated
stream, an object store. A decoder is a File over a File, so that spans of spans are spans. `io` makes them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import numpy as np

    from anyckpt.core.box import Box


@runtime_checkable
class File(Protocol):
    """Random-access bytes. Implementations are safe to read from several threads."""

    @property
    def name(self) -> str:
        """What to call it in a message: the path as the user knows it, with `!member` for a member of an archive."""

    @property
    def size(self) -> int:
        """Bytes in all."""

    def read(self, offset: int, length: int) -> bytes:
        """Exactly `length` bytes at `offset`. Raises CheckpointError [truncated] where the file ends before."""

    def readinto(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset`; raises as `read` does."""

    def on_disk(self) -> tuple[File, int] | None:
        """The local file and offset in it where these bytes lie as they are (for kernel copies), else None."""

    def fileno(self) -> int | None:
        """An open descriptor of a local file, for kernel copies; None for everything else."""


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes of a file as they lie. `swap`: reverse every that many bytes on reading (files of the other byte order)."""

    file: File
    offset: int
    length: int
    swap: int = 0


@dataclass(frozen=True, slots=True)
class Inline:
    """Bytes already in memory: numpy arrays inside pickles, scalars."""

    data: bytes

    @property
    def length(self) -> int:
        return len(self.data)


@dataclass(frozen=True, slots=True)
class Fill:
    """`length` bytes that repeat one element's bytes: padding, missing chunks, new vocabulary rows."""

    element: bytes
    length: int


@dataclass(frozen=True, slots=True)
class Foreign:
    """Elements that another library hands out box by box (HDF5 chunks, tensorstore).

    `read(box)` returns a C-ordered array of the box's shape; `scratch` is the bytes it needs beside its result.
    """

    read: Callable[[Box], np.ndarray[Any, Any]]
    length: int
    scratch: int = 0


@dataclass(frozen=True, slots=True)
class Absent:
    """Bytes that were never saved (meta tensors, skipped data). Reading them is an error; describing them is not."""

    length: int
    why: str


Source = Span | Inline | Fill | Foreign | Absent
