"""YAML beside weights: read as data, and judged by the tags that a loader of YAML would obey."""

from __future__ import annotations

from typing import Any

from anyckpt.core.inert import Opaque
from anyckpt.core.source import File
from anyckpt.errors import CheckpointError, MissingDependency
from anyckpt.finding import Report
from anyckpt.io.paths import printable
from anyckpt.io.yaml import parse

ENDINGS = (".yaml", ".yml")


def read_yaml(file: File, report: Report, *, code: str = "") -> Any:
    """The document's value, None where it can't be had.

    What is no YAML is reported as `code`, or passed over without one: templates are called .yaml too.
    """
    try:
        document = parse(file.read(0, file.size), where=file.name)
    except MissingDependency as error:
        report.worsen("unknown")
        report.add("not-looked-at", f"was not read: {error}", where=file.name)
        return None
    except CheckpointError as error:
        if error.finding.code != "bad-yaml" or code:
            report.extend([error.finding])
            report.worsen("unknown")
        return None
    verdict, tag = document.judged()
    report.worsen(verdict)
    if verdict != "safe":
        found = "dangerous-code" if verdict == "dangerous" else "unknown-code"
        report.add(found, f"has the tag {printable(tag, limit=120)}, which a YAML loader may obey", where=file.name)
    if document.duplicates and code:
        report.add("duplicate-key", f"the key {printable(document.duplicates[0])!r} occurs twice", where=file.name)
    return document.value.state if isinstance(document.value, Opaque) else document.value
