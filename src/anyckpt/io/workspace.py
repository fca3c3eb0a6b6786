"""The write protocol of a destination: it appears whole or not at all, and a killed job can go on.

    OUT.anyckpt-partial/            beside OUT, so that the last step is a rename on one file system
        lock                        who is writing: {"pid", "process", "host"}
        …                           the runner's own journal
        out/                        becomes OUT; where OUT is one file, it is the only file in here
        old/                        what stood at OUT and is being replaced

    with Workspace.open(destination, force=..., n_bytes=plan.bytes_out) as work:
        ...                                 # write files at work.path(name) and force them to disk
        work.publish(as_folder=True)        # rename out/ to OUT, force that to disk, remove the rest

A reader sees the old OUT, for a moment none if a folder is replaced (POSIX cannot swap two folders in one step), or the
new one; never a mixture. After a crash `Workspace.open` puts an old OUT back that was moved aside.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from anyckpt.errors import Refused
from anyckpt.io.paths import name_fault, printable
from anyckpt.io.sink import require_space, sync_folder, write_at

SUFFIX = ".anyckpt-partial"
_PROCESS = secrets.token_hex(8)  # tells this process from an earlier one with the same number


@dataclass(frozen=True, slots=True)
class Workspace:
    """The partial folder of one destination, held under a lock; another name than "lock": one part of a shared job."""

    destination: Path
    force: bool
    lock_name: str = "lock"

    @staticmethod
    def open(destination: Path, *, force: bool = False, n_bytes: int = 0, lock_name: str = "lock") -> Workspace:
        """Take the destination: refuse an existing one unless forced, check the room, lock, and mend after a crash."""
        # The last name stays, links above it go: the rename must happen where the bytes are.
        parent = os.path.realpath(destination.parent)
        destination = Path(parent, destination.name) if destination.name else Path(parent)
        work = Workspace(destination, force, lock_name)
        work._refuse_to_replace()
        require_space(destination.parent, n_bytes - work._bytes_present())
        try:
            work.out.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise Refused(f"{printable(os.fspath(work.partial))} is in the way", hint="remove it") from error
        _lock(work.partial / lock_name)
        try:
            work._mend()
            work._refuse_to_replace()
        except BaseException:
            work.release()
            raise
        return work

    @property
    def partial(self) -> Path:
        """The folder beside the destination that holds everything until it is whole."""
        return self.destination.with_name(self.destination.name + SUFFIX)

    @property
    def out(self) -> Path:
        """The folder that becomes the destination, or holds the one file that does."""
        return self.partial / "out"

    def path(self, name: str) -> Path:
        """Where a file of the result is until it is published; "" where the destination is that file."""
        if name and (reason := name_fault(name)):
            raise ValueError(f"the output name {name!r} {reason}")
        return self.out / (name or self.destination.name)

    def publish(self, *, as_folder: bool) -> None:
        """Put the result in place of the destination and remove the partial folder."""
        result = self.out if as_folder else self.path("")
        for folder, _, _ in os.walk(self.out):
            sync_folder(Path(folder))
        self._refuse_to_replace()
        if os.path.lexists(self.destination):
            replaced_is_file = self.destination.is_file() and not self.destination.is_symlink()
            if not as_folder and replaced_is_file:
                os.chmod(result, stat.S_IMODE(os.stat(self.destination).st_mode))
            else:
                os.rename(self.destination, self.partial / "old")
        try:
            os.replace(result, self.destination)
        except BaseException:
            self._restore_old()
            raise
        sync_folder(self.destination.parent)
        self.discard()

    def release(self) -> None:
        """Give up the lock and keep what is there, for the same command to go on with; nothing after `publish`."""
        with suppress(FileNotFoundError):
            os.unlink(self.partial / self.lock_name)
        with suppress(OSError):  # not empty: something is there to go on with
            os.rmdir(self.out)
            os.rmdir(self.partial)

    def discard(self) -> None:
        """Remove the partial folder and all in it."""
        shutil.rmtree(self.partial, ignore_errors=True)

    def __enter__(self) -> Workspace:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _refuse_to_replace(self) -> None:
        if not self.force and _occupied(self.destination):
            raise Refused(
                f"{printable(os.fspath(self.destination))} exists",
                hint="choose another destination, or replace it with --force",
            )

    def _mend(self) -> None:
        """After a crash: put back or remove what was moved aside."""
        self._restore_old()
        old = self.partial / "old"
        if old.is_dir() and not old.is_symlink():
            shutil.rmtree(old)
        else:
            old.unlink(missing_ok=True)

    def _restore_old(self) -> None:
        """Undo the first of the two renames if the second did not happen."""
        old = self.partial / "old"
        if os.path.lexists(old) and not os.path.lexists(self.destination):
            os.rename(old, self.destination)

    def _bytes_present(self) -> int:
        """The room that a killed job's files take already; what is allocated, since they have their full size early."""
        if not self.out.is_dir():
            return 0
        stats = [path.stat() for path in self.out.rglob("*") if path.is_file()]
        return sum(min(s.st_size, getattr(s, "st_blocks", s.st_size) * 512) for s in stats)


def _occupied(destination: Path) -> bool:
    """Whether something would be lost: an empty folder, as people make one before, is not in the way."""
    if destination.is_dir() and not destination.is_symlink():
        return any(os.scandir(destination))
    return os.path.lexists(destination)


def _lock(path: Path) -> None:
    """Create the lock file, taking over that of a dead process of this host; Refused while another job runs."""
    mine = json.dumps({"pid": os.getpid(), "process": _PROCESS, "host": socket.gethostname()}).encode()
    for _ in range(3):
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            _remove_if_stale(path)
            continue
        try:
            write_at(fd, 0, mine)
        finally:
            os.close(fd)
        return
    raise Refused(f"{printable(os.fspath(path))} is being taken by other jobs", hint="try again")


def _remove_if_stale(path: Path) -> None:
    try:
        held = path.read_bytes()
    except FileNotFoundError:
        return
    try:
        owner = json.loads(held)
        pid, host = int(owner["pid"]), str(owner["host"])
        running = owner["process"] == _PROCESS if pid == os.getpid() else _alive(pid)
    except (ValueError, TypeError, KeyError):
        pid, host, running = 0, "an unknown host", True
    if running or host != socket.gethostname():
        raise Refused(
            f"another job is writing there (process {pid} on {printable(host, limit=80)})",
            hint=f"wait for it; if it is gone, remove {printable(os.fspath(path))}",
        )
    aside = path.with_name(f"{path.name}-{secrets.token_hex(4)}")
    with suppress(FileNotFoundError):
        os.rename(path, aside)
        if aside.read_bytes() != held:  # another job took over between our look and our rename: give it back
            os.link(aside, path)
        os.unlink(aside)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
