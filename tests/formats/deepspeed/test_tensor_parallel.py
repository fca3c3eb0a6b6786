"""Tensor parallelism: a weight cut by the patterns that a run saves is merged to the same, alone and beneath ZeRO."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyckpt.core.checkpoint import Checkpoint
from anyckpt.core.tensor import from_array
from anyckpt.core.topology import Topology
from anyckpt.errors import Refused
from anyckpt.finding import Report
from anyckpt.formats.deepspeed.tensor_parallel import Rules, merged_tensors, split
from anyckpt.verbs.convert import convert
from anyckpt.verbs.reshard import reshard

INFO = {
    "universal_checkpoint_version": 0.4,
    "original_vocab_size": 14,
    "tp_replicated_parameter_patterns": [r".*norm.*"],
    "parameter_with_row_parallelism_patterns": [r".*down\.weight"],
    "vocabulary_parameter_patterns": [r"embed\.weight"],
    "parameter_with_2_sub_params_cat_dim_0": [r".*gate_up\.weight"],
    "parameter_with_sub_params": [{"patterns": [r".*qkv\.weight"], "shape": [[8, 4, 4], -1], "partition_dim": 0}],
}
WEIGHTS = {
    "embed.weight": (16, 6), "norm.weight": (6,), "qkv.weight": (16, 6), "gate_up.weight": (8, 6),
    "down.weight": (6, 4), "up.bias": (4,),
}


@given(st.sampled_from(sorted(WEIGHTS)), st.sampled_from([1, 2, 4]))
def test_what_is_cut_is_merged_to_the_same(name: str, tp: int) -> None:
    rules = Rules.of(INFO)
    array = np.arange(np.prod(WEIGHTS[name]), dtype=np.float32).reshape(WEIGHTS[name])
    parts = split(name, from_array(array), tp, rules)
    assert len(parts) == tp
    np.testing.assert_array_equal(merged_tensors(name, parts, rules, Report()).numpy(), array)


def test_sub_parameters_are_cut_one_by_one() -> None:
    rules = Rules.of(INFO)
    rows = np.arange(16, dtype=np.float32)[:, None]
    first, second = split("qkv.weight", from_array(rows), 2, rules)
    assert first.numpy()[:, 0].tolist() == [0, 1, 2, 3, 8, 9, 12, 13]
    assert second.numpy()[:, 0].tolist() == [4, 5, 6, 7, 10, 11, 14, 15]


def test_without_patterns_nothing_is_guessed() -> None:
    report = Report()
    part = from_array(np.ones((2, 2), np.float32))
    merged_tensors("up.weight", [part, part], Rules.of(None), report)
    assert [(f.code, f.severity) for f in report.findings] == [("unmapped-tensor", "error")]


@pytest.mark.parametrize(("tp", "dp", "zero"), [(2, 2, 1), (2, 3, 3), (4, 1, 2), (1, 2, 3)])
def test_tensor_parallel_ranks_come_back_beneath_zero(
    tp: int, dp: int, zero: int, build: Callable[..., Checkpoint], open_at: Callable[[Path], Checkpoint],
    same: Callable[[Checkpoint, Checkpoint], None], tmp_path: Path,
) -> None:
    source = build([WEIGHTS], state={"deepspeed": {"universal_checkpoint_info": INFO, "buffer_names": []}})
    reshard(source, tmp_path / "out", tp=tp, dp=dp, zero=zero)
    got = open_at(tmp_path / "out")
    same(got, source)
    assert got.topology == Topology(tp=tp, dp=dp, zero=zero)
    assert not [f for f in got.findings if f.severity == "error"]


def test_universal_leaves_the_vocabulary_s_padding_out(
    build: Callable[..., Checkpoint], open_at: Callable[[Path], Checkpoint], tmp_path: Path
) -> None:
    source = build([WEIGHTS], state={"deepspeed": {"universal_checkpoint_info": INFO, "buffer_names": []}})
    convert(source, tmp_path / "out", to="deepspeed-universal")
    file = tmp_path / "out" / "global_step5_universal" / "zero" / "embed.weight" / "fp32.pt"
    assert open_at(file).facts["object"]["param"].shape == (14, 6)
    got = open_at(tmp_path / "out")
    assert got.optimizer is not None
    master = got.optimizer.slots["master"]["embed.weight"].numpy()
    assert master.shape == (16, 6) and not master[14:].any(), "as loaders pad it"


def test_what_ranks_can_t_share_evenly_is_refused(build: Callable[..., Checkpoint], tmp_path: Path) -> None:
    source = build([{"up.weight": (5, 2)}], state={"deepspeed": {"universal_checkpoint_info": INFO}})
    with pytest.raises(Refused, match="can't share evenly"):
        reshard(source, tmp_path / "out", tp=2, dp=1, zero=2)
