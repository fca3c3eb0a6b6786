"""Local files, views, paths and places: a name from data is resolved or refused, a read is whole or a finding."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyckpt.core.source import File
from anyckpt.errors import CheckpointError, UsageError
from anyckpt.finding import Report
from anyckpt.io import local
from anyckpt.io.local import open_local
from anyckpt.io.paths import name_fault, printable, resolve, safe_name
from anyckpt.io.place import Place
from anyckpt.io.sniff import sniff
from anyckpt.io.view import MemoryFile, sub_file


def code_of(error: pytest.ExceptionInfo[CheckpointError]) -> str:
    return error.value.finding.code


def test_a_local_file_reads_exactly_what_is_asked(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(bytes(range(256)))
    file = open_local(path, "f")
    assert isinstance(file, File)
    assert (file.size, file.read(10, 3), file.read(256, 0)) == (256, b"\n\v\f", b"")
    buffer = bytearray(4)
    file.readinto(252, memoryview(buffer))
    assert buffer == bytes([252, 253, 254, 255])
    assert os.pread(file.fileno(), 2, 1) == b"\1\2"
    with pytest.raises(CheckpointError, match=r"bytes 250-260; the file ends at 256 \(4 bytes missing\)") as error:
        file.read(250, 10)
    assert code_of(error) == "truncated" and error.value.finding.where == "f"
    with pytest.raises(CheckpointError):
        file.read(-1, 1)


def test_short_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"0123456789")
    file = open_local(path)
    pread, preadv = os.pread, os.preadv
    monkeypatch.setattr(os, "pread", lambda fd, n, offset: pread(fd, min(n, 3), offset))
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: preadv(fd, [buffers[0][:3]], offset))
    assert file.read(0, 10) == b"0123456789"
    buffer = bytearray(9)
    file.readinto(1, memoryview(buffer))
    assert buffer == b"123456789"


def test_a_file_that_changes_while_it_is_read_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "MAX_OPEN_FILES", 1)
    (tmp_path / "a").write_bytes(b"one")
    (tmp_path / "b").write_bytes(b"two")
    a, b = open_local(tmp_path / "a"), open_local(tmp_path / "b")
    assert (a.read(0, 3), b.read(0, 3)) == (b"one", b"two")
    (tmp_path / "new").write_bytes(b"eno")
    os.replace(tmp_path / "new", tmp_path / "a")
    with pytest.raises(CheckpointError) as error:
        a.read(0, 3)
    assert code_of(error) == "inconsistent"
    os.truncate(tmp_path / "b", 1)
    with pytest.raises(CheckpointError) as error:
        b.read(0, 3)
    assert code_of(error) == "inconsistent"


def test_descriptors_are_few_and_leased_ones_stay_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "MAX_OPEN_FILES", 4)
    files = []
    for n in range(20):
        (tmp_path / str(n)).write_bytes(bytes([n]))
        files.append(open_local(tmp_path / str(n)))
    fd = files[0].fileno()
    assert [f.read(0, 1)[0] for f in files] == list(range(20))
    assert os.pread(fd, 1, 0) == b"\0"
    assert len(local._pool._fds) <= 5


@given(st.binary(min_size=20, max_size=40), st.data())
def test_views_of_views_are_views(data: bytes, draw: st.DataObject) -> None:
    file: File = MemoryFile("m", data)
    expected = data
    for _ in range(3):
        start = draw.draw(st.integers(0, len(expected)))
        length = draw.draw(st.integers(0, len(expected) - start))
        file, expected = sub_file(file, start, length), expected[start : start + length]
        assert file.read(0, file.size) == expected
    assert isinstance(file.file, MemoryFile)  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError):
        sub_file(file, 0, len(expected) + 1)


def test_a_view_knows_where_it_lies_on_disk(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"0123456789")
    file = open_local(tmp_path / "f")
    assert sub_file(sub_file(file, 2, 8), 3, 2).on_disk() == (file, 5)
    assert MemoryFile("m", b"").on_disk() is None


@pytest.mark.parametrize(
    "name",
    ["", "/a", "../x", "a/../b", "a\\b", "C:x", "c:/x", "\\\\host\\x", "hf://a/b", "file:/x", "a\0b", "..", "\ud800"],
)
def test_bad_names_are_refused(tmp_path: Path, name: str) -> None:
    assert name_fault(name)
    with pytest.raises(CheckpointError) as error:
        resolve(tmp_path, name)
    assert code_of(error) == "path-escape"


def test_links_are_judged_by_where_they_lead(tmp_path: Path) -> None:
    root = tmp_path / "model"
    (root / "sub").mkdir(parents=True)
    (root / "sub" / "w").write_bytes(b"w")
    (tmp_path / "secret").write_bytes(b"s")
    (root / "inside").symlink_to("sub/w")
    (root / "outside").symlink_to("../secret")
    (root / "gone").symlink_to("nowhere")
    (root / "loop").symlink_to("loop")
    (root / "out").symlink_to("..")
    os.mkfifo(root / "pipe")
    assert resolve(root, "inside") == (root / "sub" / "w").resolve()
    expected = {
        "outside": "path-escape", "out/secret": "path-escape", "gone": "broken-link", "loop": "special-file",
        "pipe": "special-file", "sub": "special-file", "nothing": "missing-shard", "sub/w/x": "missing-shard",
        "x" * 300: "path-escape",
    }  # fmt: skip
    for name, code in expected.items():
        with pytest.raises(CheckpointError) as error:
            resolve(root, name)
        assert (name, code_of(error)) == (name, code)


def test_a_hub_cache_may_use_its_own_blobs_only(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--org--name" / "snapshots" / "abc"
    blobs = tmp_path / "models--org--name" / "blobs"
    other = tmp_path / "models--org--other" / "blobs"
    for folder in (snapshot, blobs, other):
        folder.mkdir(parents=True)
    (blobs / "1").write_bytes(b"x")
    (other / "2").write_bytes(b"x")
    (snapshot / "w").symlink_to("../../blobs/1")
    (snapshot / "v").symlink_to("../../../models--org--other/blobs/2")
    place = Place.at(snapshot)
    assert place.names == ("w",) and place.kinds == {"v": "escaping-link"}
    assert place.open("w").read(0, 1) == b"x"
    with pytest.raises(CheckpointError):
        resolve(snapshot, "w", allow_blobs=False)


@given(st.text(), st.text())
def test_output_names_are_safe_and_distinct(a: str, b: str) -> None:
    name = safe_name(a)
    assert not name_fault(name) and "/" not in name and not name.startswith(".") and len(name) <= 200
    assert (name == safe_name(b)) == (a == b)


@given(st.text())
def test_printable_text_is_printable(text: str) -> None:
    assert printable(text).isprintable()


def test_a_place_lists_what_a_folder_holds_without_opening_it(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "w.bin").write_bytes(b"w")
    (tmp_path / "a.bin").write_bytes(b"")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "x").write_bytes(b"x")
    os.mkfifo(tmp_path / "p.bin")
    (tmp_path / "self").symlink_to(".")
    (tmp_path / "gone.bin").symlink_to("x")
    (tmp_path / "latest").symlink_to("b")
    with socket.socket(socket.AF_UNIX) as server:
        here = os.getcwd()
        os.chdir(tmp_path)  # socket paths are short
        server.bind("s")
        os.chdir(here)
    place = Place.at(tmp_path)
    assert place.names == ("a.bin", "b/w.bin")
    assert place.kinds == {
        "b": "folder", ".git": "folder", "p.bin": "pipe", "self": "folder-link", "gone.bin": "broken-link",
        "latest": "folder-link", "s": "socket",
    }  # fmt: skip
    assert dict(place.sizes()) == {"a.bin": 0, "b/w.bin": 1}
    assert sorted(f.code for f in place.unreadable([".bin"])) == ["broken-link", "special-file"]
    assert place.exists("gone.bin") and not place.exists("../x") and not place.exists("none")
    for name in ("b", "latest"):
        below = place.subplace(name)
        assert below.names == ("w.bin",) and below.head(9, "w.bin") == b"w"
        assert below.open("w.bin").name == f"{name}/w.bin"
    with pytest.raises(CheckpointError):
        place.open()


def test_a_place_that_is_a_file_opens_itself_and_its_siblings(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"A")
    (tmp_path / "b").write_bytes(b"B")
    (tmp_path / "link").symlink_to("a")
    place = Place.at(tmp_path / "link")
    assert not place.is_folder and place.names == ("link",)
    assert place.open().read(0, 1) == b"A" and place.open("b").read(0, 1) == b"B" and place.size() == 1


def test_places_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        Place.at(tmp_path / "none")
    (tmp_path / "empty").touch()
    (tmp_path / "gone").symlink_to("nothing")
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "pipe")
    expected = {"empty": "empty-file", "gone": "broken-link", "loop": "special-file", "pipe": "special-file"}
    for name, code in expected.items():
        with pytest.raises(CheckpointError) as error:
            Place.at(tmp_path / name)
        assert code_of(error) == code
    with pytest.raises(CheckpointError) as error:
        Place.at("/dev/null")
    assert code_of(error) == "special-file"


def test_folders_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from anyckpt.io import place

    (tmp_path / "a" / "b" / "c").mkdir(parents=True)
    monkeypatch.setattr(place, "MAX_DEPTH", 2)
    with pytest.raises(CheckpointError, match="nested"):
        Place.at(tmp_path)
    monkeypatch.setattr(place, "MAX_ENTRIES", 1)
    (tmp_path / "x").touch()
    with pytest.raises(CheckpointError, match="more than 1 entries"):
        Place.at(tmp_path)


def test_json_of_a_place(tmp_path: Path) -> None:
    (tmp_path / "i.json").write_text('{"a": 1, "\\u0061": 2}')
    (tmp_path / "n.json").write_text('{"a": NaN}')
    (tmp_path / "e.json").write_text("")
    place, report = Place.at(tmp_path), Report()
    assert place.read_json("i.json", report) == {"a": 2}
    assert [f.code for f in report.findings] == ["duplicate-key"]
    assert place.read_json("n.json", report, allow_nan=True)["a"] != 0
    with pytest.raises(CheckpointError) as error:
        place.read_json("n.json", report, code="bad-header")
    assert code_of(error) == "bad-header"
    with pytest.raises(CheckpointError) as error:
        place.read_json("e.json", report)
    assert code_of(error) == "empty-file"


@pytest.mark.parametrize(
    ("head", "code"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12345\n", "lfs-pointer"),
        (b"\n <html><body>", "html-page"), (b"<?xml version='1.0'?><Error>", "not-a-checkpoint"),
        (b"\x1f\x8b\x08", "compressed-wrapper"), (b"\x28\xb5\x2f\xfd", "compressed-wrapper"),
        (b'{"error": "no"}', "not-a-checkpoint"), (b"hello\n\xc3", "not-a-checkpoint"), (bytes(64), "zero-head"),
        (b"\x80\x02}q\0.", None), (b"PK\3\4", None), (b"\xff\xfe\xfd", None),
    ],
)  # fmt: skip
def test_what_is_no_checkpoint_is_named(head: bytes, code: str | None) -> None:
    found = sniff(head, max(1, len(head)), "model.bin")
    assert (found and found.code) == code
    assert sniff(b"", 0).code == "empty-file"  # type: ignore[union-attr]
