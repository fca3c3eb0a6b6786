"""Reading GGUF: every key and tensor of every version and byte order, quickly, and faults named where they are."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import anyckpt
from anyckpt import formats
from anyckpt.errors import CheckpointError
from anyckpt.finding import Report
from anyckpt.formats.gguf import kv
from anyckpt.formats.gguf.kv import ARRAY, F32, F64, I32, STRING, U8, U32, Metadata
from anyckpt.formats.gguf.write import header_bytes
from anyckpt.io.place import Place

Make = Callable[..., bytes]
TEXT = st.text(max_size=300)
VALUES = st.one_of(
    st.booleans(), st.integers(-(1 << 31), (1 << 63)), st.floats(width=32, allow_nan=False), TEXT,
    st.lists(TEXT, min_size=1, max_size=80), st.lists(st.integers(-(1 << 31), (1 << 31) - 1), min_size=1, max_size=20),
    st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4), min_size=1, max_size=4),
)  # fmt: skip


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value


def _read(data: bytes, path: Path) -> Metadata:
    path.write_bytes(data)
    found = formats.read(Place.at(path), Report()).facts["gguf"]
    assert isinstance(found, Metadata)
    return found


@given(st.dictionaries(st.from_regex(r"[a-z]{1,8}\.[a-z_]{1,12}", fullmatch=True), VALUES, max_size=8))
def test_any_metadata_is_read_back_as_it_was_written(tmp_path_factory: Any, values: dict[str, Any]) -> None:
    values.pop("general.alignment", None)
    fields = {key: kv.guess(value) for key, value in values.items()}
    path = tmp_path_factory.mktemp("kv") / "m.gguf"
    found = _read(header_bytes(fields, {}, 32), path)
    assert {key: _plain(value) for key, value in found.items()} == values
    assert [f.encoded() for f in found.fields.values()] == [f.encoded() for f in fields.values()]


@given(st.lists(st.binary(max_size=600), max_size=300), st.booleans(), st.sampled_from([4, 8]))
def test_strings_in_a_row_are_walked_rightly_whatever_they_hold(rows: list[bytes], big: bool, width: int) -> None:
    order: Any = "big" if big else "little"
    data = b"\0\0\0" + b"".join(len(r).to_bytes(width, order) + r for r in rows)
    starts, lengths, stop = kv.walk_strings(data + b"tail", 3, len(rows), width, big)
    assert [data[s : s + n] for s, n in zip(starts, lengths)] == rows
    assert stop == len(data)


def test_bytes_that_look_like_lengths_do_not_mislead() -> None:
    rows = [bytes(i % 40) for i in range(500)] + [b"\x05" + bytes(7)] * 200
    data = b"".join(struct.pack("<Q", len(r)) + r for r in rows)
    starts, lengths, stop = kv.walk_strings(data, 0, len(rows))
    assert [data[s : s + n] for s, n in zip(starts, lengths)] == rows
    assert stop == len(data)


def test_a_vocabulary_of_250_000_tokens_opens_at_once(gguf_bytes: Make, tmp_path: Path) -> None:
    tokens = b"".join(struct.pack("<Q", 3 + i % 11) + b"t" * (3 + i % 11) for i in range(250_000))
    array = struct.pack("<IQ", STRING, 250_000) + tokens
    numbers = struct.pack("<IQ", F32, 250_000) + bytes(1_000_000)
    pairs = [("tokenizer.ggml.tokens", ARRAY, array), ("tokenizer.ggml.scores", ARRAY, numbers)]
    path = tmp_path / "v.gguf"
    path.write_bytes(gguf_bytes(pairs))
    took = []
    for _ in range(5):
        start = time.process_time()
        found = anyckpt.open(path).facts["gguf"]
        took.append(time.process_time() - start)
    assert min(took) < 0.05, took
    assert len(found["tokenizer.ggml.tokens"]) == 250_000
    assert found["tokenizer.ggml.tokens"][10] == "t" * 13


@pytest.mark.parametrize("version", [1, 2, 3])
@pytest.mark.parametrize("big", [False, True])
def test_every_version_and_byte_order_reads_the_same(gguf_bytes: Make, tmp_path: Path, version: int, big: bool) -> None:
    o, size = ">" if big else "<", "I" if version == 1 else "Q"
    text = struct.pack(o + size, 5) + b"llama"
    words = struct.pack(f"{o}I{size}{size}2s{size}", STRING, 2, 2, b"ab", 0)
    pairs = [("general.architecture", STRING, text), ("a.n", U32, struct.pack(o + "I", 77)), ("a.w", ARRAY, words)]
    values = np.arange(6, dtype=o + "f4").reshape(2, 3)
    halves = np.arange(6, 12).astype(o + "f2").reshape(3, 2)
    data = values.tobytes() + bytes(8) + halves.tobytes()
    infos = [("x.weight", (3, 2), 0, 0), ("y.weight", (2, 3), 1, 32)]
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes(pairs, infos, data, version=version, big=big))
    found = anyckpt.open(path)
    assert dict(found.facts["gguf"]) == {"general.architecture": "llama", "a.n": 77, "a.w": ["ab", ""]}
    assert np.array_equal(found.weights["x.weight"].numpy(), values)
    assert np.array_equal(found.weights["y.weight"].numpy(), halves)


def test_values_that_someone_forgot_to_swap_are_seen(gguf_bytes: Make, tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(0, 0.02, (64, 64)).astype(ml_dtypes.bfloat16)
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes([], [("x.weight", (64, 64), 30, 0)], values.tobytes(), big=True))
    assert anyckpt.open(path).weights["x.weight"].tobytes() == values.tobytes()
    path.write_bytes(gguf_bytes([], [("x.weight", (64, 64), 30, 0)], values.byteswap().tobytes(), big=True))
    assert anyckpt.open(path).weights["x.weight"].tobytes() == values.tobytes()


def test_blocks_are_values_to_numpy_and_bytes_to_whoever_asks(gguf_bytes: Make, tmp_path: Path) -> None:
    block = np.float16(0.5).tobytes() + np.arange(-16, 16, dtype=np.int8).tobytes()
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes([], [("x.weight", (32, 1), 8, 0)], block))
    found = anyckpt.open(path).weights["x.weight"]
    assert found.dtype.name == "q8_0"
    assert found.numpy().tolist() == [[i / 2 for i in range(-16, 16)]]
    assert found.tobytes() == block


def test_keys_of_every_kind_keep_their_kind(gguf_bytes: Make, string: Callable[[str], bytes], tmp_path: Path) -> None:
    pairs = [
        ("a", U8, b"\xff"), ("b", F64, struct.pack("<d", 1e300)), ("c", STRING, string("größe\0東京")),
        ("d", ARRAY, struct.pack("<IQ3i", I32, 3, -1, 0, 1)), ("e", 7, b"\1"), ("f", 11, struct.pack("<q", -(1 << 62))),
    ]  # fmt: skip
    data = gguf_bytes(pairs)
    found = _read(data, tmp_path / "m.gguf")
    assert [_plain(value) for value in found.values()] == [255, 1e300, "größe\0東京", [-1, 0, 1], True, -(1 << 62)]
    assert header_bytes(found.fields, {}, 32) == data


HUGE = struct.pack("<Q", 1 << 62)
FAULTS: dict[str, tuple[list[Any], list[Any], bytes]] = {
    "bad-header": ([("a", 99, b"")], [], b""),
    "header-too-big": ([("a", STRING, HUGE)], [], b""),
    "truncated": ([], [("x", (4, 4), 0, 0)], bytes(60)),
    "overlap": ([], [("x", (16,), 0, 0), ("y", (16,), 0, 32)], bytes(128)),
    "unknown-dtype": ([], [("x", (16,), 4, 0)], bytes(64)),
    "duplicate-name": ([], [("x", (16,), 0, 0), ("x", (16,), 0, 64)], bytes(128)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_file_is_reported_and_never_crashes(fault: str, gguf_bytes: Make, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes(*FAULTS[fault]))
    report = Report()
    try:
        formats.read(Place.at(path), report)
        codes = [f.code for f in report.findings if f.severity == "error"]
    except CheckpointError as error:
        codes = [error.finding.code]
    assert codes, fault


@given(st.data())
def test_no_flipped_byte_raises_anything_but_a_finding(
    gguf_bytes: Make, string: Callable[[str], bytes], tmp_path_factory: Any, data: Any
) -> None:
    good = gguf_bytes(
        [("general.name", STRING, string("llama")), ("a", ARRAY, struct.pack("<IQ", STRING, 2) + string("x") * 2)],
        [("x", (32, 2), 8, 0), ("y", (4,), 0, 96)], bytes(112),
    )  # fmt: skip
    at = data.draw(st.integers(4, len(good) - 1))
    changed = bytearray(good)
    changed[at] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("flip") / "m.gguf"
    path.write_bytes(changed[: data.draw(st.integers(at, len(good)))])
    try:
        formats.read(Place.at(path), Report())
    except CheckpointError:
        pass
