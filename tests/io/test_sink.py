"""Writing: all bytes or an error, the old or the new destination, and a killed job goes on."""

from __future__ import annotations

import errno
import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from anyckpt.errors import CheckpointError, OutOfSpace, Refused
from anyckpt.io import sink, workspace
from anyckpt.io.sink import copy_range, require_space, write_at
from anyckpt.io.workspace import Workspace

DATA = bytes(range(256)) * 40


@pytest.fixture
def files(tmp_path: Path) -> Any:
    (tmp_path / "source").write_bytes(DATA)
    source = os.open(tmp_path / "source", os.O_RDONLY)
    target = os.open(tmp_path / "target", os.O_RDWR | os.O_CREAT)
    yield source, target
    os.close(source)
    os.close(target)


def test_short_writes_are_continued(files: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, memoryview(data)[:7], offset))
    write_at(files[1], 3, DATA)
    assert os.pread(files[1], len(DATA) + 9, 0) == b"\0\0\0" + DATA
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: 0)
    with pytest.raises(OSError, match="no progress"):
        write_at(files[1], 0, b"x")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_has_its_own_error(files: tuple[int, int], monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def full(*_: Any) -> int:
        raise OSError(number, "full")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OutOfSpace, match="full"):
        write_at(files[1], 0, b"x")
    monkeypatch.setattr(os, "copy_file_range", full, raising=False)
    with pytest.raises(OutOfSpace):
        copy_range(*files[:1], 0, files[1], 0, 10)


@pytest.mark.parametrize("kernel", ["works", "missing", "refuses", "stops", "short"])
def test_copies_in_the_kernel_or_without(files: tuple[int, int], monkeypatch: pytest.MonkeyPatch, kernel: str) -> None:
    real = getattr(os, "copy_file_range", None)

    def fake(source: int, target: int, n: int, a: int, b: int) -> int:
        if kernel == "refuses":
            raise OSError(errno.EXDEV, "other disk")
        return 0 if kernel == "stops" or real is None else int(real(source, target, min(n, 100), a, b))

    if kernel == "missing":
        monkeypatch.delattr(os, "copy_file_range", raising=False)
    elif kernel != "works":
        monkeypatch.setattr(os, "copy_file_range", fake, raising=False)
    monkeypatch.setattr(sink, "_BUFFER_BYTES", 1000)
    copy_range(files[0], 5, files[1], 2, len(DATA) - 5)
    assert os.pread(files[1], len(DATA) + 9, 0) == b"\0\0" + DATA[5:]
    with pytest.raises(CheckpointError, match="shorter"):
        copy_range(files[0], 0, files[1], 0, len(DATA) + 1)


def test_room_is_checked_before(tmp_path: Path) -> None:
    require_space(tmp_path / "not" / "there", 1)
    with pytest.raises(OutOfSpace, match="are free"):
        require_space(tmp_path, 1 << 60)
    with pytest.raises(OutOfSpace):
        Workspace.open(tmp_path / "out", n_bytes=1 << 60)
    assert not list(tmp_path.iterdir())


def write(work: Workspace, name: str, data: bytes) -> None:
    work.path(name).parent.mkdir(exist_ok=True)
    work.path(name).write_bytes(data)


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_a_folder_is_published_whole(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()  # empty, so not in the way
    with Workspace.open(out) as work:
        write(work, "a", b"1")
        write(work, "sub/b", b"2")
        assert tree(out) == {}
        with pytest.raises(ValueError, match="output name"):
            work.path("../x")
        work.publish(as_folder=True)
    assert tree(tmp_path) == {"out/a": b"1", "out/sub/b": b"2"}
    with pytest.raises(Refused, match="exists"):
        Workspace.open(out)
    with Workspace.open(out, force=True) as work:
        write(work, "c", b"3")
        work.publish(as_folder=True)
    assert tree(tmp_path) == {"out/c": b"3"}


def test_a_single_file_is_published_whole(tmp_path: Path) -> None:
    out = tmp_path / "x.safetensors"
    for data in (b"one", b"two"):
        with Workspace.open(out, force=True) as work:
            write(work, "", data)
            work.publish(as_folder=False)
        assert tree(tmp_path) == {"x.safetensors": data}
        os.chmod(out, 0o600)
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    with Workspace.open(out, force=True) as work:  # a folder in the place of a file
        write(work, "a", b"1")
        work.publish(as_folder=True)
    assert tree(tmp_path) == {"x.safetensors/a": b"1"}


def test_a_failed_job_keeps_what_is_finished(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(RuntimeError), Workspace.open(out):
        raise RuntimeError
    assert not list(tmp_path.iterdir())
    with Workspace.open(out) as work:
        write(work, "a", b"1")
    with Workspace.open(out) as work:
        assert tree(work.out) == {"a": b"1"}
        work.publish(as_folder=True)
    assert tree(tmp_path) == {"out/a": b"1"}


def test_a_crash_between_the_two_renames_is_mended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "old").write_bytes(b"old")
    work = Workspace.open(out, force=True)
    write(work, "a", b"1")
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            work.publish(as_folder=True)
    assert tree(out) == {"old": b"old"}  # undone at once, and after a power cut by the next job:
    os.rename(out, work.partial / "old")
    work.release()
    assert not out.exists()
    with pytest.raises(Refused, match="exists"):
        Workspace.open(out)
    assert tree(out) == {"old": b"old"}
    with Workspace.open(out, force=True) as work:
        work.publish(as_folder=True)
    assert tree(tmp_path) == {"out/a": b"1"}


def test_one_writer_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    first = Workspace.open(out)
    (first.partial / "journal").touch()
    with pytest.raises(Refused, match="another job"):
        Workspace.open(out)
    lock = first.partial / "lock"
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for stale in ({"pid": ended.pid, "process": "x"}, {"pid": os.getpid(), "process": "an earlier one"}):
        lock.write_text(json.dumps({**stale, "host": workspace.socket.gethostname()}))
        Workspace.open(out).release()
        assert not lock.exists() and (first.partial / "journal").exists()
    for held in (json.dumps({"pid": 1, "process": "x", "host": "elsewhere"}), "", "[]"):
        lock.write_text(held)
        with pytest.raises(Refused, match="another job"):
            Workspace.open(out)
    lock.unlink()
    part = Workspace.open(out, lock_name="lock-1")
    write(part, "a", b"1")
    with Workspace.open(out, lock_name="lock-2") as other:
        assert len(list(other.out.iterdir())) == 1


def test_sync_and_odd_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / f"f{workspace.SUFFIX}").write_bytes(b"")
    with pytest.raises(Refused, match="in the way"):
        Workspace.open(tmp_path / "f")
    monkeypatch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(errno.EINVAL, "no")))
    sink.sync_folder(tmp_path)  # a file system without folder syncs is no error
