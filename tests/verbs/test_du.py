"""Every byte of a file is accounted for once."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from anyckpt.core.checkpoint import Checkpoint
from anyckpt.core.dtypes import DTYPES
from anyckpt.core.source import Span
from anyckpt.core.tensor import from_array, from_source
from anyckpt.io.view import MemoryFile
from anyckpt.verbs.du import du


def test_parts_of_a_trainer_checkpoint_add_up(data: Path) -> None:
    path = data / "trainer" / "checkpoint.pt"
    found = du(path)
    assert found.total_bytes == path.stat().st_size
    assert sum(u.n_bytes for u in found.kinds) + found.dead_bytes + found.overhead_bytes == found.total_bytes
    by_kind = {u.name: u for u in found.kinds}
    assert by_kind["moments"].n_bytes == 2 * by_kind["weights"].n_bytes
    assert {u.name for u in found.kinds} == {"weights", "moments", "counters"}
    assert found.shared_bytes > 0  # lm_head is tied
    assert [s.command.split()[1] for s in found.savings] == ["prune", "cast"]
    assert found.savings[0].n_bytes == by_kind["moments"].n_bytes + by_kind["counters"].n_bytes
    assert found.savings[1].n_bytes == by_kind["weights"].n_bytes // 2
    json.dumps(found.as_dict())


def test_prefixes_go_to_the_depth_asked(data: Path) -> None:
    path = data / "truth.safetensors"
    assert {u.name for u in du(path, depth=1).prefixes} == {"model", "lm_head"}
    assert "model.layers" in {u.name for u in du(path, depth=2).prefixes}


def test_a_folder_counts_all_of_its_files(data: Path) -> None:
    found = du(data / "sharded")
    assert found.total_bytes == sum(f.stat().st_size for f in (data / "sharded").iterdir())


def test_ties_and_overlapping_views_count_once() -> None:
    file = MemoryFile("m", bytes(64))
    f32 = DTYPES["float32"]
    weights = {
        "a": from_source(f32, (8,), Span(file, 0, 32)),
        "tied": from_source(f32, (8,), Span(file, 0, 32)),
        "overlap": from_source(f32, (8,), Span(file, 16, 32)),
        "inline": from_array(np.zeros(2, np.float32)),
    }
    found = du(Checkpoint("m", "", weights, aliases={"tied": "a"}))
    assert found.total_bytes == 48 + 8
    assert found.shared_bytes == 32 + 16
    assert found.kinds[0].logical_bytes == 104


@pytest.mark.parametrize("case", ["zip_views/views.pt", "zip_exotic/exotic.pt", "zip_tied_bf16/model.pth"])
def test_corpus_files_add_up(corpus: Path, case: str) -> None:
    path = next((corpus / "torch").glob(case), None) or pytest.skip(f"{case} is not in this corpus")
    found = du(path)
    parts = sum(u.n_bytes for u in found.kinds) + found.dead_bytes + found.overhead_bytes
    assert parts == found.total_bytes == path.stat().st_size
