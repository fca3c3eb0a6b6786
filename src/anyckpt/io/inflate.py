"""Compressed bytes as a file: deflate members of zips, gzip and Zstandard streams, read at any offset.

A decoder runs forwards only. Where it can be copied (zlib), a copy is kept every few MiB of output, so that a read at
an earlier offset starts there and not at the beginning; at most 64 copies of some 50 KB are kept, further apart the
longer the stream. Nothing is ever decoded whole, and a stream that yields more than was declared stops at once.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from anyckpt.core.source import File
from anyckpt.errors import MissingDependency
from anyckpt.finding import fail
from anyckpt.io.bounds import byte_count, check_range

MAX_RATIO = 200  # deflate reaches 1032 on zeros alone; weights stay below 2 and pickles below 50
_SLACK = 1 << 20  # output that is allowed whatever the ratio
_INPUT_BYTES = 1 << 16
_BLOCK_BYTES = 1 << 18
_FIRST_SPACING = 1 << 23
_MAX_SNAPSHOTS = 64


class Decoder(Protocol):
    """One run over a compressed stream."""

    def read(self, n_bytes: int) -> bytes:
        """The next bytes, at least one and at most `n_bytes`; b"" at the stream's end."""

    def copy(self) -> Decoder | None:
        """A decoder in the same state, None if that cannot be had."""


class DecodedFile:
    """The decoded bytes of `file`, `size` in all. Made by `decoded` or `decoded_unsized`."""

    __slots__ = (
        "_block", "_block_start", "_codec", "_decoder", "_lock", "_offset", "_snapshots", "_spacing",
        "file", "name", "size",
    )  # fmt: skip

    def __init__(self, file: File, size: int, codec: str, name: str) -> None:
        self.file, self.size, self.name = file, size, name
        self._codec = codec
        self._lock = threading.Lock()
        self._restart()

    def read(self, offset: int, length: int) -> bytes:
        buffer = bytearray(self._checked(offset, length))
        self.readinto(offset, memoryview(buffer))
        return bytes(buffer)

    def readinto(self, offset: int, buffer: memoryview) -> None:
        buffer = buffer.cast("B")
        self._checked(offset, len(buffer))
        done = 0
        with self._lock:
            while done < len(buffer):
                inside = self._seek(offset + done)
                part = self._block[inside : inside + len(buffer) - done]
                buffer[done : done + len(part)] = part
                done += len(part)

    def on_disk(self) -> None:
        return None

    def fileno(self) -> None:
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return DecodedFile, (self.file, self.size, self._codec, self.name)

    def _checked(self, offset: int, length: int) -> int:
        check_range(self.name, self.size, offset, length)
        return length

    def _restart(self) -> None:
        self._snapshots: list[tuple[int, Decoder]] = []
        self._spacing = _FIRST_SPACING
        self._decoder = CODECS[self._codec](self.file)
        self._offset = 0  # how far the decoder has come
        self._block, self._block_start = b"", 0  # the last bytes it gave

    def _seek(self, offset: int) -> int:
        """Make the block hold the byte at `offset`, and return its place in the block."""
        if offset < self._block_start:
            self._go_back(offset)
        while offset >= self._offset:
            self._advance()
        return offset - self._block_start

    def _go_back(self, offset: int) -> None:
        for start, decoder in reversed(self._snapshots):
            if start <= offset and (copy := decoder.copy()):
                self._decoder, self._offset = copy, start
                break
        else:
            self._decoder, self._offset = CODECS[self._codec](self.file), 0
        self._block, self._block_start = b"", self._offset

    def _advance(self) -> None:
        wanted = min(_BLOCK_BYTES, self.size - self._offset)
        block = _read(self._decoder, wanted, self.name)
        if not block:
            raise fail(
                "truncated", f"ends after {self._offset:,} decoded bytes; {self.size:,} were declared", where=self.name
            )
        self._block, self._block_start = block, self._offset
        self._offset += len(block)
        if self._offset == self.size and _read(self._decoder, 1, self.name):
            raise fail("bomb", f"yields more than the {byte_count(self.size)} that were declared", where=self.name)
        newest = self._snapshots[-1][0] if self._snapshots else 0
        if self._offset >= newest + self._spacing and (copy := self._decoder.copy()):
            self._snapshots.append((self._offset, copy))
            if len(self._snapshots) > _MAX_SNAPSHOTS:
                del self._snapshots[::2]
                self._spacing *= 2


def decoded(file: File, size: int, codec: str, *, name: str = "", max_ratio: int | None = MAX_RATIO) -> DecodedFile:
    """`file` decoded by a codec of the table to the `size` bytes that its archive declares.

    Raises [bomb] for a declared size of more than `max_ratio` times the stored one.
    """
    name = name or file.name
    if max_ratio is not None and size > max_ratio * file.size + _SLACK:
        stored = byte_count(file.size)
        raise fail("bomb", f"claims that {stored} hold {byte_count(size)}, over {max_ratio} times as much", where=name)
    return DecodedFile(file, size, codec, name)


def decoded_unsized(file: File, codec: str, *, name: str = "", max_ratio: int = MAX_RATIO) -> DecodedFile:
    """As `decoded` for a stream that does not say its size: it is decoded once, a block at a time, to count."""
    name = name or file.name
    decoder, size = CODECS[codec](file), 0
    while block := _read(decoder, _BLOCK_BYTES, name):
        size += len(block)
        if size > max_ratio * file.size + _SLACK:
            raise fail("bomb", f"{byte_count(file.size)} hold over {max_ratio} times as much", where=name)
    return DecodedFile(file, size, codec, name)


def _read(decoder: Decoder, n_bytes: int, name: str) -> bytes:
    """Call a decoder, with the errors of whatever library it is made into findings."""
    try:
        return decoder.read(n_bytes)
    except EOFError as error:
        raise fail("truncated", "the compressed data is cut short", where=name) from error
    except (zlib.error, ValueError) as error:
        raise fail("inconsistent", f"the compressed data is damaged ({error})", where=name) from error


@dataclass(slots=True)
class _Zlib:
    """zlib in one of its three wrappings, `wbits` as zlib.decompressobj has it. A gzip file may be several streams."""

    file: File
    wbits: int
    offset: int = 0
    state: Any = None
    tail: bytes = b""

    def read(self, n_bytes: int) -> bytes:
        while True:
            if self.state is None:
                self.state = zlib.decompressobj(self.wbits)
            if not self.tail and not self.state.eof:
                self.tail = self.file.read(self.offset, min(_INPUT_BYTES, self.file.size - self.offset))
                self.offset += len(self.tail)
                at_end = not self.tail
            else:
                at_end = False
            if not self.state.eof:
                out: bytes = self.state.decompress(self.tail, n_bytes)
                self.tail = self.state.unused_data if self.state.eof else self.state.unconsumed_tail
                if out:
                    return out
                if at_end and not self.state.eof:
                    raise EOFError
                continue
            if self.wbits <= 15 or not self._next_stream():
                return b""

    def _next_stream(self) -> bool:
        """After a gzip stream: whether another follows; zero padding, as tape tools write, does not count."""
        if len(self.tail) < 2:
            more = self.file.read(self.offset, min(_INPUT_BYTES, self.file.size - self.offset))
            self.offset += len(more)
            self.tail += more
        if self.tail[:2] != b"\x1f\x8b":
            return False
        self.state = None
        return True

    def copy(self) -> _Zlib:
        return _Zlib(self.file, self.wbits, self.offset, self.state and self.state.copy(), self.tail)


@dataclass(slots=True)
class _Zstd:
    """Zstandard through Python 3.14's own module or the package `zstandard`; neither can be copied."""

    stream: Any
    error: type[Exception]

    def read(self, n_bytes: int) -> bytes:
        try:
            data: bytes = self.stream.read(n_bytes)
        except self.error as error:
            raise ValueError(str(error)) from error
        return data

    def copy(self) -> None:
        return None


class _Stream:
    """A File as the object with `read` that libraries want."""

    def __init__(self, file: File) -> None:
        self._file, self._offset = file, 0

    def read(self, n_bytes: int = -1) -> bytes:
        left = self._file.size - self._offset
        data = self._file.read(self._offset, left if n_bytes < 0 else min(n_bytes, left))
        self._offset += len(data)
        return data


def _open_zstd(file: File) -> _Zstd:
    try:
        from compression import zstd  # type: ignore[import-not-found,unused-ignore]

        return _Zstd(zstd.ZstdFile(_Stream(file)), zstd.ZstdError)
    except ImportError:
        pass
    try:
        import zstandard
    except ImportError as error:
        raise MissingDependency(
            "Zstandard data needs the package zstandard", hint="run: pip install 'anyckpt[zstd]'"
        ) from error
    source: Any = _Stream(file)
    decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 27)
    stream = decompressor.stream_reader(source, read_size=_INPUT_BYTES, read_across_frames=True)
    return _Zstd(stream, zstandard.ZstdError)


CODECS: dict[str, Callable[[File], Decoder]] = {
    "deflate": lambda file: _Zlib(file, -15),
    "zlib": lambda file: _Zlib(file, 15),
    "gzip": lambda file: _Zlib(file, 31),
    "zstd": _open_zstd,
}
