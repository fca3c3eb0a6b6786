"""Names taken from data: which file they mean, whether that is allowed, and how they are shown.

An index, an archive, a pickle or a link in a downloaded folder may name any path. Every such name goes through
`resolve`, which admits two places only: the checkpoint's own folder and, for a Hub cache, the blobs of that repository,
since there every file of a snapshot is a link out of its folder:

    models--org--name/snapshots/REV/model.safetensors -> ../../blobs/SHA256
"""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path

from anyckpt.finding import fail

_DRIVE_OR_URL = re.compile(r"[A-Za-z]:|[A-Za-z][A-Za-z0-9+.\-]*:/")
_UNSAFE_IN_NAME = re.compile(r"[^A-Za-z0-9._\-]")
_HUB_REPOSITORY = ("models--", "datasets--", "spaces--")


def name_fault(name: str) -> str:
    """Why `name` may not be used as a relative path; empty where it may.

    >>> name_fault("shards/model-1.bin"), name_fault("../secret")
    ('', "has a '..' part")
    """
    if not name:
        return "is empty"
    if "\0" in name:
        return "holds a NUL byte"
    if "\\" in name:
        return "holds a backslash"
    if name.startswith("/"):
        return "is absolute"
    if _DRIVE_OR_URL.match(name):
        return "names a drive or URL"
    if ".." in name.split("/"):
        return "has a '..' part"
    if not name.isascii():
        try:
            os.fsencode(name)
        except UnicodeEncodeError:
            return "holds half of a surrogate pair"
    return ""


def resolve(root: Path, name: str, *, allow_blobs: bool = True, folder: bool = False) -> Path:
    """The real path of the regular file (or folder, if `folder`) that `name`, taken from data, means under `root`.

    Raises [path-escape], [broken-link], [special-file], or [missing-shard] where nothing has that name.
    """
    shown = printable(name)
    if reason := name_fault(name):
        raise fail("path-escape", f"the name {shown!r} {reason}", where=shown)
    path = os.path.join(root, name)
    try:
        real = Path(os.path.realpath(path, strict=True))
        mode = os.stat(real).st_mode
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise fail("special-file", "is a link that leads to itself", where=shown) from error
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            if os.path.islink(path):
                target = printable(os.readlink(path))
                raise fail("broken-link", f"is a link to {target!r}, which does not exist", where=shown) from error
            raise fail("missing-shard", "there is no such file", where=shown) from error
        if error.errno == errno.ENAMETOOLONG:
            raise fail("path-escape", "the name is too long for a file", where=shown) from error
        raise
    kind = kind_of(mode)
    if kind != ("folder" if folder else "file") and kind != "folder":
        raise fail("special-file", f"is a {kind}, not a regular {'folder' if folder else 'file'}", where=shown)
    real_root = Path(os.path.realpath(root))
    if not real.is_relative_to(real_root) and not any(map(real.is_relative_to, _hub_blobs(real_root, allow_blobs))):
        raise fail(
            "path-escape",
            "is a link that leads out of the checkpoint",
            where=shown,
            hint="if that file is yours, name it on the command line or copy it into the folder",
        )
    if kind == "folder" and not folder:
        raise fail("special-file", "is a folder where a file belongs", where=shown)
    return real


def kind_of(mode: int) -> str:
    """What a file mode stands for, in a word: file, folder, pipe, device, socket."""
    tests = (
        (stat.S_ISREG, "file"),
        (stat.S_ISDIR, "folder"),
        (stat.S_ISFIFO, "pipe"),
        (stat.S_ISCHR, "device"),
        (stat.S_ISBLK, "device"),
        (stat.S_ISSOCK, "socket"),
    )
    return next((word for test, word in tests if test(mode)), "special file")


def _hub_blobs(real_root: Path, allow: bool) -> tuple[Path, ...]:
    """The blobs folder of the Hub cache that `real_root` is a snapshot of, if it is one."""
    if allow:
        for folder in (real_root, *real_root.parents):
            if folder.parent.name == "snapshots" and folder.parent.parent.name.startswith(_HUB_REPOSITORY):
                return (folder.parent.parent / "blobs",)
    return ()


def printable(text: str, *, limit: int = 400) -> str:
    r"""`text` with all that could act on a terminal or mislead a reader escaped, and its middle cut out if long.

    That is: control and bidirectional characters, unassigned ones, all spaces but the ordinary one, stray bytes.

    >>> printable("a\x1b[2Jb\u202ec\udcff")
    'a\\x1b[2Jb\\u202ec\\xff'
    """
    if len(text) > limit:
        text = f"{text[: limit // 2]}…{text[len(text) - limit // 2 :]}"
    return text if text.isprintable() else "".join(c if c.isprintable() else _escape(c) for c in text)


def _escape(character: str) -> str:
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:  # a byte kept by surrogateescape
        code -= 0xDC00
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def safe_name(tensor_name: str) -> str:
    """A file name for `tensor_name`: distinct names stay distinct, and none is a path, hidden, or over 200 bytes.

    >>> safe_name("model.embed"), safe_name("../x/é")
    ('model.embed', '%2E.%2Fx%2F%C3%A9')
    """
    escaped = _UNSAFE_IN_NAME.sub(_percent, tensor_name) or "%"
    if escaped.startswith("."):
        escaped = "%2E" + escaped[1:]
    if len(escaped) > 200:
        from hashlib import sha256

        # '~' never comes out of the escaping, so that a shortened name equals no other.
        escaped = f"{escaped[:160]}~{sha256(escaped.encode()).hexdigest()[:32]}"
    return escaped


def _percent(match: re.Match[str]) -> str:
    return "".join(f"%{byte:02X}" for byte in match.group().encode("utf-8", "surrogatepass"))
