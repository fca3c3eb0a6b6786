"""Tar archives: what Python writes we read alike; names and links are judged after long names are put in place."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anyckpt.core.source import File
from anyckpt.errors import CheckpointError
from anyckpt.finding import Report
from anyckpt.io.inflate import decoded_unsized
from anyckpt.io.tar import TarArchive, read_tar
from anyckpt.io.view import MemoryFile

PARTS = st.text("abé_", min_size=1, max_size=120)
FORMATS = st.sampled_from([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])


def make(*members: tuple[tarfile.TarInfo, bytes], format: int = tarfile.PAX_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=format) as archive:
        for info, data in members:
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def entry(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


def read(data: bytes) -> tuple[TarArchive, list[str]]:
    report = Report()
    archive = read_tar(MemoryFile("x.nemo", data), report)
    return archive, [f.code for f in report.findings]


def contents(archive: TarArchive) -> dict[str, bytes]:
    return {name: f.read(0, f.size) for name in archive.members for f in [archive.open(name)]}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(PARTS, PARTS), max_size=4, unique=True), st.binary(max_size=1200), FORMATS)
def test_reads_what_python_writes(names: list[tuple[str, str]], data: bytes, format: int) -> None:
    members = {f"{folder}/{name}": data[n:] for n, (folder, name) in enumerate(names)}
    try:
        raw = make(*((entry(name), data) for name, data in members.items()), format=format)
    except ValueError:  # ustar has no room for the name
        return
    archive, codes = read(raw) if members else (None, [])
    assert archive is None or contents(archive) == members
    assert not codes


def test_cut_at_every_byte() -> None:
    long_name = "d/" + "n" * 150
    for format in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        members = (entry("a"), b"1" * 600), (entry(long_name), b"2"), (entry("l", tarfile.SYMTYPE, "a"), b"")
        data = make(*members, format=format)
        end = len(data.rstrip(b"\0")) // 512 * 512 + 512
        for n in range(0, end + 512, 1 if format == tarfile.GNU_FORMAT else 37):
            if n < 512:
                with pytest.raises(CheckpointError, match="too short"):
                    read(data[:n])
                continue
            archive, codes = read(data[:n])
            assert "truncated" in codes
            if "broken-link" not in codes:
                contents(archive)


def test_every_byte_of_a_header_changed() -> None:
    data = make((entry("a"), b"1"), (entry("b"), b"2"), format=tarfile.USTAR_FORMAT)
    for n in [*range(154), *range(156, 512)]:  # the checksum covers all but what ends its own field
        for flip in (0x01, 0x80, 0xFF):
            with pytest.raises(CheckpointError):
                read(data[:n] + bytes([data[n] ^ flip]) + data[n + 1 :])


@given(st.binary(max_size=600))
def test_noise_is_no_tar(noise: bytes) -> None:
    with pytest.raises(CheckpointError):
        read(noise)


@pytest.mark.parametrize("format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_hostile_members(format: int) -> None:
    long = "x" * 120
    cases = {
        "path-escape": [
            (entry("../a"), b""), (entry("/a"), b""), (entry(f"d/../../{long}"), b""),
            (entry("s", tarfile.SYMTYPE, "/etc/passwd"), b""), (entry("s", tarfile.SYMTYPE, f"../{long}"), b""),
            (entry("h", tarfile.LNKTYPE, "../x"), b""),
        ],
        "special-file": [
            (entry("c", tarfile.CHRTYPE), b""), (entry("b", tarfile.BLKTYPE), b""), (entry("f", tarfile.FIFOTYPE), b""),
        ],
        "broken-link": [(entry("s", tarfile.SYMTYPE, "gone"), b""), (entry("h", tarfile.LNKTYPE, "gone"), b"")],
    }  # fmt: skip
    for code, members in cases.items():
        for info, data in members:
            assert read(make((entry("ok"), b"1"), (info, data), format=format))[1] == [code]


def test_links_dots_and_duplicates() -> None:
    archive, codes = read(
        make(
            (entry("./d/a"), b"A"), (entry("./d/s", tarfile.SYMTYPE, "../d/a"), b""),
            (entry("h", tarfile.LNKTYPE, "d/a"), b""), (entry("./d", tarfile.DIRTYPE), b""), (entry("."), b""),
        )
    )  # fmt: skip
    assert contents(archive) == {"d/a": b"A", "d/s": b"A", "h": b"A"} and not codes
    archive, codes = read(make((entry("a"), b"1"), (entry("./a"), b"2")))
    assert codes == ["duplicate-member"] and contents(archive) == {"a": b"2"}
    assert archive.open(archive.shadowed[0]).read(0, 1) == b"1"
    archive, codes = read(make((entry("a", tarfile.SYMTYPE, "b"), b""), (entry("b", tarfile.SYMTYPE, "a"), b"")))
    with pytest.raises(CheckpointError, match="itself"):
        archive.open("a")
    assert "path-escape" in read(make((entry("d", tarfile.SYMTYPE, "e"), b""), (entry("d/x"), b"")))[1]
    with pytest.raises(CheckpointError, match="no member"):
        archive.open("none")


def test_the_hostile_corpus(corpus: Path) -> None:
    cases = sorted((corpus / "hostile").glob("nemo_*"))
    assert len(cases) > 10
    seen = {}
    for case in cases:
        expect = json.loads((case / "case.json").read_text())["expect"]
        report = Report()
        file: File = MemoryFile("model.nemo", (case / "files" / "model.nemo").read_bytes())
        try:
            if file.read(0, 2) == b"\x1f\x8b":
                file = decoded_unsized(file, "gzip")
            read_tar(file, report)
        except CheckpointError as error:
            report.extend([error.finding])
        codes = {f.code for f in report.findings}
        words = [expect.get("error"), *(expect.get("accept") or [])]
        accepted = {word.replace("_", "-") for word in words if word}
        seen[case.name] = (codes, accepted)
        assert codes <= accepted, seen[case.name]
        if "error" in expect and expect["error"] != "bad_yaml":
            assert codes, case.name
