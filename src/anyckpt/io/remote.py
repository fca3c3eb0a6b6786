"""Object stores and web servers, through the optional package fsspec: hf://, s3://, gs://, https://.

Only ranges are asked for; nothing is cached here, since callers read headers once and data in large coalesced runs. The
host may answer with less than it was asked for, or with another version of the object than a moment ago: the length of
every answer is checked, and so is the object's identity (etag) where the store gives one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from anyckpt.core.source import File
from anyckpt.errors import MissingDependency, UsageError
from anyckpt.finding import fail
from anyckpt.io.bounds import check_range
from anyckpt.io.paths import name_fault, printable

_EXTRAS = {"s3": "s3", "gs": "gs", "gcs": "gs"}  # protocol -> the extra that brings its client; others: remote
_ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """An object at `url` of a store; `size` as it was when it was opened."""

    url: str
    name: str
    size: int
    etag: str = field(default="", compare=False)

    def read(self, offset: int, length: int) -> bytes:
        check_range(self.name, self.size, offset, length)
        if length == 0:
            return b""
        system, path = _system(self.url)
        for attempt in range(_ATTEMPTS):
            try:
                data: bytes = system.cat_file(path, start=offset, end=offset + length)
            except FileNotFoundError as error:
                raise fail("inconsistent", "the file was removed while it was being read", where=self.name) from error
            except OSError:
                if attempt == _ATTEMPTS - 1:
                    raise
                continue
            if len(data) == length:
                return data
        raise fail("inconsistent", f"the host gave {len(data):,} of {length:,} bytes", where=self.name)

    def readinto(self, offset: int, buffer: memoryview) -> None:
        buffer.cast("B")[:] = self.read(offset, buffer.nbytes)

    def on_disk(self) -> tuple[File, int] | None:
        return None

    def fileno(self) -> None:
        return None

    def check_unchanged(self) -> None:
        """Raise [inconsistent] if the object is no longer the one that was opened; call at the end of a long job."""
        now = open_remote(self.url)
        if (now.size, now.etag) != (self.size, self.etag):
            raise fail("inconsistent", "the file changed on its host while it was being read", where=self.name)


def is_remote(source: str) -> bool:
    """Whether the user named a URL and not a path.

    >>> is_remote("hf://org/model"), is_remote("./a:b")
    (True, False)
    """
    protocol, found, _ = source.partition("://")
    return bool(found) and protocol.isalnum() and protocol != "file"


def open_remote(url: str) -> RemoteFile:
    """Open one object; its size must be known."""
    system, path = _system(url)
    shown = printable(url)
    try:
        info = system.info(path)
    except FileNotFoundError as error:
        raise UsageError(f"{shown}: no such file") from error
    if info.get("type") == "directory":
        raise fail("special-file", "is a folder where a file belongs", where=shown)
    if not isinstance(info.get("size"), int):
        raise fail("unsupported", "its host does not tell its size", where=shown)
    etag = next((str(info[key]) for key in ("ETag", "etag", "blob_id", "mtime") if info.get(key)), "")
    return RemoteFile(url, shown, info["size"], etag)


def list_remote(url: str) -> dict[str, int]:
    """The files below a URL by relative name, with their sizes."""
    system, path = _system(url)
    root = path.rstrip("/") + "/"
    try:
        found = system.find(path, detail=True)
    except FileNotFoundError as error:
        raise UsageError(f"{printable(url)}: no such file or folder") from error
    below = {name[len(root) :]: info for name, info in sorted(found.items()) if name.startswith(root)}
    return {name: int(info.get("size") or 0) for name, info in below.items() if not name_fault(name)}


def _system(url: str) -> tuple[Any, str]:
    """The fsspec file system (which it keeps for the next call) and the path in it."""
    protocol = url.partition("://")[0]
    extra = _EXTRAS.get(protocol, "remote")
    hint = f"run: pip install 'anyckpt[{extra}]'"
    try:
        import fsspec

        system, path = fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise MissingDependency(f"{protocol}:// needs an optional package", hint=hint) from error
    except ValueError as error:
        raise UsageError(f"{printable(url)}: no such kind of source", hint=hint) from error
    return system, path
