"""What the user named: a file, or a folder with all that is in it, listed without opening anything.

A folder handed over by someone else may hold pipes, devices, links that dangle, turn in circles or lead out of it.
`Place` lists all of them by kind; opening goes through `paths.resolve`, which refuses them one by one with a finding.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anyckpt.core.source import File
from anyckpt.errors import CheckpointError, UsageError
from anyckpt.finding import Finding, Report, fail
from anyckpt.io import json
from anyckpt.io.bounds import byte_count
from anyckpt.io.local import open_local
from anyckpt.io.paths import kind_of, name_fault, printable, resolve

MAX_ENTRIES = 1_000_000
MAX_DEPTH = 64
_SKIPPED = frozenset({".git"})  # a clone's history holds every file a second time


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """A file or folder, and what it holds.

    `names`: the regular files by relative name, sorted; for a file, itself. `kinds`: every other entry and what it is:
    folder, folder-link, pipe, device, socket, broken-link, link-loop, escaping-link, unreadable. Names stay as the
    file system has them (undecodable bytes as surrogates); show them through `paths.printable`.
    `root` and `prefix`: the folder that names may not leave, and where in it this place is.
    `members`: of an archive that is read as a folder, its files by the names of its root; None on a disk.
    """

    path: Path
    is_folder: bool
    names: tuple[str, ...]
    kinds: Mapping[str, str]
    root: Path
    prefix: str = ""
    members: Mapping[str, File] | None = None

    @staticmethod
    def at(path: str | os.PathLike[str]) -> Place:
        """The place at a path from the command line: links in it are followed, whatever they lead to is judged.

        >>> Place.at("no/such/path")
        Traceback (most recent call last):
        anyckpt.errors.UsageError: no/such/path: no such file or folder
        """
        path = Path(path)
        shown = printable(os.fspath(path))
        try:
            s = os.stat(path)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise fail("special-file", "is a link that leads to itself", where=shown) from error
            if os.path.islink(path):
                target = printable(os.readlink(path))
                raise fail("broken-link", f"is a link to {target!r}, which does not exist", where=shown) from error
            if error.errno == errno.EACCES:
                raise UsageError(f"{shown}: permission denied") from error
            raise UsageError(f"{shown}: no such file or folder") from error
        kind = kind_of(s.st_mode)
        if kind == "folder":
            names, kinds = _walk(path, path)
            return Place(path, True, names, kinds, path)
        if kind != "file":
            raise fail("special-file", f"is a {kind}, not a file or folder", where=shown)
        if s.st_size == 0:
            raise fail("empty-file", "has no bytes", where=shown, hint="download or copy this file again")
        return Place(path, False, (path.name,), {}, path.parent)

    @staticmethod
    def inside(path: Path, members: Mapping[str, File]) -> Place:
        """The members of an archive at `path` as a folder; their names were judged by its reader."""
        return Place(path, True, tuple(sorted(members)), {}, path, "", members)

    def open(self, name: str = "") -> File:
        """The file of that name, taken from data or from `names`; no name: the file that this place is.

        A file's place also opens its siblings, under the same rules: parts of a set lie side by side.
        """
        if self.members is not None:
            return self._member(name)
        if not self.is_folder and name in ("", self.path.name):
            return open_local(self.path, os.fspath(self.path))
        if not name:
            raise fail("special-file", "is a folder where a file belongs", where=printable(os.fspath(self.path)))
        full = self._full(name)
        return open_local(resolve(self.root, full), full)

    def exists(self, name: str) -> bool:
        """Whether an entry of that name is there, be it one that `open` would refuse."""
        if self.members is not None:
            return not name_fault(name) and self._full(name) in self.members
        return not name_fault(name) and os.path.lexists(os.path.join(self.root, self._full(name)))

    def size(self, name: str = "") -> int:
        """The size of one file in bytes."""
        if self.members is not None:
            return self._member(name).size
        if not self.is_folder and name in ("", self.path.name):
            return os.stat(self.path).st_size
        return os.stat(resolve(self.root, self._full(name))).st_size

    def sizes(self) -> Iterator[tuple[str, int]]:
        """Every file's name and size. Links among `names` were judged when they were listed."""
        if self.members is not None or not self.is_folder:
            return ((name, self.size(name)) for name in self.names)
        return ((name, os.stat(os.path.join(self.root, self._full(name))).st_size) for name in self.names)

    def head(self, n_bytes: int, name: str = "") -> bytes:
        """The first `n_bytes` of a file, or all of it if it is shorter."""
        file = self.open(name)
        return file.read(0, min(n_bytes, file.size))

    def subplace(self, name: str) -> Place:
        """The folder of that name, taken from data; a link to a folder is followed if it stays inside."""
        full = self._full(name)
        if self.members is not None:
            below = name + "/"
            names = tuple(n[len(below) :] for n in self.names if n.startswith(below))
            return Place(self.root / full, True, names, {}, self.root, full, self.members)
        real = resolve(self.root, full, folder=True)
        if self.kinds.get(name) == "folder":
            below = name + "/"
            names = tuple(n[len(below) :] for n in self.names if n.startswith(below))
            kinds = {n[len(below) :]: kind for n, kind in self.kinds.items() if n.startswith(below)}
        else:
            names, kinds = _walk(real, self.root)
        return Place(self.root / full, True, names, kinds, self.root, full)

    def read_json(
        self, name: str, report: Report, *, code: str = "bad-index", allow_nan: bool = False, max_depth: int = 64
    ) -> Any:
        """A strict JSON file. A key that occurs twice is reported and its last value taken; other faults raise."""
        file = self.open(name)
        if file.size > json.MAX_BYTES:
            limit = byte_count(json.MAX_BYTES)
            raise fail("limit-exceeded", f"is JSON of {byte_count(file.size)}; the limit is {limit}", where=file.name)
        if file.size == 0:
            raise fail("empty-file", "has no bytes", where=file.name, hint="download or copy this file again")

        def on_duplicate(key: str) -> None:
            report.add("duplicate-key", f"the key {printable(key)!r} occurs twice", where=file.name)

        return json.parse(
            file.read(0, file.size),
            where=file.name,
            code=code,
            allow_nan=allow_nan,
            max_depth=max_depth,
            on_duplicate=on_duplicate,
        )

    def unreadable(self, suffixes: Iterable[str]) -> list[Finding]:
        """A finding for each entry with such an ending that is no file: what a reader would stumble over."""
        endings = tuple(suffixes)
        findings: list[Finding] = []
        for name in self.kinds:
            if name.endswith(endings) and self.kinds[name] != "unreadable":
                try:
                    resolve(self.root, self._full(name))
                except CheckpointError as error:
                    findings.append(error.finding)
        return findings

    def _member(self, name: str) -> File:
        found = (self.members or {}).get(self._full(name))
        if found is None:
            raise fail("missing-shard", "there is no such member", where=f"{self.path}!{printable(self._full(name))}")
        return found

    def _full(self, name: str) -> str:
        if reason := name_fault(name):
            raise fail("path-escape", f"the name {printable(name)!r} {reason}", where=printable(name))
        return f"{self.prefix}/{name}" if self.prefix else name


def _walk(folder: Path, root: Path) -> tuple[tuple[str, ...], dict[str, str]]:
    """List `folder` without following links to folders: regular files, and everything else by kind."""
    names: list[str] = []
    kinds: dict[str, str] = {}
    where = printable(os.fspath(folder))
    pending = [("", 0)]
    while pending:
        below, depth = pending.pop()
        try:
            entries = list(os.scandir(folder / below))
        except PermissionError:
            kinds[below or "."] = "unreadable"
            continue
        for entry in entries:
            name = below + entry.name
            kind = _kind(entry, root)
            if kind == "file":
                names.append(name)
                continue
            kinds[name] = kind
            if kind == "folder" and entry.name not in _SKIPPED:
                if depth == MAX_DEPTH:
                    raise fail("too-deep", f"holds folders nested more than {MAX_DEPTH} deep", where=where)
                pending.append((name + "/", depth + 1))
        if len(names) + len(kinds) > MAX_ENTRIES:
            raise fail("limit-exceeded", f"holds more than {MAX_ENTRIES:,} entries", where=where)
    return tuple(sorted(names)), kinds


def _kind(entry: os.DirEntry[str], root: Path) -> str:
    if not entry.is_symlink():
        if entry.is_file(follow_symlinks=False):
            return "file"
        if entry.is_dir(follow_symlinks=False):
            return "folder"
        return kind_of(entry.stat(follow_symlinks=False).st_mode)
    try:
        mode = os.stat(entry.path).st_mode
    except OSError as error:
        return "link-loop" if error.errno == errno.ELOOP else "broken-link"
    if stat.S_ISDIR(mode):
        return "folder-link"
    if not stat.S_ISREG(mode):
        return kind_of(mode)
    try:
        resolve(root, os.path.relpath(entry.path, root))
    except CheckpointError:
        return "escaping-link"
    return "file"
