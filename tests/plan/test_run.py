"""The planner and the runner: what is planned is what stands on the disk, whatever happens on the way."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import textwrap
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anyckpt.core import ops
from anyckpt.core.box import Box
from anyckpt.core.dtypes import DTYPES
from anyckpt.core.layout import Checksum, FileLayout, Part
from anyckpt.core.source import Fill, Span
from anyckpt.core.tensor import Piece, Tensor, filled, from_array, from_source
from anyckpt.errors import CheckpointError, OutOfSpace, Refused
from anyckpt.io.local import open_local
from anyckpt.plan import lower, plan, run, work

F32 = DTYPES["float32"]


def source_tensor(tmp: Path, n: int = 1000, shape: tuple[int, ...] | None = None) -> tuple[Tensor, np.ndarray]:
    array = np.random.default_rng(0).normal(size=shape or (n,)).astype(np.float32)
    path = tmp / "source.bin"
    path.write_bytes(b"head" + array.tobytes())
    return from_source(F32, array.shape, Span(open_local(path), 4, array.nbytes)), array


def one_file(*tensors: Tensor, checksums: bool = False) -> FileLayout:
    parts, sums, at = [Part(0, 4, b"HEAD")], [], 4
    for tensor in tensors:
        parts.append(Part(at, tensor.nbytes, tensor))
        start, at = at, at + tensor.nbytes
        if checksums:
            parts.append(Part(at, 8, b"crc:\0\0\0\0"))
            sums.append(Checksum(at + 4, start, at))
            at += 8
    return FileLayout("", at, tuple(parts), tuple(sums))


def write(layout: FileLayout, out: Path, **options: object) -> bytes:
    job = run.Job(**options)  # type: ignore[arg-type]
    made = plan.make_plan([layout], max_memory=job.max_memory, jobs=job.n_jobs)
    run.run(made, out, is_folder=False, job=job)
    return out.read_bytes()


def test_copies_computes_and_fills_stand_where_the_layout_says(tmp_path: Path) -> None:
    t, array = source_tensor(tmp_path, shape=(50, 20))
    layout = one_file(t, ops.permute(t, (1, 0)), ops.cast(t, DTYPES["float16"]), filled(F32, (7,), b"\0\0\x80\x3f"))
    got = write(layout, tmp_path / "out", prove=True)
    want = b"HEAD" + array.tobytes() + array.T.tobytes() + array.astype(np.float16).tobytes()
    assert got == want + np.ones(7, np.float32).tobytes()
    assert not list(tmp_path.glob("*partial*"))


def test_checksums_of_copied_computed_and_split_ranges_are_right(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "TASK_BYTES", 1 << 10)
        patch.setattr(work, "GATHER", 64)
        t, array = source_tensor(tmp_path)
        got = write(one_file(t, ops.cast(t, DTYPES["float64"]), checksums=True), tmp_path / "out", prove=True)
    raw, wide = array.tobytes(), array.astype(np.float64).tobytes()
    want = b"HEAD" + raw + b"crc:" + struct.pack("<I", zlib.crc32(raw)) + wide + b"crc:"
    assert got == want + struct.pack("<I", zlib.crc32(wide))


@settings(deadline=None, max_examples=30)
@given(drawn=st.data())
def test_any_grid_of_pieces_in_any_files_is_put_together(
    tmp_path_factory: pytest.TempPathFactory, drawn: st.DataObject
) -> None:
    tmp = tmp_path_factory.mktemp("grid")
    shape = drawn.draw(st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple))
    array = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    axis = drawn.draw(st.integers(0, len(shape) - 1))
    cuts = sorted({0, shape[axis], *drawn.draw(st.lists(st.integers(0, shape[axis]), max_size=3))})
    pieces = []
    for i, (a, b) in enumerate(zip(cuts, cuts[1:])):
        start = tuple(a if k == axis else 0 for k in range(len(shape)))
        box = Box(start, tuple(b if k == axis else n for k, n in enumerate(shape)))
        path = tmp / f"{i}.bin"
        path.write_bytes(array[box.slices()].tobytes())
        pieces.append(Piece(Span(open_local(path), 0, path.stat().st_size), box))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lower, "MIN_RUN", drawn.draw(st.sampled_from([1, 8, 1 << 16])))
        got = write(one_file(Tensor(DTYPES["int32"], shape, tuple(pieces))), tmp / "out")
    assert got[4:] == array.tobytes()


def test_an_existing_destination_is_refused_and_replaced_only_by_force(tmp_path: Path) -> None:
    t, array = source_tensor(tmp_path)
    (tmp_path / "out").write_text("precious")
    with pytest.raises(Refused, match="exists"):
        write(one_file(t), tmp_path / "out")
    assert (tmp_path / "out").read_text() == "precious"
    assert write(one_file(t), tmp_path / "out", force=True)[4:] == array.tobytes()


def test_the_source_may_be_its_own_destination(tmp_path: Path) -> None:
    t, array = source_tensor(tmp_path)
    assert write(one_file(t), tmp_path / "source.bin", force=True) == b"HEAD" + array.tobytes()


def test_a_full_disk_is_found_before_anything_is_written(tmp_path: Path) -> None:
    huge = from_source(F32, (1 << 50,), Fill(b"\0\0\0\0", 4 << 50))
    made = plan.Plan((plan.FilePlan("", 4 << 50, ()),), (), 0, huge.nbytes, 0, 1, "x")
    with pytest.raises(OutOfSpace, match="are free"):
        run.run(made, tmp_path / "out", is_folder=False, job=run.Job())
    assert not list(tmp_path.iterdir())


def test_a_source_that_changes_while_it_is_read_leaves_no_result(tmp_path: Path) -> None:
    t, _ = source_tensor(tmp_path)
    made = plan.make_plan([one_file(ops.cast(t, DTYPES["float64"]))], max_memory=1 << 20, jobs=1)
    os.truncate(tmp_path / "source.bin", 100)
    with pytest.raises(CheckpointError):
        run.run(made, tmp_path / "out", is_folder=False, job=run.Job())
    assert not (tmp_path / "out").exists()


def test_a_check_that_fails_leaves_the_destination_as_it_was(tmp_path: Path) -> None:
    t, _ = source_tensor(tmp_path)
    made = plan.make_plan([one_file(t)], max_memory=1 << 20, jobs=1)

    def check(path: Path) -> None:
        raise Refused("not as meant")

    with pytest.raises(Refused, match="not as meant"):
        run.run(made, tmp_path / "out", is_folder=False, job=run.Job(), check=check)
    assert not (tmp_path / "out").exists()


def test_a_tensor_that_cannot_be_computed_within_the_budget_is_refused_by_the_planner(tmp_path: Path) -> None:
    sparse = Tensor(
        F32,
        (1 << 14, 1 << 14),
        op=ops.Densify("sparse_coo", (from_array(np.zeros((2, 1), np.int64)), from_array(np.ones(1, np.float32))),
                       (1 << 14, 1 << 14)),
    )
    with pytest.raises(Refused, match="the budget allows"):
        plan.make_plan([one_file(sparse)], max_memory=1 << 20, jobs=1)


KILLED = """
    import sys, time
    from pathlib import Path
    import numpy as np
    from anyckpt.core import ops
    from anyckpt.core.dtypes import DTYPES
    from anyckpt.core.layout import FileLayout, Part, Checksum
    from anyckpt.core.source import Span
    from anyckpt.core.tensor import from_source
    from anyckpt.io.local import open_local
    from anyckpt.plan import plan, run

    folder, slow = Path(sys.argv[1]), sys.argv[2] == "slow"
    run.JOURNAL_BYTES = plan.TASK_BYTES = 1 << 16
    source = open_local(folder / "source.bin")
    t = from_source(DTYPES["float32"], (1 << 19,), Span(source, 4, 1 << 21))
    layouts = [
        FileLayout(name, (1 << 21) + 4, (Part(0, 1 << 21, t), Part(1 << 21, 4, bytes(4))),
                   (Checksum(1 << 21, 0, 1 << 21),))
        for name in ("a", "b")
    ]
    made = plan.make_plan(layouts, max_memory=1 << 24, jobs=2)
    events = (lambda e: time.sleep(0.02)) if slow else None
    done = run.run(made, folder / "out", is_folder=True, job=run.Job(jobs=2, events=events))
    print("resumed", done.resumed_bytes)
"""


def killed_in_the_middle(tmp_path: Path) -> list[str]:
    """Start the job, kill it when its journal says that 16 tasks are on the disk; returns the command to go on."""
    source_tensor(tmp_path, n=1 << 19)
    script = [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path)]
    child = subprocess.Popen([*script, "slow"], stdout=subprocess.DEVNULL)
    journal = tmp_path / "out.anyckpt-partial" / "tasks.jsonl"
    while child.poll() is None:
        if journal.exists() and any(json.loads(n).get("tasks", 0) >= 16 for n in journal.read_text().split("\n")[:-1]):
            child.send_signal(signal.SIGKILL)
            break
        time.sleep(0.002)
    child.wait()
    assert not (tmp_path / "out").exists()
    return [*script, "fast"]


def test_a_job_killed_in_the_middle_goes_on_and_ends_with_the_same_bytes(tmp_path: Path) -> None:
    script = killed_in_the_middle(tmp_path)
    again = subprocess.run(script, capture_output=True, text=True, check=True)
    assert int(again.stdout.split()[-1]) >= 1 << 20
    data = (tmp_path / "source.bin").read_bytes()[4:]
    for name in ("a", "b"):
        assert (tmp_path / "out" / name).read_bytes() == data + struct.pack("<I", zlib.crc32(data))
    assert not list(tmp_path.glob("*partial*"))


def test_a_changed_source_is_not_resumed_from_an_old_journal(tmp_path: Path) -> None:
    script = killed_in_the_middle(tmp_path)
    time.sleep(0.01)
    changed = np.ones(1 << 19, np.float32).tobytes()
    (tmp_path / "source.bin").write_bytes(b"head" + changed)
    again = subprocess.run(script, capture_output=True, text=True, check=True)
    assert again.stdout.split()[-1] == "0"
    assert (tmp_path / "out" / "b").read_bytes() == changed + struct.pack("<I", zlib.crc32(changed))


LIMITED = """
    import resource, sys
    from pathlib import Path
    import numpy as np, ml_dtypes
    from anyckpt.core import ops
    from anyckpt.core.dtypes import DTYPES
    from anyckpt.core.layout import FileLayout, Part
    from anyckpt.core.source import Span
    from anyckpt.core.tensor import from_source
    from anyckpt.io.local import open_local
    from anyckpt.plan import plan, run

    folder, n = Path(sys.argv[1]), 1 << 26
    source = open_local(folder / "source.bin")
    t = from_source(DTYPES["float32"], (1 << 13, 1 << 13), Span(source, 0, 4 * n))
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (160 << 20), used + (160 << 20)))
    for name, out in (("cast", ops.cast(t, DTYPES["bfloat16"])), ("turned", ops.permute(t, (1, 0)))):
        made = plan.make_plan([FileLayout("", out.nbytes, (Part(0, out.nbytes, out),))], max_memory=64 << 20, jobs=2)
        assert made.peak_bytes <= 64 << 20, made.peak_bytes
        run.run(made, folder / name, is_folder=False, job=run.Job(jobs=2))
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc to know the memory in use")
def test_a_tensor_four_times_the_budget_is_cast_and_transposed_under_a_memory_limit(tmp_path: Path) -> None:
    with (tmp_path / "source.bin").open("wb") as file:  # 256 MiB, two rows of values in a hole of zeros
        file.write(np.arange(1 << 13, dtype=np.float32).tobytes())
        file.truncate(1 << 28)
        file.seek((1 << 28) - 4)
        file.write(np.float32(7).tobytes())
    script = [sys.executable, "-c", textwrap.dedent(LIMITED), str(tmp_path)]
    done = subprocess.run(script, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    turned = np.memmap(tmp_path / "turned", np.float32, "r", shape=(1 << 13, 1 << 13))
    np.testing.assert_array_equal(turned[:, 0], np.arange(1 << 13))
    assert turned[-1, -1] == 7
    assert os.path.getsize(tmp_path / "cast") == 1 << 27
