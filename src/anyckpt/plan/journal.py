"""The journal of a write: how far a killed job got, so that the same command goes on from there.

    OUT.anyckpt-partial/tasks.jsonl
        {"plan": digest}                                    what is being written, from which sources
        {"tasks": n, "crcs": [[file, offset, crc, length]]} tasks 0 … n-1 are on the disk; CRCs since the last line

A line is written after the bytes that it speaks of were forced to the disk, and is forced itself. The digest covers
every offset of every file and the size, time and inode of every source: a note is only believed where nothing changed.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

from anyckpt.io.sink import sync_file
from anyckpt.plan.work import Crc

NAME = "tasks.jsonl"


@dataclass(slots=True)
class Progressed:
    """What an earlier job left: the number of leading tasks that are done, and their CRCs by file."""

    n_tasks: int = 0
    crcs: dict[int, list[Crc]] = field(default_factory=dict)


def resume(partial: Path, digest: str) -> Progressed:
    """Read the journal of `partial`. A torn last line counts for nothing; another plan's journal neither."""
    done = Progressed()
    try:
        lines = (partial / NAME).read_bytes().split(b"\n")
    except FileNotFoundError:
        return done
    try:
        if json.loads(lines[0]).get("plan") != digest:
            return done
        for line in lines[1:-1]:  # what follows the last line break was not finished
            note = json.loads(line)
            for file, offset, crc, length in note["crcs"]:
                done.crcs.setdefault(file, []).append((offset, crc, length))
            done.n_tasks = note["tasks"]
    except (ValueError, TypeError, KeyError, AttributeError):
        return Progressed()
    return done


def begin(partial: Path, digest: str) -> int:
    """Start an empty journal for a plan; returns its descriptor."""
    fd = os.open(partial / NAME, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o666)
    os.write(fd, json.dumps({"plan": digest}).encode() + b"\n")
    sync_file(fd)
    return fd


def go_on(partial: Path) -> int:
    """Open the journal to append to it; a torn last line is cut off."""
    path = partial / NAME
    whole = path.read_bytes().rfind(b"\n") + 1
    os.truncate(path, whole)
    return os.open(path, os.O_WRONLY | os.O_APPEND)


def note(fd: int, n_tasks: int, crcs: list[tuple[int, Crc]]) -> None:
    """Record that tasks 0 … n_tasks - 1 are durable."""
    line = json.dumps({"tasks": n_tasks, "crcs": [[file, *crc] for file, crc in crcs]}, separators=(",", ":"))
    os.write(fd, line.encode() + b"\n")
    sync_file(fd)
