"""A folder that holds one set of GGUF files, or one file: read as one model, written with `--split-max-size`."""

from __future__ import annotations

from dataclasses import replace

from anyckpt.core.checkpoint import Checkpoint
from anyckpt.core.layout import FileLayout
from anyckpt.finding import Report
from anyckpt.formats.gguf.check import verify
from anyckpt.formats.gguf.describe import describe
from anyckpt.formats.gguf.split import NAME, read_folder, read_one
from anyckpt.formats.gguf.write import write as write_files
from anyckpt.formats.table import WriteOptions
from anyckpt.io.place import Place

__all__ = ["describe", "matches", "read", "verify", "write"]


def _files(place: Place) -> list[str]:
    return [name for name in place.names if "/" not in name and name.lower().endswith(".gguf")]


def _sets(place: Place) -> dict[tuple[str, int], list[str]]:
    found: dict[tuple[str, int], list[str]] = {}
    for name in _files(place):
        match = NAME.fullmatch(name)
        key = (match["prefix"], int(match["count"])) if match else (name, 1)
        found.setdefault(key, []).append(name)
    return found


def matches(place: Place) -> bool:
    """Whether there is one model in GGUF files, and no weights of another kind."""
    others = any(name.endswith((".safetensors", ".bin", ".pt")) for name in place.names if "/" not in name)
    return len(_sets(place)) == 1 and not others


def read(place: Place, report: Report) -> Checkpoint:
    """Read the set, or the one file."""
    (prefix, count), names = next(iter(_sets(place).items()))
    if count == 1:
        checkpoint = read_one(place.open(names[0]), report)
    else:
        checkpoint = read_folder(place, prefix, count, report)
    return replace(checkpoint, format="gguf-folder", path=str(place.path))


def write(checkpoint: Checkpoint, options: WriteOptions) -> list[FileLayout]:
    """The files of a set, named after the folder."""
    return write_files(checkpoint, replace(options, extra={**options.extra, "as_folder": True}))
