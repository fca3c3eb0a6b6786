"""The matrix of formats: what is read, what is written, what carries training state; and the command for a pair."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from importlib.util import find_spec
from typing import Any

from anyckpt.errors import UsageError
from anyckpt.formats.table import Format, formats


@dataclass(frozen=True, slots=True)
class Row:
    """One format: whether it is read and written, and whether training state is, where it is read or written."""

    name: str
    title: str
    kind: str
    reads: bool
    writes: bool
    training: bool
    endings: tuple[str, ...]
    needs: str
    official: str

    def as_dict(self) -> dict[str, Any]:
        """The row as `--json` prints it."""
        return {
            "name": self.name,
            "title": self.title,
            "kind": self.kind,
            "reads": self.reads,
            "writes": self.writes,
            "training": self.training,
            "endings": list(self.endings),
            "needs": self.needs,
            "official": self.official,
        }


@dataclass(frozen=True, slots=True)
class Route:
    """From one format to another: our command, and the official tool's own way where there is one."""

    source: str
    target: str
    command: str
    official: str
    training: bool
    note: str

    def as_dict(self) -> dict[str, Any]:
        """The record as `--json` prints it."""
        return {
            "from": self.source,
            "to": self.target,
            "command": self.command,
            "official": self.official,
            "training": self.training,
            "note": self.note,
        }


def matrix() -> list[Row]:
    """Every format, in the order in which they are tried."""
    return [
        Row(
            row.name,
            row.title,
            row.kind,
            _is_there(row.module),
            bool(row.writes),
            row.training,
            row.endings,
            row.needs,
            row.official,
        )
        for row in formats().values()
    ]


def route(source: str, target: str) -> Route:
    """The one command from `source` to `target`. Raises UsageError for an unknown format or one that is not written."""
    a, b = _row(source), _row(target)
    if not b.writes:
        can = ", ".join(row.name for row in formats().values() if row.writes)
        raise UsageError(f"{b.name} is read, but not written", hint=f"written are: {can}")
    place = "FOLDER" if a.kind == "folder" else f"model{(a.endings or ('.pt',))[0]}"
    result = "OUT" if b.writes == "folder" else f"out{b.endings[0]}"
    if a.name == "peft":
        command = f"anyckpt convert BASE {result} --to {b.name} --merge-adapter {place}"
        return Route(a.name, b.name, command, "model.merge_and_unload()", False, "the adapter merged into its base")
    training = a.training and b.training
    if training:
        note = "weights and training state"
    elif a.training:
        note = f"weights only: {b.name} has no place for training state"
    else:
        note = "weights"
    return Route(a.name, b.name, f"anyckpt convert {place} {result} --to {b.name}", b.official, training, note)


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # not even its package
        return False


def _row(name: str) -> Format:
    row = formats().get(name)
    if row is None:
        near = get_close_matches(name, formats(), 1)
        hint = f"did you mean {near[0]}?" if near else "see: anyckpt formats"
        raise UsageError(f"there is no format {name!r}", hint=hint)
    return row
