"""Damaged and hostile torch files: the right word, what is whole still described, nothing safe that is not."""

from __future__ import annotations

import io
import json
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
from builders import array, codes, read_bytes, read_path, saved

from anyckpt import formats
from anyckpt.core.inert import Mapping
from anyckpt.errors import CheckpointError
from anyckpt.finding import Report
from anyckpt.formats.torch import legacy
from anyckpt.formats.torch import zip as torch_zip
from anyckpt.io.view import MemoryFile

WEIGHTS = Mapping({"a": array(8, 8), "b": array(4, 4, start=100), "c": array(3, start=200)})
SAVED = saved(WEIGHTS)


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        import os

        return os.system, ("touch ANYCKPT_MARKER",)


def looked_at(data: bytes) -> tuple[set[str], str]:
    """The codes found by reading and by the deep check, and the verdict; only CheckpointErrors may end either."""
    report = Report()
    file = MemoryFile("model.pt", data)
    try:
        checkpoint = torch_zip.read(file, report)
        for tensor in checkpoint.weights.values():
            if tensor.is_stored:
                tensor.tobytes()
        torch_zip.verify(file, checkpoint, report)
    except CheckpointError as error:
        report.extend([error.finding])
    return codes(report), report.verdict


def test_a_zip_cut_anywhere_is_a_fault_and_never_a_traceback() -> None:
    for length in range(4, len(SAVED), 7):
        found, _ = looked_at(SAVED[:length])
        assert found & {"truncated", "not-a-checkpoint", "zip-inconsistent"}, (length, found)


def test_what_lies_before_the_cut_is_still_read() -> None:
    at = SAVED.index(array(4, 4, start=100).tobytes()) + 10
    checkpoint, report = read_bytes(SAVED[:at])
    assert checkpoint.weights["a"].tobytes() == array(8, 8).tobytes()
    assert not checkpoint.weights["b"].is_stored
    (fault,) = report.errors
    assert fault.code == "truncated"
    assert "76 bytes of 332 bytes, 2 of 3 storages" in fault.message


def test_a_flipped_bit_is_found_by_the_deep_check() -> None:
    at = SAVED.index(array(8, 8).tobytes()) + 17
    damaged = SAVED[:at] + bytes([SAVED[at] ^ 4]) + SAVED[at + 1 :]
    assert looked_at(damaged) == ({"crc-mismatch"}, "safe")


def test_a_changed_byte_anywhere_never_ends_in_a_traceback() -> None:
    for at in range(0, len(SAVED), 5):
        looked_at(SAVED[:at] + bytes([SAVED[at] ^ 0xFF]) + SAVED[at + 1 :])


def rewritten(change: dict[str, bytes | None]) -> bytes:
    """The members of SAVED in a new zip, some replaced, added or left out."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(SAVED)) as old, zipfile.ZipFile(out, "w") as new:
        members = {name: old.read(name) for name in old.namelist()} | {f"model/{k}": v for k, v in change.items()}
        for name, content in members.items():
            if content is not None:
                new.writestr(name, content)
    return out.getvalue()


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"data/1": None}, "missing-record"),
        ({"data/1": b"short"}, "size-mismatch"),
        ({"byteorder": b"middle"}, "unknown-byteorder"),
        ({"notes.txt": b"hello"}, "unexpected-member"),
        ({"data.pkl": b"\x80\x02}q\x00."}, "unexpected-member"),
    ],
)
def test_a_fault_has_its_word(change: dict[str, bytes | None], code: str) -> None:
    found, verdict = looked_at(rewritten(change))
    assert code in found or (code == "unexpected-member" and "data.pkl" in change)
    assert verdict == "safe"


@pytest.mark.parametrize("name", ["extra.pkl", "data/99", "DATA.PKL", "notes.txt"])
def test_a_dangerous_pickle_is_found_wherever_it_lies(name: str) -> None:
    found, verdict = looked_at(rewritten({name: pickle.dumps(Evil(), 2)}))
    assert verdict == "dangerous"
    assert "unexpected-member" in found
    assert not Path("ANYCKPT_MARKER").exists()


def test_a_second_pickle_behind_the_first_is_judged() -> None:
    with zipfile.ZipFile(io.BytesIO(SAVED)) as old:
        good = old.read("model/data.pkl")
    found, verdict = looked_at(rewritten({"data.pkl": good + pickle.dumps(Evil(), 2)}))
    assert verdict == "dangerous"
    assert "trailing-data" in found


def test_one_hostile_global_does_not_hide_the_tensors(corpus: Path) -> None:
    checkpoint, report = read_path(corpus / "torch/hostile_eval_zip/model.pt")
    assert report.verdict == "dangerous"
    assert len(checkpoint.weights) == 18


def stream(*storages: tuple[str, int, bytes], evil: bool = False, protocol: int = 2, tail: bytes = b"") -> bytes:
    """A file of torch before 1.6: float32 storages (key, elements claimed by the object, record)."""

    out = io.BytesIO()
    for value in (legacy.MAGIC, 1001, {"protocol_version": 1001, "little_endian": True, "type_sizes": {}}):
        pickle.dump(value, out, protocol)
    ops = [b"\x80\x02}("]
    for i, (key, n, _) in enumerate(storages):
        pid = b"(X\7\0\0\0storagectorch\nFloatStorage\nX" + struct.pack("<I", len(key)) + key.encode()
        pid += b"X\3\0\0\0cpuJ" + struct.pack("<i", n) + b"NtQ"
        view = b"K\0J" + struct.pack("<i", n) + b"\x85K\1\x85\x89ccollections\nOrderedDict\n)Rt"
        ops.append(b"X\1\0\0\0" + bytes([97 + i]) + b"ctorch._utils\n_rebuild_tensor_v2\n(" + pid + view + b"R")
    if evil:
        ops.append(b"X\1\0\0\0z" + b"cos\nsystem\nX\4\0\0\0true\x85R")
    out.write(b"".join(ops) + b"u.")
    pickle.dump([key for key, _, _ in storages], out, 2)
    for _, _, record in storages:
        out.write(struct.pack("<q", len(record) // 4) + record)
    return out.getvalue() + tail


def storage(n: int) -> bytes:
    return array(n).tobytes()


@pytest.mark.parametrize("protocol", range(6))
def test_a_stream_is_recognised_in_every_pickle_protocol(protocol: int) -> None:
    checkpoint, report = read_bytes(stream(("7", 4, storage(4)), ("9", 2, storage(2)), protocol=protocol))
    assert checkpoint.format == "torch-legacy"
    assert checkpoint.weights["b"].tobytes() == storage(2)
    assert not report.findings


@pytest.mark.parametrize(
    ("data", "code", "whole"),
    [
        (stream(("7", 4, storage(4)), ("9", 2, storage(2)))[:-3], "truncated", {"a"}),
        (stream(("7", 4, storage(5)), ("9", 2, storage(2))), "size-mismatch", set()),
        (stream(("7", 4, storage(4)), tail=b"more"), "trailing-data", {"a"}),
    ],
)
def test_a_damaged_stream_has_its_word(data: bytes, code: str, whole: set[str]) -> None:
    checkpoint, report = read_bytes(data, "model.pth")
    assert code in codes(report)
    assert {name for name, t in checkpoint.weights.items() if t.is_stored} == whole


def test_what_a_stream_would_run_is_found() -> None:
    assert read_bytes(stream(("7", 4, storage(4)), evil=True))[1].verdict == "dangerous"
    behind = stream(("7", 4, storage(4)), tail=pickle.dumps(Evil(), 2))
    assert read_bytes(behind)[1].verdict == "dangerous"


def test_a_stream_cut_anywhere_is_a_fault() -> None:
    data = stream(("7", 4, storage(4)), ("9", 2, storage(2)))
    for length in range(60, len(data)):
        report = Report()
        try:
            legacy.read(MemoryFile("x", data[:length]), report)
        except CheckpointError as error:
            report.extend([error.finding])
        assert report.errors, length


def test_every_hostile_file_of_the_corpus_has_its_word(corpus: Path) -> None:
    wrong = []
    for folder in sorted(f for pattern in ("pt_*", "ptl_*") for f in (corpus / "hostile").glob(pattern)):
        case = json.loads((folder / "case.json").read_text())
        expect = case["expect"]
        accepted = set(expect.get("accept", ())) | {
            expect.get(kind) for kind in ("error", "verdict", "warning") if expect.get(kind)
        }
        report = Report()
        file = MemoryFile("model.pt", (folder / case["path"]).read_bytes())
        try:
            row = formats.of_file(file)
            checkpoint = formats.read_file(file, report)
            if row is not None and hasattr(row.load(), "verify"):
                row.load().verify(file, checkpoint, report)
        except CheckpointError as error:
            report.extend([error.finding])
        words = {f.code.replace("-", "_") for f in report.findings} | {report.verdict}
        if not words & accepted or ("safe" in accepted and expect.get("verdict") == "safe" and report.errors):
            wrong.append((folder.name, sorted(words), sorted(accepted)))
    assert not wrong
