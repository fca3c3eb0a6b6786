"""Compressed streams read at any offset give what a whole decode gives, in bounded memory."""

from __future__ import annotations

import gzip
import pickle
import random
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anyckpt.errors import CheckpointError
from anyckpt.io import inflate
from anyckpt.io.inflate import decoded, decoded_unsized
from anyckpt.io.view import MemoryFile

PLAIN = b"".join(random.Random(1).randbytes(50) * 3 for _ in range(4000))


def deflate(data: bytes) -> bytes:
    compressor = zlib.compressobj(6, zlib.DEFLATED, -15)
    return compressor.compress(data) + compressor.flush()


STREAMS = {"deflate": deflate(PLAIN), "zlib": zlib.compress(PLAIN), "gzip": gzip.compress(PLAIN)}


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inflate, "_FIRST_SPACING", 4096)
    monkeypatch.setattr(inflate, "_BLOCK_BYTES", 1000)
    monkeypatch.setattr(inflate, "_INPUT_BYTES", 500)


@pytest.mark.parametrize("codec", STREAMS)
@settings(max_examples=15, deadline=None)
@given(reads=st.lists(st.tuples(st.integers(0, len(PLAIN)), st.integers(0, 5000)), max_size=8))
def test_any_offset(codec: str, reads: list[tuple[int, int]]) -> None:
    file = decoded(MemoryFile("m", STREAMS[codec]), len(PLAIN), codec)
    for start, length in reads:
        length = min(length, len(PLAIN) - start)
        assert file.read(start, length) == PLAIN[start : start + length]
    assert len(file._snapshots) <= inflate._MAX_SNAPSHOTS + 1


def test_threads_pickles_and_sizes() -> None:
    file = decoded_unsized(MemoryFile("m", STREAMS["gzip"]), "gzip")
    assert file.size == len(PLAIN) and file.on_disk() is None and file.fileno() is None
    starts = [random.Random(2).randrange(len(PLAIN) - 100) for _ in range(60)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda s: file.read(s, 100), starts)) == [PLAIN[s : s + 100] for s in starts]
    assert pickle.loads(pickle.dumps(file)).read(7, 9) == PLAIN[7:16]


def test_gzip_of_several_streams_and_padding() -> None:
    data = gzip.compress(b"one") + gzip.compress(b"") + gzip.compress(b"two") + bytes(100)
    file = decoded_unsized(MemoryFile("m", data), "gzip")
    assert file.read(0, file.size) == b"onetwo"


def code_of(data: bytes, size: int, codec: str = "deflate", **options: Any) -> str | None:
    try:
        file = decoded(MemoryFile("m", data), size, codec, **options)
        file.read(0, size)
    except CheckpointError as error:
        return error.finding.code
    return None


def test_lies_about_the_size() -> None:
    data = STREAMS["deflate"]
    assert code_of(data, len(PLAIN)) is None
    assert code_of(data, len(PLAIN) + 1) == "truncated"
    assert code_of(data, len(PLAIN) - 1) == "bomb"
    assert code_of(deflate(bytes(3 << 20)), 3 << 20) == "bomb"
    assert code_of(deflate(bytes(3 << 20)), 3 << 20, max_ratio=None) is None
    with pytest.raises(CheckpointError):
        decoded_unsized(MemoryFile("m", gzip.compress(bytes(3 << 20))), "gzip")


@pytest.mark.parametrize("codec", ["deflate", "zlib", "gzip"])
def test_cut_and_damaged_streams(codec: str) -> None:
    plain = PLAIN[:400]
    data = {"deflate": deflate, "zlib": zlib.compress, "gzip": gzip.compress}[codec](plain)
    for n in range(len(data)):
        assert code_of(data[:n], len(plain), codec) in ("truncated", None if n > len(data) - 9 else "truncated")
        for flip in (1, 0xFF):
            code_of(data[:n] + bytes([data[n] ^ flip]) + data[n + 1 :], len(plain), codec)  # raises nothing else


def test_zstandard() -> None:
    zstandard = pytest.importorskip("zstandard", reason="the optional package zstandard is not installed")
    data = zstandard.compress(PLAIN) + zstandard.compress(b"tail")
    file = decoded_unsized(MemoryFile("m", data), "zstd")
    assert file.size == len(PLAIN) + 4
    for start in (5000, 100, len(PLAIN) - 2):
        assert file.read(start, 6) == (PLAIN + b"tail")[start : start + 6]
    assert code_of(b"\x28\xb5\x2f\xfd" + b"\xff" * 20, 10, "zstd") == "inconsistent"
    assert code_of(data[:-8], len(PLAIN) + 4, "zstd") == "truncated"
