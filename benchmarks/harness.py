"""Run commands side by side and say what each costs: wall time, CPU time, peak memory, and the ratio to a durable copy.

How it measures, so that the numbers can be argued with:

* Commands of a case are interleaved: one round runs each once, in turn; the table gives medians over the rounds, so a
  noisy minute hits them all alike.
* Each command is a process of its own, measured by `wait4`: wall clock around it, CPU and peak resident memory (its own
  and its children's) from the kernel. This module imports nothing large, because a child starts out with its parent's
  peak memory on its account (so no row can show less than the 25 MB or so of this process).
* Everything is durable. The baseline is `cp --reflink=never SRC DST && sync DST`; every other command that writes is
  followed by `sync` of what it wrote, inside the measured time. (A tool that syncs by itself pays nothing twice.)
* The page cache is warm for all: before each command its input is read once, old output is deleted and the disk is
  synced, outside the measured time. Nothing is dropped.
"""

from __future__ import annotations

import os
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

PYTHON = sys.executable
ANYCKPT = (PYTHON, "-m", "anyckpt")
MIB = 1 << 20


@dataclass(frozen=True)
class Command:
    """One thing to measure. `reads` is warmed first; `writes` is deleted first, and synced inside the measured time."""

    label: str
    argv: Sequence[str]
    reads: Path
    writes: Path | None = None
    baseline: bool = False
    ratio_bar: float | None = None  # at most this many times the baseline
    memory_bar: int | None = None  # at most this many bytes resident


@dataclass(frozen=True)
class Run:
    """What one process cost, in seconds and bytes."""

    wall: float
    cpu: float
    peak: int


@dataclass
class Row:
    """The runs of one command in one case."""

    command: Command
    runs: list[Run] = field(default_factory=list)
    failure: str = ""

    def median(self, what: str) -> float:
        return statistics.median(getattr(run, what) for run in self.runs)


def copy(source: Path, target: Path, label: str = "cp, durable") -> Command:
    """The baseline: a copy of the same bytes that is on the disk when it ends."""
    return Command(label, ("cp", "--reflink=never", str(source), str(target)), source, target, baseline=True)


def python(code: str, *arguments: object) -> tuple[str, ...]:
    return (PYTHON, "-c", code, *map(str, arguments))


def delete(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def warm(path: Path) -> None:
    """Read a file, or the files of a folder, into the page cache."""
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file():
            with open(file, "rb", buffering=0) as handle:
                while handle.read(8 * MIB):
                    pass


def run_once(argv: Sequence[str], log: Path) -> tuple[int, Run]:
    """Run a process to its end; return its exit status and its cost."""
    with open(log, "wb") as output:
        start = time.perf_counter()
        pid = os.posix_spawnp(
            argv[0],
            list(argv),
            os.environ,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, output.fileno(), 1),
                (os.POSIX_SPAWN_DUP2, output.fileno(), 2),
            ],
        )
        _, status, usage = os.wait4(pid, 0)
        wall = time.perf_counter() - start
    peak = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return os.waitstatus_to_exitcode(status), Run(wall, usage.ru_utime + usage.ru_stime, peak)


def measure(commands: Iterable[Command], work: Path, rounds: int = 5) -> list[Row]:
    """Run each command `rounds` times, in turn. A command that fails is left out from then on, with its last words."""
    rows = [Row(command) for command in commands]
    log = work / "command.log"
    for turn in range(rounds):
        for row in rows:
            if row.failure:
                continue
            command = row.command
            progress(f"  round {turn + 1}/{rounds}: {command.label}")
            argv = list(command.argv)
            if command.writes is not None:
                delete(command.writes)
                files = f"find {shlex.quote(str(command.writes))} -type f -exec sync {{}} +"
                argv = ["sh", "-c", f"{shlex.join(argv)} && {files}"]
            os.sync()
            warm(command.reads)
            status, run = run_once(argv, log)
            if status:
                words = log.read_text(errors="replace").strip().splitlines() or ["no output"]
                row.failure = f"exit status {status}: {words[-1][:100]}"
            elif command.writes is not None and not command.writes.exists():
                row.failure = f"wrote nothing at {command.writes.name}"
            else:
                row.runs.append(run)
            if command.writes is not None:
                delete(command.writes)
    progress("")
    log.unlink(missing_ok=True)
    return rows


def report(title: str, rows: list[Row]) -> bool:
    """Print the table of one case; return whether every bar was held."""
    base = next((row.median("wall") for row in rows if row.command.baseline and row.runs), None)
    held = True
    lines = [("", "wall s", "min-max", "cpu s", "peak MB", "x cp", "")]
    for row in rows:
        command = row.command
        if row.failure:
            lines.append((command.label, "-", "", "", "", "", row.failure))
            held = held and command.ratio_bar is None and command.memory_bar is None
            continue
        wall, peak = row.median("wall"), row.median("peak")
        ratio = wall / base if base else None
        notes = []
        if command.ratio_bar is not None and ratio is not None:
            notes.append(verdict(ratio <= command.ratio_bar, f"{command.ratio_bar:g}x"))
            held &= ratio <= command.ratio_bar
        if command.memory_bar is not None:
            notes.append(verdict(peak <= command.memory_bar, f"{command.memory_bar / 1e6:.0f} MB"))
            held &= peak <= command.memory_bar
        spread = f"{min(run.wall for run in row.runs):.2f}-{max(run.wall for run in row.runs):.2f}"
        lines.append(
            (
                command.label,
                f"{wall:.2f}",
                spread,
                f"{row.median('cpu'):.2f}",
                f"{peak / 1e6:.0f}",
                "" if ratio is None else f"{ratio:.2f}",
                ", ".join(notes),
            )
        )
    print(f"\n{title}")
    print_table(lines)
    return held


def verdict(held: bool, bar: str) -> str:
    return f"{'within' if held else 'OVER'} {bar}"


def print_table(lines: Sequence[Sequence[str]]) -> None:
    """Columns as wide as they need; the first and last to the left, numbers to the right."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    for line in lines:
        cells = [
            cell.ljust(width) if column in (0, len(line) - 1) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        print("  " + "  ".join(cells).rstrip(), flush=True)


def progress(text: str) -> None:
    """One line on a terminal, overwritten; nothing elsewhere."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def prepare(what: str, make: Callable[[], object]) -> None:
    """Do the work that is not measured, saying so."""
    print(f"preparing {what}", file=sys.stderr, flush=True)
    make()


def call(code: str, *arguments: object) -> str:
    """Run Python code in a process of its own (this one must stay small); return what it printed."""
    done = subprocess.run(python(code, *arguments), check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout


def available(module: str) -> bool:
    probe = (PYTHON, "-c", f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)")
    return subprocess.run(probe, check=False).returncode == 0
