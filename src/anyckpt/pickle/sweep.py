"""Look for import opcodes in bytes that can't be run: what follows a fault, or lies behind the last stream.

Only names that look like identifiers count. Every pattern begins at a byte that its own body can't contain, so the
search is linear.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

from anyckpt.finding import Verdict
from anyckpt.pickle.allow import classify

_NAME = rb"[A-Za-z_][\w.]{0,127}"
# The second line of GLOBAL or INST; the first is what stands before the newline it begins with.
_SECOND_LINE = re.compile(rb"\n(?=(" + _NAME + rb")\n)")
_FIRST_LINE = re.compile(rb"[ci](?=(" + _NAME + rb")$)")
_STRING = rb"(?:\x8c[\x01-\x7f]|X[\x01-\x7f]\0\0\0)(" + _NAME + rb")"
_PUT = rb"(?:\x94|q[\s\S]|r[\s\S]{4})?"
_STACK_GLOBAL = re.compile(_STRING + _PUT + _STRING + _PUT + rb"\x93")
_WINDOW = 130
_MAX_NAMES = 10_000
_MAX_MATCHES = 100_000  # of each form: bytes made of nothing but newlines and letters must not take minutes


class Swept(NamedTuple):
    """A name that is not safe, as it stands in bytes that were not run."""

    path: str
    position: int
    verdict: Verdict
    reason: str


def swept(data: bytes | memoryview, start: int, length: int) -> Iterator[Swept]:
    """Yield what is not safe among the distinct names of a stretch of bytes, the first `_MAX_NAMES` of them."""
    seen: set[tuple[str, ...]] = set()
    for modules, name, position in _import_names(data, start, length):
        if (key := (name, *modules)) in seen:
            continue
        seen.add(key)
        ranked = [(*classify(module, name), module) for module in modules]
        dangerous = [item for item in ranked if item[0] == "dangerous"]
        safe = [item for item in ranked if item[0] == "safe"]
        verdict, reason, module = (dangerous or safe or ranked)[0]
        if verdict != "safe":
            yield Swept(f"{module}.{name}", position, verdict, reason)
        if len(seen) >= _MAX_NAMES:
            return


def _import_names(data: bytes | memoryview, start: int, length: int) -> Iterator[tuple[list[str], str, int]]:
    """Yield (possible modules, name, position) of what looks like an import in `length` bytes from `start`.

    A text opcode's first byte is itself a letter, so `ccos` may be `cos` or `os`: all readings are given.
    """
    chunk = bytes(data[start : start + length])
    for match in islice(_SECOND_LINE.finditer(chunk), _MAX_MATCHES):
        before = chunk[max(0, match.start() - _WINDOW) : match.start()]
        modules = [found[1].decode() for found in _FIRST_LINE.finditer(before) if found[1].isascii()]
        if modules and match[1].isascii():
            yield modules, match[1].decode(), start + match.start() - len(modules[0]) - 1
    for match in islice(_STACK_GLOBAL.finditer(chunk), _MAX_MATCHES):
        if match[1].isascii() and match[2].isascii():
            yield [match[1].decode()], match[2].decode(), start + match.start()
