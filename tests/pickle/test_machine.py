"""Opcodes against Python's own pickle, and what happens where a stream breaks."""

from __future__ import annotations

import pickle
import pickletools
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anyckpt.core.inert import Opaque
from anyckpt.pickle.machine import run
from anyckpt.pickle.opcodes import ARGUMENT_BYTES, TABLE, _unknown
from anyckpt.pickle.result import Limits
from anyckpt.pickle.streams import run_all

scalars = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(max_size=300)
)
keys = st.text() | st.integers(-(2**63), 2**63 - 1) | st.tuples(st.text(), st.booleans())
plain = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(keys, inner, max_size=5)
        | st.tuples(inner, inner)
        | st.sets(keys, max_size=4)
        | st.frozensets(st.text(), max_size=4)
    ),
    max_leaves=20,
)


@settings(max_examples=150, deadline=None)
@given(plain, st.integers(0, 5))
def test_plain_data_equals_pythons_own(value: Any, protocol: int) -> None:
    """Every protocol's opcodes for plain data give what pickle.loads gives."""
    result = run(pickle.dumps(value, protocol))
    assert result.value == value
    assert result.complete and result.verdict == "safe" and not result.findings


@pytest.mark.parametrize("protocol", range(6))
def test_memoryview_start_and_end(protocol: int) -> None:
    """A stream inside a larger buffer is read from `start` to its own STOP, from bytes or a view alike."""
    one = pickle.dumps({"a": [1, 2], "t": "x" * 300}, protocol)
    data = b"head" + one + b"tail"
    for buffer in (data, memoryview(data)):
        result = run(buffer, start=4)
        assert result.end == 4 + len(one) and result.value == {"a": [1, 2], "t": "x" * 300}


@pytest.mark.parametrize("protocol", range(6))
def test_identity_and_cycles_survive(protocol: int) -> None:
    """One object stays one object."""
    shared = [1]
    value: dict[str, Any] = {"a": shared, "b": shared}
    value["self"] = value
    got = run(pickle.dumps(value, protocol)).value
    assert got["a"] is got["b"] and got["self"] is got


def test_every_opcode_is_known() -> None:
    """The table has pickletools' opcodes, no more, with the argument sizes it states."""
    known = {ord(op.code) for op in pickletools.opcodes}
    assert {byte for byte, op in enumerate(TABLE) if op is not _unknown} == known
    counts = {"uint1": 1, "uint2": 2, "int4": 4, "uint4": 4, "uint8": 8, "float8": 8}
    for op in pickletools.opcodes:
        fixed = counts.get(op.arg.name) if op.arg else None
        if fixed:
            assert ARGUMENT_BYTES[ord(op.code)] == fixed, op.name


@pytest.mark.parametrize("protocol", range(6))
def test_cut_at_every_byte(protocol: int) -> None:
    """A stream cut anywhere is an error that says so, and never an exception."""
    data = pickle.dumps({"a": [1, 2.5, "text", b"bytes", 2**70, (1, 2)], "n": None}, protocol)
    for n in range(len(data)):
        result = run(data[:n])
        codes = [f.code for f in result.findings]
        assert not result.complete and codes[0] in ("truncated", "malformed-pickle"), (n, codes)


def test_flip_every_byte() -> None:
    """Any damage gives a result: no exception, no hang."""
    data = pickle.dumps({"a": [1, 2.5, "text", b"bytes"], "s": {1, 2}, "big": 10**30}, 4)
    for i in range(len(data)):
        for bit in (0, 3, 7):
            run(data[:i] + bytes([data[i] ^ 1 << bit]) + data[i + 1 :])


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_noise(data: bytes) -> None:
    """Random bytes give a result."""
    run(data)
    run_all(data)


ops_without_argument = [op.code.encode("latin-1") for op in pickletools.opcodes if op.arg is None]
pieces = st.one_of(
    st.sampled_from([code for code in ops_without_argument if code != b"."]),
    st.sampled_from([b"K\x01", b"h\x00", b"q\x00", b"q\x01", b"h\x01", b"X\x02\0\0\0os", b"\x8c\x06system"]),
    st.sampled_from([b"cos\nsystem\n", b"ccollections\nOrderedDict\n", b"iproject\nThing\n", b"cbuiltins\nset\n"]),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(pieces, max_size=40))
def test_imports_are_those_of_pickletools(parts: list[bytes]) -> None:
    """Every GLOBAL and INST that a walk of the opcodes sees is reported, whatever the stack says."""
    data = b"".join(parts) + b"."
    walked = {arg for op, arg, _ in pickletools.genops(data) if op.name in ("GLOBAL", "INST")}
    result = run(data)
    reported = {f"{item.module} {item.name}" for item in result.imports}
    assert reported >= walked if result.complete else True
    for name in walked - reported:  # behind a fault: found by the sweep, unless it is harmless
        module, _, last = name.partition(" ")
        assert any(f"{module}.{last}" in f.message for f in result.findings) or module in ("collections", "builtins")


class _Counter(bytes):
    """Bytes that count how often they are looked at."""

    looks = 0

    def __getitem__(self, index: Any) -> Any:
        type(self).looks += index.stop - index.start if isinstance(index, slice) and index.stop is not None else 1
        return super().__getitem__(index)


def test_time_is_linear_in_the_length_of_a_name() -> None:
    """torch's own restricted reader needs quadratic time for a long GLOBAL line; counted in bytes looked at."""
    looks = []
    for n in (1000, 4000, 16000):
        _Counter.looks = 0
        run(_Counter(b"cmodule\n" + b"a" * n + b"\nN."))
        looks.append(_Counter.looks)
    assert looks[1] < 6 * looks[0] and looks[2] < 6 * looks[1]


def test_copies_are_bounded_by_the_size_of_the_file() -> None:
    """A big list named over and over by two bytes is copied only as often as the file's size explains."""
    n = 2000
    data = b"\x80\x02](" + b"K\x01" * n + b"eq\x00cbuiltins\nlist\nq\x010]" + b"h\x01h\x00\x85Ra" * n + b"."
    result = run(data)
    assert "limit-exceeded" in [f.code for f in result.findings]
    assert sum(len(item) for item in result.value if isinstance(item, list)) <= 8 * len(data) + (64 << 10)


def test_lengths_are_checked_before_anything_is_allocated() -> None:
    """Claims of 2^62 bytes and memo slots of 2^31 cost nothing."""
    huge = (2**62).to_bytes(8, "little")
    for data in (b"\x8d" + huge, b"\x96" + huge, b"\x8e" + huge, b"X\xff\xff\xff\xff"):
        assert [f.code for f in run(data).findings] == ["truncated"]
    assert run(b"Nr\xff\xff\xff\x7f.").verdict == "safe"


def test_limits() -> None:
    """Opcodes, memo, stack and marks are bounded."""
    small = Limits(opcodes=1 << 14, memo=1000, stack=1000, marks=10)
    for data in (b"N" * 40_000, b"N0" * 40_000, b"N" + b"\x94" * 40_000, b"(" * 11):
        assert [f.code for f in run(data + b"N.", limits=small).findings] == ["limit-exceeded"]


@pytest.mark.parametrize(
    "key",
    [
        b")" + b"\x85" * 20_000,  # nested so deep that hashing would overflow the C stack
        b")" + b"q\x00h\x00\x86" * 40,  # 2^40 steps to hash
        b"\x8a\x09" + b"\x01" * 8 + b"\x01",  # an integer beyond 64 bits
        b"]", b"}", b"\x8f",
    ],
)
def test_keys_that_must_not_be_hashed(key: bytes) -> None:
    """They are left out, the sound keys beside them stay."""
    result = run(b"\x80\x04}(X\x01\0\0\0aK\x01" + key + b"K\x02X\x01\0\0\0bK\x03u.")
    assert result.value == {"a": 1, "b": 3}
    assert result.findings[0].code in ("limit-exceeded", "malformed-pickle")


def test_deep_nesting_needs_no_recursion() -> None:
    """A hundred thousand lists inside one another are one value."""
    n = 100_000
    value = run(b"]" * n + b"a" * (n - 1) + b".").value
    depth = 0
    while value:
        value, depth = value[0], depth + 1
    assert depth == n - 1 > sys.getrecursionlimit()


def test_broken_stream_keeps_what_was_found() -> None:
    """Pending pairs of a dict are there although its SETITEMS never came."""
    result = run(pickle.dumps({"a": 1, "b": [1, 2], "c": "x" * 50}, 2)[:-20])
    assert not result.complete and result.value["a"] == 1 and result.value["b"] == [1, 2]


def test_opaque_may_be_a_key() -> None:
    """MetadataIndex objects are keys of DCP's storage_data."""
    result = run(b"\x80\x02}cproject\nKey\n)\x81K\x01s.")
    [(key, value)] = result.value.items()
    assert isinstance(key, Opaque) and value == 1 and result.verdict == "unknown"


def test_streams_and_what_follows_them() -> None:
    """Several streams, zeros behind the last, and bytes that do not belong."""
    one, two = pickle.dumps([1], 2), pickle.dumps({"a": 2}, 4)
    both = run_all(one + two + b"\0" * 100)
    assert [r.value for r in both.results] == [[1], {"a": 2}] and both.end == len(one + two)
    assert [f.code for f in run_all(one + b"\xffgarbage").findings] == ["trailing-data"]
    assert run_all(one + b"\xff cos\nsystem\n(tR").verdict == "dangerous"
