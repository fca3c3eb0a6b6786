"""Strict JSON: for headers and indexes, where two readers that disagree about one file are a way to smuggle weights in.

Beyond the standard library's parser (whose C scanner does the work): keys that occur twice after unescaping, NaN and
Infinity, nesting beyond a limit, lone surrogates, bytes that are no UTF-8, and size are all faults. A header of a
million tensors is 100 MB of JSON, so the caller may turn each object into something leaner as soon as it is parsed.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any

from anyckpt.core import collector
from anyckpt.errors import CheckpointError
from anyckpt.finding import fail
from anyckpt.io.bounds import byte_count
from anyckpt.io.paths import printable

MAX_BYTES = 100_000_000
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|.)", re.DOTALL)


def parse(
    data: bytes,
    *,
    where: str,
    code: str,
    max_depth: int = 64,
    max_bytes: int = MAX_BYTES,
    allow_nan: bool = False,
    on_object: Callable[[dict[str, Any]], Any] | None = None,
    on_duplicate: Callable[[str], None] | None = None,
) -> Any:
    """Parse a whole document or raise; `code` is the finding for one that is no JSON.

    `on_object` is called with each object, innermost first, and its result takes the object's place; what it makes of
    an object is not looked into again, so that it must judge the nesting inside. `on_duplicate` is told each key that
    occurs twice, and the last value wins; without it a duplicate raises [duplicate-key].

    >>> parse(b'{"a": {"n": 1}}', where="x", code="bad-index", on_object=lambda d: d.get("n", d))
    {'a': 1}
    """
    if len(data) > max_bytes:
        limit = byte_count(max_bytes)
        raise fail("limit-exceeded", f"is JSON of {byte_count(len(data))}; the limit is {limit}", where=where)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise fail("bad-utf8", f"byte {error.start:,} is not UTF-8", where=where) from error
    if _SURROGATE.search(text):
        _refuse_lone_surrogates(text, where)

    def object_from(pairs: list[tuple[str, Any]]) -> Any:
        found = dict(pairs)
        if len(found) != len(pairs):
            _duplicates(pairs, where, on_duplicate)
        return on_object(found) if on_object else found

    def constant(word: str) -> float:
        if not allow_nan:
            raise fail(code, f"holds {word}, which is not JSON", where=where)
        return float(word)

    def finite(number: str) -> float:
        value = float(number)
        if not allow_nan and math.isinf(value):
            raise fail(code, f"holds {printable(number, limit=40)}, which no float holds", where=where)
        return value

    try:
        decoder = json.JSONDecoder(object_pairs_hook=object_from, parse_constant=constant, parse_float=finite)
        with collector.paused():
            document = decoder.decode(text)
    except RecursionError as error:
        raise fail("too-deep", f"is nested more than {max_depth} levels deep", where=where) from error
    except CheckpointError:
        raise
    except ValueError as error:
        raise fail(code, f"is not JSON: {printable(str(error), limit=120)}", where=where) from error
    _check_depth(document, max_depth, where)
    return document


def _duplicates(pairs: list[tuple[str, Any]], where: str, tell: Callable[[str], None] | None) -> None:
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            if tell is None:
                raise fail("duplicate-key", f"the key {printable(key)!r} occurs twice", where=where)
            tell(key)
        seen.add(key)


def _check_depth(document: Any, max_depth: int, where: str) -> None:
    """Level by level, without recursion. Every object and array is visited once; numbers and strings are skipped."""
    level = [document]
    for _ in range(max_depth):
        below: list[Any] = []
        for item in level:
            if type(item) is dict:
                below.extend(v for v in item.values() if type(v) is dict or type(v) is list)
            elif type(item) is list:
                below.extend(v for v in item if type(v) is dict or type(v) is list)
        if not below:
            return
        level = below
    raise fail("too-deep", f"is nested more than {max_depth} levels deep", where=where)


def _refuse_lone_surrogates(text: str, where: str) -> None:
    """Half a pair is a string that cannot be written as UTF-8 again; parsers differ in what they make of it."""
    high_end = -1  # where a high surrogate ended that still wants its low half
    for match in _ESCAPE.finditer(text):
        unit = int(match[1], 16) if match[1] else 0
        if high_end >= 0 and not (match.start() == high_end and 0xDC00 <= unit < 0xE000):
            break
        if high_end < 0 and 0xDC00 <= unit < 0xE000:
            break
        high_end = match.end() if 0xD800 <= unit < 0xDC00 else -1
    else:
        if high_end < 0:
            return
    raise fail("bad-utf8", "a string holds half of a surrogate pair", where=where)
