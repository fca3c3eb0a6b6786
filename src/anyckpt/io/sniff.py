"""What a file that no format claims most likely is: a pointer, a web page, an archive to unpack first, plain text."""

from __future__ import annotations

import re

from anyckpt.core.source import File
from anyckpt.errors import CheckpointError
from anyckpt.finding import DEFAULT_SEVERITY, Finding, fail
from anyckpt.io.bounds import byte_count
from anyckpt.io.paths import printable

HEAD_BYTES = 4096  # as much as `sniff` makes use of

_COMPRESSED = (
    (b"\x1f\x8b", "gzip", "gunzip"),
    (b"\xfd7zXZ\0", "xz", "unxz"),
    (b"\x28\xb5\x2f\xfd", "Zstandard", "unzstd"),
    (b"7z\xbc\xaf\x27\x1c", "7-Zip", "7z x"),
    (b"BZh", "bzip2", "bunzip2"),
    (b"\x04\x22\x4d\x18", "LZ4", "unlz4"),
    (b"Rar!\x1a\x07", "RAR", "unrar x"),
    (b"LZIP", "lzip", "lzip -d"),
)
_LFS = re.compile(rb"version https://git-lfs\.github\.com/spec/|version https://hawser\.github\.com/spec/")


def sniff(head: bytes, size: int, where: str = "") -> Finding | None:
    """The finding for a file that begins with `head` and is no checkpoint, None where nothing is recognised.

    >>> sniff(b"<!DOCTYPE html><title>Sign in</title>", 5000).code
    'html-page'
    """

    def found(code: str, message: str, hint: str = "") -> Finding:
        return Finding(code, DEFAULT_SEVERITY[code], message, where, hint)

    if size == 0:
        return found("empty-file", "has no bytes", "download or copy this file again")
    if _LFS.match(head):
        wanted = re.search(rb"size (\d{1,18})\b", head)
        of = f" of {byte_count(int(wanted[1]))}" if wanted else ""
        return found("lfs-pointer", f"is a git-lfs pointer to a file{of}, not the file itself", "run: git lfs pull")
    for magic, what, tool in _COMPRESSED:
        if head.startswith(magic):
            name = where.rsplit("/", 1)[-1]
            return found("compressed-wrapper", f"is compressed with {what}", f"unpack it first: {tool} {name}".rstrip())
    if not head[:8].strip(b"\0"):
        n_zeros = len(head) - len(head.lstrip(b"\0"))
        return found("zero-head", f"begins with {n_zeros:,} zero bytes or more", "download or copy this file again")
    text = _as_text(head)
    if text is None:
        return None
    start = text.lstrip("\ufeff \t\r\n").lower()
    if start.startswith(("<!doctype html", "<html", "<head", "<body")) or "<html" in start[:1024]:
        return found("html-page", "is a web page, such as a sign-in or error page", "download it again, signed in")
    first_line = printable(" ".join(text.split())[:100], limit=100)
    if start.startswith(("<?xml", "<error")):
        return found("not-a-checkpoint", f"is XML, perhaps a server's error reply: {first_line}")
    if start.startswith(("{", "[")):
        return found("not-a-checkpoint", f"is JSON, perhaps a server's error reply: {first_line}")
    return found("not-a-checkpoint", f"is text: {first_line}")


def complain(file: File) -> CheckpointError:
    """The exception for a file that no format claims, with the best word for what it is."""
    found = sniff(file.read(0, min(HEAD_BYTES, file.size)), file.size, file.name)
    if found is not None and found.code == "zero-head" and _seems_all_zero(file):
        message = "has its length and nothing but zeros: a crash came before its bytes reached the disk"
        return fail("zero-tail", message, where=file.name, hint="use an earlier one, or copy this file again")
    if found is None:
        message = "is not a checkpoint of any known format"
        return fail("not-a-checkpoint", message, where=file.name, hint="see what is read: anyckpt formats")
    return fail(found.code, found.message, where=found.where, hint=found.hint)


def _seems_all_zero(file: File, *, n_samples: int = 64, sample_bytes: int = 4096) -> bool:
    """Whether samples all over the file, its end among them, hold zeros only."""
    last = max(0, file.size - sample_bytes)
    places = {i * last // n_samples for i in range(n_samples + 1)}
    return not any(file.read(at, min(sample_bytes, file.size - at)).strip(b"\0") for at in sorted(places))


def _as_text(head: bytes) -> str | None:
    """`head` decoded if all of it is readable text; a character cut in two by the end of `head` does not count."""
    for n_cut in range(4):
        try:
            text = head[: len(head) - n_cut].decode("utf-8")
        except UnicodeDecodeError:
            continue
        return text if text and all(c.isprintable() or c in "\t\r\n\f\ufeff" for c in text) else None
    return None
