"""The conformance suite: what every format must do, whatever it is.

Damage is tried in earnest: files are cut at many places and single bytes are turned. A reader may find nothing wrong
with some of that (a byte inside a tensor), but it must answer: no crash, no hang, and never a safe verdict on a pickle
that it could not read to its end.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from anyckpt import formats
from anyckpt.core.box import Box, whole
from anyckpt.core.checkpoint import Checkpoint
from anyckpt.errors import AnyckptError
from anyckpt.finding import Report
from anyckpt.formats.table import Format, row_named
from anyckpt.io.place import Place
from anyckpt.verbs.convert import convert
from anyckpt.verbs.identify import identify
from anyckpt.verbs.open import open as open_checkpoint
from anyckpt.verbs.verify import verify

CUTS = 64  # places at which files are cut, over all files
TURNS = 48  # bytes turned, over all files
FILES = 24  # files taken away, one at a time


class FormatTests:
    """Subclass it, name the `row`, and give an `example`.

    `view`: the view under which names are those of the source that `example` was made from. `options`: what `convert`
    must be told to write this format.
    """

    row: str = ""
    view: str = ""
    options: Mapping[str, Any] = {}

    def example(self, tmp_path: Path) -> Path:
        """Write a small checkpoint of this format below `tmp_path` and return what a user would name."""
        raise NotImplementedError

    def format(self) -> Format:
        """The row of the table."""
        found = row_named(self.row)
        assert found is not None, f"no format is called {self.row!r}"
        return found

    def test_it_is_known_by_its_content(self, tmp_path: Path) -> None:
        path = self.example(tmp_path)
        assert identify(path).format == self.row

    def test_a_sound_one_has_no_error_and_is_read_to_the_end(self, tmp_path: Path) -> None:
        found = verify(self.example(tmp_path), deep=True)
        assert found.ok, found.findings
        assert found.n_tensors

    def test_any_part_of_a_tensor_equals_that_part_of_the_whole(self, tmp_path: Path) -> None:
        draw = random.Random(0)
        for name, tensor in open_checkpoint(self.example(tmp_path)).weights.items():
            array = tensor.numpy()
            assert array.shape == tensor.shape, name
            if tensor.dtype.block > 1 or not tensor.size:
                continue
            start = tuple(draw.randrange(n) for n in tensor.shape)
            box = Box(start, tuple(draw.randint(a + 1, n) for a, n in zip(start, tensor.shape, strict=True)))
            part = tensor.numpy(box)
            assert part.tobytes() == array[box.slices()].tobytes(), f"{name} {box}"
            assert tensor.numpy(whole(tensor.shape)).tobytes() == array.tobytes(), name

    def test_what_is_written_again_is_read_equal(self, tmp_path: Path) -> None:
        row = self.format()
        if not row.writes:
            return
        path = self.example(tmp_path)
        again = tmp_path / ("again" if row.writes == "folder" else f"again{row.endings[0]}")
        convert(path, again, to=row.name, prove=True, **self.options)
        got, want = self._seen(open_checkpoint(again)), self._seen(open_checkpoint(path))
        for name, tensor in want.weights.items():
            found = got.weights.get(name) or got.weights[got.aliases[name]]
            assert found.dtype == tensor.dtype, name
            assert found.tobytes() == tensor.tobytes(), name
        if row.training and want.optimizer is not None:
            assert got.optimizer is not None
            for slot, by_parameter in want.optimizer.slots.items():
                for parameter, tensor in by_parameter.items():
                    assert got.optimizer.slots[slot][parameter].tobytes() == tensor.tobytes(), f"{parameter}/{slot}"

    def _seen(self, checkpoint: Checkpoint) -> Checkpoint:
        return checkpoint.view(self.view) if self.view else checkpoint

    def test_a_file_cut_anywhere_is_told_and_never_crashes_the_reader(self, tmp_path: Path) -> None:
        path = self.example(tmp_path)
        draw = random.Random(2)
        sizes = {file: file.stat().st_size for file in _files(path)}
        places = [(file, size * i // 24) for file, size in sizes.items() for i in range(24)]
        places += [(file, size - 1) for file, size in sizes.items() if size]
        for file, cut in draw.sample(places, min(CUTS, len(places))):
            data = file.read_bytes()
            file.write_bytes(data[:cut])
            _answers(path)
            file.write_bytes(data)
        assert verify(path).ok

    def test_a_turned_byte_never_crashes_the_reader(self, tmp_path: Path) -> None:
        path = self.example(tmp_path)
        draw = random.Random(1)
        files = [file for file in _files(path) if file.stat().st_size]
        for _ in range(TURNS):
            file = draw.choice(files)
            data = file.read_bytes()
            at = min(int(draw.expovariate(8) * len(data)), len(data) - 1)  # headers more often than data
            file.write_bytes(data[:at] + bytes([data[at] ^ (1 << draw.randrange(8))]) + data[at + 1 :])
            _answers(path)
            file.write_bytes(data)

    def test_a_folder_without_one_of_its_files_never_crashes_the_reader(self, tmp_path: Path) -> None:
        path = self.example(tmp_path)
        files = list(_files(path)) if path.is_dir() else []
        for file in random.Random(3).sample(files, min(FILES, len(files))):
            shutil.move(file, tmp_path / "aside")
            _answers(path)
            shutil.move(tmp_path / "aside", file)


def _files(path: Path) -> Iterator[Path]:
    yield from [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())


def _answers(path: Path) -> None:
    """Both ways in answer: `verify` with findings, opening with a checkpoint or an error of ours."""
    verify(path, deep=True)
    try:
        checkpoint = formats.read(Place.at(path), Report())
    except AnyckptError:
        return
    for tensor in checkpoint.weights.values():
        try:
            tensor.tobytes()
        except AnyckptError:
            continue
