"""The one runner: threads carry out a plan's tasks; the result appears whole or not at all; a killed job goes on.

Files are built in the partial folder beside the destination (`io/workspace.py`). Whenever `JOURNAL_BYTES` of output in
the order of the plan are finished they are forced to the disk, which also keeps the disk busy while threads go on, and
noted in the journal; the same command later starts from the last note.
"""

from __future__ import annotations

import os
import queue
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from anyckpt.core.layout import Checksum
from anyckpt.io.sink import sync_file, write_at
from anyckpt.io.workspace import Workspace
from anyckpt.plan import journal
from anyckpt.plan.crc import combine
from anyckpt.plan.plan import Plan, Task
from anyckpt.plan.work import Crc, prove_task, write_task

JOURNAL_BYTES = 256 << 20
DEFAULT_MEMORY = 1 << 30
MAX_DEFAULT_JOBS = 8


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a job is: `stage` is "write" or "prove", counts are bytes."""

    stage: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Job:
    """How to run a plan. `max_memory` in bytes over all `jobs` threads (None: one per core, at most 8)."""

    max_memory: int = DEFAULT_MEMORY
    jobs: int | None = None
    force: bool = False
    dry_run: bool = False
    prove: bool = False
    events: Callable[[Progress], None] | None = None

    @property
    def n_jobs(self) -> int:
        """Threads to use."""
        return self.jobs or min(os.cpu_count() or 1, MAX_DEFAULT_JOBS)


@dataclass(frozen=True, slots=True)
class Run:
    """What happened: wall time in seconds, and the bytes that an earlier, killed job had already written."""

    seconds: float
    resumed_bytes: int


def run(
    plan: Plan, destination: Path, *, is_folder: bool, job: Job, check: Callable[[Path], None] | None = None
) -> Run:
    """Carry out `plan`; `check` looks at the finished result before it is put in place.

    Raises Refused where the destination exists, OutOfSpace, CheckpointError where a source is damaged. Whatever
    happens, the destination is either as it was or whole; what is finished is kept for the same command to go on.
    """
    began = time.monotonic()
    work = Workspace.open(destination, force=job.force, n_bytes=plan.bytes_out)
    try:
        done = journal.resume(work.partial, plan.digest)
        output = _Output(plan, work, done)
        try:
            resumed = sum(task.n_bytes for task in plan.tasks[: done.n_tasks])
            output.advance(job.events, "write", resumed)
            _in_threads(plan.tasks, done.n_tasks, job.n_jobs, output.write, output.finished)
            output.seal()
            if job.prove:
                output.advance(job.events, "prove", 0)
                _in_threads(plan.tasks, 0, job.n_jobs, output.prove, output.proved)
        finally:
            output.close()
        if check is not None:
            check(work.out if is_folder else work.path(""))
        work.publish(as_folder=is_folder)
    except BaseException:
        work.release()
        raise
    return Run(time.monotonic() - began, resumed)


@dataclass(slots=True)
class _Output:
    """The files of one run while they are written. Tasks come from threads, `finished` and `seal` from one."""

    plan: Plan
    work: Workspace
    done: journal.Progressed
    descriptors: list[int] = field(default_factory=list)
    journal_fd: int = -1
    finished_ahead: dict[int, list[Crc]] = field(default_factory=dict)  # tasks done out of order
    unsynced: set[int] = field(default_factory=set)
    unnoted_bytes: int = 0
    unnoted_crcs: list[tuple[int, Crc]] = field(default_factory=list)
    events: Callable[[Progress], None] | None = None
    stage: str = ""
    moved: int = 0

    def __post_init__(self) -> None:
        fresh = self.done.n_tasks == 0
        for file in self.plan.files:
            path = self.work.path(file.name)
            path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | (os.O_TRUNC if fresh else 0), 0o666)
            self.descriptors.append(fd)
            os.ftruncate(fd, file.size)
        self._remove_strangers()
        begin = journal.begin(self.work.partial, self.plan.digest) if fresh else journal.go_on(self.work.partial)
        self.journal_fd = begin

    def _remove_strangers(self) -> None:
        """What another plan left in the partial folder must not travel into the result."""
        mine = {self.work.path(file.name) for file in self.plan.files}
        for path in self.work.out.rglob("*"):
            if path not in mine and not path.is_dir():
                path.unlink()

    def write(self, task: Task) -> list[Crc]:
        file = self.plan.files[task.file]
        return write_task(task, self.descriptors[task.file], bool(file.checksums))

    def prove(self, task: Task) -> list[Crc]:
        file = self.plan.files[task.file]
        patched = [(c.offset, c.offset + 4) for c in file.checksums]
        prove_task(task, self.descriptors[task.file], file.name or self.work.destination.name, patched)
        return []

    def advance(self, events: Callable[[Progress], None] | None, stage: str, moved: int) -> None:
        """Begin a stage at `moved` bytes."""
        self.events, self.stage, self.moved = events, stage, moved

    def _tell(self, n_bytes: int) -> None:
        self.moved += n_bytes
        if self.events is not None:
            self.events(Progress(self.stage, self.moved, self.plan.bytes_out))

    def proved(self, index: int, crcs: list[Crc]) -> None:
        self._tell(self.plan.tasks[index].n_bytes)

    def finished(self, index: int, crcs: list[Crc]) -> None:
        """Take note of a finished task; note in the journal once enough leading tasks are finished."""
        self._tell(self.plan.tasks[index].n_bytes)
        self.finished_ahead[index] = crcs
        while self.done.n_tasks in self.finished_ahead:
            task = self.plan.tasks[self.done.n_tasks]
            for crc in self.finished_ahead.pop(self.done.n_tasks):
                self.done.crcs.setdefault(task.file, []).append(crc)
                self.unnoted_crcs.append((task.file, crc))
            self.unsynced.add(task.file)
            self.unnoted_bytes += task.n_bytes
            self.done.n_tasks += 1
        if self.unnoted_bytes >= JOURNAL_BYTES:
            self._sync_and_note()

    def _sync_and_note(self) -> None:
        for i in sorted(self.unsynced):
            sync_file(self.descriptors[i])
        journal.note(self.journal_fd, self.done.n_tasks, self.unnoted_crcs)
        self.unsynced.clear()
        self.unnoted_crcs.clear()
        self.unnoted_bytes = 0

    def seal(self) -> None:
        """Fill in checksums and force everything to the disk."""
        for i, file in enumerate(self.plan.files):
            if file.checksums:
                crcs = sorted(self.done.crcs.get(i, ()))
                for checksum, value in _fold(file.checksums, crcs):
                    write_at(self.descriptors[i], checksum.offset, struct.pack("<I", value))
            sync_file(self.descriptors[i])

    def close(self) -> None:
        for fd in (*self.descriptors, self.journal_fd):
            if fd >= 0:
                os.close(fd)
        self.descriptors.clear()
        self.journal_fd = -1


def _fold(checksums: Sequence[Checksum], crcs: list[Crc]) -> list[tuple[Checksum, int]]:
    """The CRC of each checksum's range from those of the segments that make it up, sorted by offset."""
    out = []
    at = 0
    values: dict[tuple[int, int], int] = {}
    for checksum in sorted(checksums, key=lambda c: (c.start, c.stop)):
        key = (checksum.start, checksum.stop)
        if key not in values:
            while at < len(crcs) and crcs[at][0] < checksum.start:
                at += 1
            parts, position = [], checksum.start
            while at < len(crcs) and position < checksum.stop:
                offset, crc, length = crcs[at]
                if offset != position:
                    break
                parts.append((crc, length))
                position += length
                at += 1
            if position != checksum.stop:
                raise AssertionError(f"bytes {checksum.start}-{checksum.stop} were not written as whole segments")
            values[key] = combine(parts)
        out.append((checksum, values[key]))
    return out


def _in_threads(
    tasks: Sequence[Task],
    start: int,
    n_jobs: int,
    do: Callable[[Task], list[Crc]],
    finished: Callable[[int, list[Crc]], None],
) -> None:
    """Do tasks[start:] on threads; `finished` is called here, in this thread, in the order they end.

    The first failure stops the rest after their current task and is raised.
    """
    remaining = iter(range(start, len(tasks)))
    lock, stop = threading.Lock(), threading.Event()
    results: queue.SimpleQueue[tuple[int, list[Crc], BaseException | None]] = queue.SimpleQueue()

    def worker() -> None:
        while not stop.is_set():
            with lock:
                index = next(remaining, None)
            if index is None:
                return
            try:
                results.put((index, do(tasks[index]), None))
            except BaseException as error:  # handed to the caller's thread
                results.put((index, [], error))
                return

    threads = [threading.Thread(target=worker, daemon=True) for _ in range(min(n_jobs, len(tasks) - start))]
    for thread in threads:
        thread.start()
    try:
        for _ in range(start, len(tasks)):
            index, crcs, error = results.get()
            if error is not None:
                raise error
            finished(index, crcs)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
