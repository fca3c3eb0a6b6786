"""Change metadata of a GGUF file: in place where the new header takes as much room as the old, else by a copy.

While a header is written in place the old one lies beside the file, forced to the disk before; a killed job is undone
by the next call on the file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from anyckpt.core.checkpoint import Checkpoint
from anyckpt.errors import UsageError
from anyckpt.finding import Report
from anyckpt.formats import table
from anyckpt.formats.gguf import kv, template
from anyckpt.formats.gguf.header import Header, read_header
from anyckpt.formats.gguf.kv import ARRAY, BOOL, F32, F64, SCALARS, STRING, Field, Metadata
from anyckpt.formats.gguf.split import checkpoint_of
from anyckpt.formats.gguf.write import SPLIT_KEYS, header_bytes
from anyckpt.formats.table import WriteOptions
from anyckpt.io.local import LocalFile, open_local
from anyckpt.io.paths import printable
from anyckpt.io.sink import sync_file, sync_folder, write_at
from anyckpt.plan.run import Job, Progress
from anyckpt.verbs.reading import refuse_damaged
from anyckpt.verbs.write import write_checkpoint

SAVED = ".anyckpt-header"
FIXED = ("general.alignment", *SPLIT_KEYS)
"""Keys that the layout of the file depends on."""


@dataclass(frozen=True, slots=True)
class Changed:
    """What was set: key -> (old, new) as text, None where there was or is none; `in_place` or copied."""

    path: str
    changes: Mapping[str, tuple[str | None, str | None]]
    in_place: bool
    bytes_written: int
    dry_run: bool = False
    findings: tuple[Any, ...] = field(default=())

    def as_dict(self) -> dict[str, Any]:
        """The record as `--json` prints it."""
        return {
            "path": self.path,
            "changes": [{"key": k, "old": old, "new": new} for k, (old, new) in self.changes.items()],
            "in_place": self.in_place,
            "bytes_written": self.bytes_written,
            "dry_run": self.dry_run,
            "findings": [f.as_dict() for f in self.findings],
        }


def set_keys(
    path: str | os.PathLike[str],
    settings: Sequence[str],
    *,
    dry_run: bool = False,
    max_memory: int = 1 << 30,
    events: Callable[[Progress], None] | None = None,
) -> Changed:
    """Set `KEY=VALUE` in the GGUF file at `path`; `KEY=` takes the key out, `KEY=@FILE` takes a text from a file.

    A value has the kind that the key has; a new key's is what the value looks like. A token id may be given by its
    token. Raises UsageError for a value that does not fit, CheckpointError for a damaged file.
    """
    _undo_killed(Path(path))
    file = open_local(path, os.fspath(path))
    report = Report()
    header = read_header(file, report)
    checkpoint = replace(checkpoint_of([(file, header)], report), findings=tuple(report.findings))
    refuse_damaged(replace(checkpoint, findings=tuple(f for f in report.findings if f.code != "contains-code")))
    fields = dict(header.metadata.fields)
    changes: dict[str, tuple[str | None, str | None]] = {}
    for text in settings:
        key, new = _parsed(text, header.metadata)
        old = fields.get(key)
        changes[key] = (None if old is None else _shown(old), None if new is None else _shown(new))
        if new is None:
            fields.pop(key, None)
        else:
            fields[key] = new
    told = Report()
    for key in changes:
        if key.startswith("tokenizer.chat_template") and key in fields and fields[key].kind == STRING:
            template.check(fields[key].value(), printable(key), file.name, told)
    raw = header_bytes(fields, checkpoint.weights, header.alignment)
    in_place = _fits(raw, header)
    written = len(raw) if in_place else file.size - header.data_start + len(raw)
    if not dry_run:
        if in_place:
            _write_in_place(file, header, raw)
        else:
            _write_copy(Path(path), checkpoint, Metadata(fields), max_memory, events)
    return Changed(os.fspath(path), changes, in_place, written, dry_run, tuple(told.findings))


def _fits(raw: bytes, header: Header) -> bool:
    """Whether the data can stay where they are, in a file of our byte order and version."""
    end = -(-len(raw) // header.alignment) * header.alignment if header.infos else len(raw)
    return header.version == 3 and not header.big and bool(header.infos) and end == header.data_start


# --- values ---


def _parsed(text: str, metadata: Metadata) -> tuple[str, Field | None]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise UsageError(f"{text!r} is not KEY=VALUE", hint="as in: general.name='My model'")
    if key in FIXED:
        raise UsageError(f"{key} can't be set: where the tensors lie depends on it", hint="convert the file instead")
    if not value:
        return key, None
    if value.startswith("@"):
        value = Path(value[1:]).read_text(encoding="utf-8")
    old = metadata.fields.get(key)
    if key.endswith("_token_id") and not value.lstrip("-").isdigit():
        return key, kv.u32(_token(value, metadata))
    if old is None:
        return key, kv.guess(_guessed(value))
    try:
        return key, _of_kind(value, old)
    except (ValueError, OverflowError) as error:
        raise UsageError(f"{key} is of kind {kv.NAMES[old.kind]}, and {value!r} is none: {error}") from error


def _token(text: str, metadata: Metadata) -> int:
    tokens = metadata.get("tokenizer.ggml.tokens") or []
    if text not in tokens:
        raise UsageError(f"{text!r} is no token of this vocabulary")
    return int(tokens.index(text))


def _guessed(value: str) -> Any:
    """true and false, numbers, JSON lists; else text."""
    try:
        found = json.loads(value)
    except ValueError:
        return value
    return found if isinstance(found, bool | int | float | list) else value


def _of_kind(value: str, old: Field) -> Field:
    if old.kind == STRING:
        return kv.text(value)
    if old.kind == ARRAY:
        found = json.loads(value)
        if not isinstance(found, list):
            raise ValueError("a JSON list is wanted")
        return kv.field(ARRAY, found, old.element)
    if old.kind == BOOL:
        if value.lower() not in ("true", "false", "1", "0"):
            raise ValueError("true or false is wanted")
        return kv.boolean(value.lower() in ("true", "1"))
    if old.kind in (F32, F64):
        return kv.field(old.kind, float(value))
    number, kind = int(value), np.iinfo(SCALARS[old.kind])
    if not kind.min <= number <= kind.max:
        raise ValueError(f"it holds {kind.min:,} to {kind.max:,}")
    return kv.field(old.kind, number)


def _shown(value: Field) -> str:
    if value.kind == ARRAY:
        return f"{value.count:,} × {kv.NAMES[value.element]}"
    return printable(str(value.value()), limit=80)


# --- writing ---


def _write_in_place(file: LocalFile, header: Header, raw: bytes) -> None:
    """Old header beside, forced; new header, forced; the old one removed."""
    saved = Path(file.path + SAVED)
    with open(saved, "wb") as out:
        out.write(file.read(0, header.data_start))
        out.flush()
        sync_file(out.fileno())
    sync_folder(saved.parent)
    fd = os.open(file.path, os.O_WRONLY)
    try:
        write_at(fd, 0, memoryview(raw.ljust(header.data_start, b"\0")))
        sync_file(fd)
    finally:
        os.close(fd)
    saved.unlink()


def _undo_killed(path: Path) -> None:
    """Put a header back that a killed job left beside the file."""
    saved = Path(os.path.realpath(path) + SAVED)
    if not saved.is_file() or not path.is_file():
        return
    data = saved.read_bytes()
    fd = os.open(path, os.O_WRONLY)
    try:
        if data[:4] == b"GGUF" and len(data) <= os.fstat(fd).st_size:
            write_at(fd, 0, memoryview(data))
            sync_file(fd)
    finally:
        os.close(fd)
    saved.unlink()


def _write_copy(
    path: Path,
    checkpoint: Checkpoint,
    metadata: Metadata,
    max_memory: int,
    events: Callable[[Progress], None] | None,
) -> None:
    if metadata.number("split.count") > 1:
        raise UsageError(
            "there is no room in this header, and one file of a set is not rewritten by itself",
            hint="join the set first: anyckpt convert FILE WHOLE.gguf",
        )
    if not checkpoint.weights:
        raise UsageError("a file without tensors is not rewritten", hint="make it again with the converter")
    made = replace(checkpoint, facts={"gguf": metadata})
    job = Job(max_memory=max_memory, jobs=None, force=True, dry_run=False, prove=False, events=events)
    write_checkpoint(made, path, table.writable("gguf"), WriteOptions(path.name), job)

