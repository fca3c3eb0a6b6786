"""The page of a finding's code: what it means, how it comes about, what to do. The pages are in `codes.md`.

## code
What it means.
Why: how it comes about.
Do: what to do next.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from types import MappingProxyType

from anyckpt.errors import UsageError
from anyckpt.finding import DEFAULT_SEVERITY


@dataclass(frozen=True, slots=True)
class Page:
    """What there is to say about one code. `severity` is the usual one; a reader may find a milder one."""

    code: str
    severity: str
    meaning: str
    why: str
    do: str

    def as_dict(self) -> dict[str, str]:
        """The record as `--json` prints it."""
        return {"code": self.code, "severity": self.severity, "meaning": self.meaning, "why": self.why, "do": self.do}


def explain(code: str) -> Page:
    """The page of `code`; underscores count as hyphens. Raises UsageError that names the nearest code."""
    wanted = code.strip().strip("[]").lower().replace("_", "-")
    found = pages().get(wanted)
    if found is None:
        near = get_close_matches(wanted, pages(), 1)
        raise UsageError(
            f"there is no finding {code!r}",
            hint=f"did you mean {near[0]}?" if near else "run `anyckpt explain` for the list",
        )
    return found


@cache
def pages() -> Mapping[str, Page]:
    """Every page by code, in the order of `codes.md`."""
    text = files(__package__).joinpath("codes.md").read_text(encoding="utf-8")
    found: dict[str, Page] = {}
    for section in text.split("\n## ")[1:]:
        code, *lines = section.strip().splitlines()
        parts = {"": "", "Why": "", "Do": ""}
        for line in lines:
            label, colon, rest = line.partition(": ")
            key, words = (label, rest) if colon and label in ("Why", "Do") else ("", line)
            parts[key] = f"{parts[key]} {words}".strip()
        found[code] = Page(code, DEFAULT_SEVERITY[code], parts[""], parts["Why"], parts["Do"])
    return MappingProxyType(found)
