"""YAML as data: the event stream of PyYAML's parser made into plain values. No tag constructs anything.

A loader of YAML may be asked by the text to import and call (`!!python/object/apply:os.system`), so no loader is used
at all: events are folded here, and a tag that is not one of YAML's own becomes an inert record beside its value.
Aliases stay references to one object, so that a bomb of aliases costs nothing. Scalars are resolved as YAML 1.1 does
(what OmegaConf, Lightning and NeMo write); `${…}` of OmegaConf stays text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from anyckpt.core.inert import Global, Opaque
from anyckpt.errors import MissingDependency
from anyckpt.finding import Verdict, fail
from anyckpt.io.bounds import byte_count
from anyckpt.io.paths import printable

MAX_BYTES = 16 << 20
MAX_DEPTH = 200
MAX_NODES = 1_000_000
MAX_EXPANDED = 10_000_000  # values that a reader who writes aliases out would have to hold
_PREFIX = "tag:yaml.org,2002:"
_BOOL = {"yes": True, "no": False, "true": True, "false": False, "on": True, "off": False}
_INT = re.compile(r"[-+]?(0b[01_]+|0x[0-9a-fA-F_]+|0[0-7_]+|0|[1-9][0-9_]*)")
_FLOAT = re.compile(
    r"[-+]?([0-9][0-9_]*\.[0-9_]*([eE][-+]?[0-9]+)?|\.[0-9][0-9_]*([eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+|"
    r"\.inf|\.Inf|\.INF)|\.nan|\.NaN|\.NAN"
)
_CALLS = ("object/apply", "object/new", "module", "name")
"""The python tags whose loaders import or call; `object` only makes an instance and sets attributes."""
_DATA = frozenset("tuple unicode str bool int long float complex list dict none bytes".split())


@dataclass(slots=True)
class Document:
    """What a document holds. `tags`: every foreign tag, once; `duplicates`: keys that occur twice in a mapping."""

    value: Any
    tags: list[str] = field(default_factory=list)
    duplicates: list[str] = field(default_factory=list)

    def judged(self) -> tuple[Verdict, str]:
        """What loading it with its own tags obeyed would amount to, and the tag that says so.

        Tags of other applications (`!Ref`) are no reason: no loader of checkpoints knows them.
        """
        worst: tuple[Verdict, str] = ("safe", "")
        for tag in self.tags:
            kind = _python_kind(tag)
            if kind.partition(":")[0] in _CALLS:
                return "dangerous", tag
            if kind and kind not in _DATA:
                worst = ("unknown", tag)
        return worst


def parse(data: bytes, *, where: str) -> Document:
    """Read the one document of `data`.

    Mappings become dicts, sequences lists, and what has a foreign tag `Opaque(Global("yaml", tag))` with its value as
    the state. Raises CheckpointError [bad-yaml, too-deep, limit-exceeded, bad-utf8], MissingDependency without PyYAML.
    """
    try:
        import yaml
    except ImportError as error:
        raise MissingDependency("YAML files need PyYAML: pip install 'anyckpt[yaml]'") from error
    if len(data) > MAX_BYTES:
        limit = byte_count(MAX_BYTES)
        raise fail("limit-exceeded", f"is YAML of {byte_count(len(data))}; the limit is {limit}", where=where)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise fail("bad-utf8", f"byte {error.start:,} is not UTF-8", where=where) from error
    try:
        return _fold(yaml.parse(text, Loader=getattr(yaml, "CBaseLoader", yaml.BaseLoader)), where)
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise fail("bad-yaml", f"is not YAML: {printable(reason, limit=160)}", where=where) from error
    except RecursionError as error:
        raise fail("too-deep", f"is nested more than {MAX_DEPTH} levels deep", where=where) from error


@dataclass(slots=True)
class _Open:
    """A collection that is not closed yet: its value, and for a mapping the key that waits for its value.

    `size`: how many values it would be with every alias written out.
    """

    target: Any
    made: Any
    anchor: str | None
    key: Any = None
    has_key: bool = False
    size: int = 1


def _fold(events: Iterator[Any], where: str) -> Document:
    found = Document(None)
    anchors: dict[str, Any] = {}
    sizes: dict[str, int] = {}
    stack: list[_Open] = []
    n_nodes = n_documents = 0
    for event in events:
        kind = type(event).__name__
        if kind == "DocumentStartEvent":
            n_documents += 1
            if n_documents > 1:
                raise fail("bad-yaml", "holds more than one document", where=where)
            continue
        if kind in ("SequenceEndEvent", "MappingEndEvent"):
            done = stack.pop()
            if done.anchor is not None:
                sizes[done.anchor] = done.size
            _put(stack, done.made, found, done.size, where)
            continue
        if kind not in ("ScalarEvent", "AliasEvent", "SequenceStartEvent", "MappingStartEvent"):
            continue
        n_nodes += 1
        if n_nodes > MAX_NODES:
            raise fail("limit-exceeded", f"holds more than {MAX_NODES:,} values", where=where)
        if kind == "AliasEvent":
            if event.anchor not in anchors:
                raise fail("bad-yaml", f"refers to {printable(event.anchor)!r}, not defined before", where=where)
            _put(stack, anchors[event.anchor], found, sizes.get(event.anchor, 1), where)
            continue
        if kind == "ScalarEvent":
            value = _scalar(event.value, event.tag, event.implicit[0])
            made = _tagged(value, event.tag, found)
        else:
            value = [] if kind == "SequenceStartEvent" else {}
            made = _tagged(value, event.tag, found)
            if len(stack) >= MAX_DEPTH:
                raise fail("too-deep", f"is nested more than {MAX_DEPTH} levels deep", where=where)
            stack.append(_Open(value, made, event.anchor))
        if event.anchor is not None:
            anchors[event.anchor] = made
        if kind == "ScalarEvent":
            _put(stack, made, found, 1, where)
    return found


def _put(stack: list[_Open], value: Any, found: Document, size: int, where: str) -> None:
    """Give a finished value to the collection around it."""
    if not stack:
        found.value = value
        return
    around = stack[-1]
    around.size += size
    if around.size > MAX_EXPANDED:
        raise fail("limit-exceeded", f"its aliases multiply into over {MAX_EXPANDED:,} values", where=where)
    if isinstance(around.target, list):
        around.target.append(value)
    elif not around.has_key:
        around.key, around.has_key = _key(value), True
    else:
        if around.key == "<<" and isinstance(value, dict):  # YAML 1.1's merge key: what is there already stays
            around.target.update({k: v for k, v in value.items() if k not in around.target})
        else:
            if around.key in around.target:
                found.duplicates.append(str(around.key))
            around.target[around.key] = value
        around.has_key = False


def _key(value: Any) -> Any:
    return value if isinstance(value, str | int | float | bool | None) else f"<{type(value).__name__}>"


def _tagged(value: Any, tag: str | None, found: Document) -> Any:
    """The value, or a record of its tag and it where the tag is not one of YAML's own types."""
    if tag is None or tag == "!" or (tag.startswith(_PREFIX) and not tag.startswith(_PREFIX + "python/")):
        return value
    if tag not in found.tags:
        found.tags.append(tag)
    if _python_kind(tag) in _DATA:
        return value
    return Opaque(Global("yaml", printable(tag, limit=200)), state=value)


def _python_kind(tag: str) -> str:
    return tag.removeprefix(_PREFIX).removeprefix("python/") if tag.startswith(_PREFIX + "python/") else ""


def _scalar(text: str, tag: str | None, is_plain: bool) -> Any:
    """A scalar by YAML 1.1's rules; quoted ones and those tagged !!str stay text."""
    if (not is_plain and tag is None) or tag in ("!", _PREFIX + "str"):
        return text
    if text in ("", "~", "null", "Null", "NULL"):
        return None
    if text.lower() in _BOOL and text in (text.lower(), text.upper(), text.capitalize()):
        return _BOOL[text.lower()]
    if len(text) < 100 and _INT.fullmatch(text):
        return _integer(text.replace("_", ""))
    if len(text) < 100 and _FLOAT.fullmatch(text):
        lower = text.replace("_", "").lower()
        return math.nan if lower == ".nan" else float(lower.replace(".inf", "inf"))
    return text


def _integer(text: str) -> int:
    sign, digits = (-1, text[1:]) if text[0] == "-" else (1, text.lstrip("+"))
    base = {"0x": 16, "0b": 2}.get(digits[:2], 8 if len(digits) > 1 and digits[0] == "0" else 10)
    return sign * int(digits, base)
