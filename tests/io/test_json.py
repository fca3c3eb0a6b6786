"""Strict JSON: refused wherever two parsers could disagree, and never a RecursionError."""

from __future__ import annotations

import json as stdlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyckpt.errors import CheckpointError
from anyckpt.io import json

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


def code_of(data: bytes, **options: Any) -> str | None:
    try:
        json.parse(data, where="x", code="bad-header", **options)
    except CheckpointError as error:
        return error.finding.code
    return None


@given(VALUES, st.booleans())
def test_agrees_with_the_standard_library(value: Any, ascii_only: bool) -> None:
    data = stdlib.dumps(value, ensure_ascii=ascii_only).encode()
    assert json.parse(data, where="x", code="bad-header") == value


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", "bad-header"), (b"{", "bad-header"), (b"{} x", "bad-header"), (b"{}\0", "bad-header"), (b"{} \n", None),
        (b"\xef\xbb\xbf{}", "bad-header"), (b'"\xff"', "bad-utf8"), (b"NaN", "bad-header"), (b"[1e999]", "bad-header"),
        (b"-Infinity", "bad-header"), (b"9" * 5000, "bad-header"),
        (b'{"a":1,"a":1}', "duplicate-key"), (b'{"a":1,"\\u0061":1}', "duplicate-key"),
        (b'[{"b":{"":1,"":2}}]', "duplicate-key"),
        (b'"\\ud800"', "bad-utf8"), (b'"\\udc00"', "bad-utf8"), (b'"\\ud83d\\ude00"', None), (b'"\\\\ud800"', None),
        (b'"\\ud83d x\\ude00"', "bad-utf8"), (b'"\\ud83d\\n"', "bad-utf8"),
        (b"[" * 50_000, "too-deep"), (b"[" * 50_000 + b"]" * 50_000, "too-deep"), (b'{"a":' * 50_000, "too-deep"),
        (b"[" * 8 + b"]" * 8, None), (b"[" * 9 + b"]" * 9, "too-deep"),
    ],
)  # fmt: skip
def test_what_is_refused(data: bytes, code: str | None) -> None:
    assert code_of(data, max_depth=8) == code


def test_limits_and_permissions() -> None:
    assert code_of(b"[1, 2]", max_bytes=5) == "limit-exceeded"
    assert code_of(b"[NaN, -Infinity, 1e999]", allow_nan=True) is None
    told: list[str] = []
    assert json.parse(b'{"a":1,"a":2}', where="x", code="bad-header", on_duplicate=told.append) == {"a": 2}
    assert told == ["a"]


def test_objects_are_converted_innermost_first() -> None:
    seen: list[Any] = []

    def convert(found: dict[str, Any]) -> Any:
        seen.append(sorted(found))
        return tuple(found.values()) if "dtype" in found else found

    data = b'{"t": {"dtype": "F32", "shape": [2]}, "u": {"dtype": "I8", "shape": []}}'
    parsed = json.parse(data, where="x", code="bad-header", on_object=convert)
    assert parsed == {"t": ("F32", [2]), "u": ("I8", [])}
    assert seen == [["dtype", "shape"], ["dtype", "shape"], ["t", "u"]]
