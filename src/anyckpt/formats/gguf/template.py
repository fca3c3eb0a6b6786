"""Chat templates: text that a runtime renders with Jinja. They are never rendered here, only looked at.

A template may only use the conversation. What reaches for Python's insides (CVE-2024-34359) is what a sandboxed Jinja
refuses: names with two underscores, the `attr` filter, the globals behind `cycler`, `joiner`, `lipsum`.
"""

from __future__ import annotations

import re
from typing import Literal

from anyckpt.finding import Report

_CODE = re.compile(r"\{\{(.*?)\}\}|\{%(.*?)%\}", re.DOTALL)
_REACHES = re.compile(
    r"__(?:class|globals|builtins|import|subclasses|mro|base|bases|init|getattribute|dict|code|reduce|loader|self)\w*__|"
    r"\b(?:popen|subprocess|os\.system|_module__)\b"
)
_REFUSED = re.compile(r"__|\|\s*attr\b|\.\s*(?:mro|func_globals|gi_frame|f_globals|tb_frame)\b|\.\s*_\w|\[\s*['\"]_")


def danger(template: str) -> Literal["", "unknown", "dangerous"]:
    """How far a template reaches beyond the conversation; "" where it does not.

    >>> danger("{{ messages[0]['content'] }}"), danger("{{ cycler.__init__.__globals__.os }}")
    ('', 'dangerous')
    """
    code = "\n".join(a or b for a, b in _CODE.findall(template))
    if _REACHES.search(code):
        return "dangerous"
    return "unknown" if _REFUSED.search(code) else ""


def check(template: str, key: str, where: str, report: Report) -> None:
    """Report a template that a sandboxed Jinja would refuse."""
    found = danger(template)
    if found:
        what = "reaches for Python's insides: it would run code where it is rendered without a sandbox"
        other = "uses names that a sandboxed Jinja refuses"
        report.add(
            "contains-code",
            f"{key} {what if found == 'dangerous' else other}",
            where=where,
            severity="error" if found == "dangerous" else "warning",
            hint=f"replace it: anyckpt set FILE {key}='…', or drop it: anyckpt set FILE {key}=",
        )
        report.worsen(found)
