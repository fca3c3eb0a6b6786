"""DeepSpeed's own converters as judges: zero_to_fp32 and ds_to_universal give what we give.

`pytest -m frameworks`.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from anyckpt.core.checkpoint import Checkpoint
from anyckpt.verbs.convert import convert, with_masters
from anyckpt.verbs.reshard import reshard

pytestmark = pytest.mark.frameworks

Open = Callable[[Path], Checkpoint]

# Where zero_to_fp32 is right (it refuses pipelines, experts, BF16_Optimizer and stage 0; facts of 0.19.8).
CORPUS = (
    "z2_dp2_fp32", "z2_dp2_bf16_frozen_tied", "z2_dp2_paramalign", "z2_dp2_sgdm", "z3_dp2_fp32", "z3_dp2_subgroups",
    "z3_dp3_bf16_frozen",
)


def official(folder: Path) -> dict[str, Any]:
    """What DeepSpeed's script consolidates; its frozen weights stay in the run's type until its command line casts."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    state = get_fp32_state_dict_from_zero_checkpoint(str(folder))
    return {name: tensor.detach().float() for name, tensor in state.items()}


def hold(official_state: dict[str, Any], checkpoint: Checkpoint) -> None:
    import numpy as np

    ours = with_masters(checkpoint).weights
    assert set(official_state) == set(ours)
    for name, tensor in official_state.items():
        assert tuple(tensor.shape) == ours[name].shape, name
        np.testing.assert_array_equal(tensor.numpy(), ours[name].numpy().astype(np.float32), err_msg=name)


@pytest.mark.parametrize("run", ["zero2", "zero3"])
def test_masters_are_those_of_zero_to_fp32(run: str, data: Path, open_at: Open) -> None:
    folder = data / "deepspeed" / run
    hold(official(folder), open_at(folder))


def test_masters_are_those_of_zero_to_fp32_on_the_corpus(corpus: Path, open_at: Open) -> None:
    for name in CORPUS:
        folder = corpus / "deepspeed" / name / "ckpt"
        hold(official(folder), open_at(folder))


@pytest.mark.parametrize(("run", "dp", "zero"), [("zero2", 3, 3), ("zero2", 5, 2), ("zero3", 4, 1), ("zero3", 7, 3)])
def test_zero_to_fp32_reads_what_we_write(
    run: str, dp: int, zero: int, data: Path, open_at: Open, tmp_path: Path
) -> None:
    source = data / "deepspeed" / run
    reshard(source, tmp_path / "out", dp=dp, zero=zero)
    state = official(tmp_path / "out")
    ours = open_at(source)
    if zero == 1:  # the script leaves all frozen weights of stage 1 out, without a word
        assert ours.optimizer is not None
        trained = {*ours.optimizer.slots["master"], *ours.aliases, "scale", "version"}
        ours = ours.with_weights({n: t for n, t in ours.weights.items() if n in trained})
    hold(state, ours)


@pytest.mark.parametrize("run", ["zero2", "zero3"])
def test_ds_to_universal_gives_the_tensors_that_we_give(
    run: str, data: Path, open_at: Open, tmp_path: Path
) -> None:
    source = tmp_path / "run"
    shutil.copytree(data / "deepspeed" / run, source)
    subprocess.run(
        [
            sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state",
            "--input_folder", str(source / "global_step3"), "--output_folder", str(source / "global_step3_universal"),
            "--num_extract_workers", "1", "--num_merge_workers", "1",
        ],
        check=True, capture_output=True, timeout=200,
    )
    convert(source / "global_step3", tmp_path / "ours", to="deepspeed-universal")
    theirs, ours = open_at(source / "global_step3_universal"), open_at(tmp_path / "ours")
    assert theirs.optimizer is not None and ours.optimizer is not None
    for slot in ("master", "exp_avg", "exp_avg_sq"):
        got, want = ours.optimizer.slots[slot], theirs.optimizer.slots[slot]
        assert set(got) == set(want)
        for name in want:
            assert (got[name].shape, got[name].tobytes()) == (want[name].shape, want[name].tobytes()), (slot, name)
