"""NeMo's YAML configs as data, and a judgement of what they would have Hydra call."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from anyckpt.core.inert import walk
from anyckpt.finding import Report
from anyckpt.formats.yamled import read_yaml
from anyckpt.io.paths import printable
from anyckpt.io.place import Place
from anyckpt.pickle.allow import classify

# Classes that NeMo's own configs name by Hydra's `_target_`: constructors of modules, nothing else.
_KNOWN_TARGET = re.compile(
    r"(nemo\.collections\.[a-z0-9_.]+|nemo\.core\.optim[a-z0-9_.]*|torch\.(nn|optim)[a-z0-9_.]*|"
    r"megatron\.core\.[a-z0-9_.]+)\.[A-Z][A-Za-z0-9]*"
)


def read_config(place: Place, name: str, report: Report) -> dict[str, Any] | None:
    """A config as a plain dict, None where it is not there or is none."""
    if name not in place.names:
        return None
    file = place.open(name)
    value = read_yaml(file, report, code="bad-yaml")
    for target in targets(value):
        module, _, called = target.rpartition(".")
        if _KNOWN_TARGET.fullmatch(target):
            continue
        verdict, reason = classify(module, called)
        if verdict == "safe":
            verdict, reason = "unknown", "is no class of NeMo's"
        report.worsen(verdict)
        code = "dangerous-code" if verdict == "dangerous" else "unknown-code"
        report.add(code, f"has Hydra call {printable(target, limit=120)}, which {reason}", where=file.name)
    return {str(k): v for k, v in value.items()} if isinstance(value, dict) else None


def targets(value: Any) -> Iterator[str]:
    """Every `_target_` in a config."""
    for path, inner in walk(value):
        if path and path[-1] == "_target_" and isinstance(inner, str):
            yield inner
