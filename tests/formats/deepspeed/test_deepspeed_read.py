"""Reading: real runs give the live model and optimizer back; every damage is a finding that says what to do."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from anyckpt import formats
from anyckpt.core.checkpoint import Checkpoint
from anyckpt.core.topology import Topology
from anyckpt.errors import CheckpointError
from anyckpt.finding import Report
from anyckpt.formats import safetensors
from anyckpt.formats.deepspeed.files import part_of, parts_in
from anyckpt.io.place import Place

Open = Callable[[Path], Checkpoint]


def codes(checkpoint: Checkpoint, severity: str = "error") -> list[str]:
    return [f.code for f in checkpoint.findings if f.severity == severity]


def truth(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """A safetensors file, read by another reader of ours."""
    tensors = safetensors.read(Place.at(path).open(), Report()).weights
    return {name: (t.dtype.name, t.shape, t.tobytes()) for name, t in tensors.items()}


def hold(checkpoint: Checkpoint, weights: Path, optimizer: Path) -> None:
    got = {name: (t.dtype.name, t.shape, t.tobytes()) for name, t in checkpoint.weights.items()}
    assert got == truth(weights)
    assert checkpoint.optimizer is not None
    slots = checkpoint.optimizer.slots
    moments = {
        f"{name}/{slot}": (t.dtype.name, t.shape, t.tobytes())
        for slot, tensors in slots.items()
        for name, t in tensors.items()
        if slot != "step"
    }
    assert moments == truth(optimizer)


@pytest.mark.parametrize(("stage", "n_ranks"), [(2, 2), (3, 3)])
def test_a_real_run_gives_the_live_model_and_optimizer(stage: int, n_ranks: int, data: Path, open_at: Open) -> None:
    folder = data / "deepspeed"
    checkpoint = open_at(folder / f"zero{stage}")
    hold(checkpoint, folder / f"zero{stage}.safetensors", folder / f"zero{stage}_optim.safetensors")
    assert checkpoint.step == 3
    assert checkpoint.topology == Topology(dp=n_ranks, zero=stage)
    assert checkpoint.aliases == {"head.weight": "embed.weight"}
    assert checkpoint.scheduler == {"last_batch_iteration": 2}
    assert checkpoint.state["note"] == "client"
    assert checkpoint.optimizer is not None
    assert [group["weight_decay"] for group in checkpoint.optimizer.groups] == [0.1, 0.0]
    assert checkpoint.optimizer.kind == "AdamW"
    assert checkpoint.verdict == "safe" and not codes(checkpoint)


def test_every_case_of_the_corpus_gives_the_live_model(corpus: Path, open_at: Open) -> None:
    for name in ("z2_dp2_bf16_frozen_tied", "z3_dp2_subgroups", "moe_z2_ep2_dp2", "pipe_pp2_dp1_z1", "bf16opt_z1_dp2"):
        case = corpus / "deepspeed" / name
        hold(open_at(case / "ckpt"), case / "truth.safetensors", case / "truth_optim.safetensors")


def test_the_step_s_own_folder_opens_as_the_run_does(zero2: Path, open_at: Open) -> None:
    assert list(open_at(zero2 / "global_step3").weights) == list(open_at(zero2).weights)


def test_weights_of_stage_3_are_copied_not_computed(zero3: Path, open_at: Open) -> None:
    from anyckpt.plan.lower import stored_runs

    checkpoint = open_at(zero3)
    for name, tensor in checkpoint.weights.items():
        assert stored_runs(tensor) is not None, name


# -- which step ------------------------------------------------------------------------------------------------------


def test_latest_may_be_a_link_to_the_folder(run2: Path, open_at: Open) -> None:
    (run2 / "latest").unlink()
    (run2 / "latest").symlink_to("global_step3")
    assert open_at(run2).step == 3


def test_latest_that_names_nothing_is_an_error_and_the_newest_is_described(run2: Path, open_at: Open) -> None:
    (run2 / "latest").write_text("global_step9")
    checkpoint = open_at(run2)
    assert codes(checkpoint) == ["bad-tracker"]
    assert checkpoint.step == 3
    assert "global_step3" in next(f.hint for f in checkpoint.findings if f.code == "bad-tracker")


def test_a_link_that_dangles_is_the_same(run2: Path, open_at: Open) -> None:
    (run2 / "latest").unlink()
    (run2 / "latest").symlink_to("global_step9")
    assert codes(open_at(run2)) == ["bad-tracker"]


@pytest.mark.parametrize("text", ["../../outside", "/etc", "a/../../b"])
def test_latest_may_not_lead_out_of_the_folder(run2: Path, open_at: Open, text: str) -> None:
    (run2 / "latest").write_text(text)
    with pytest.raises(CheckpointError) as caught:
        open_at(run2)
    assert caught.value.finding.code == "path-escape"


def test_a_newer_step_than_latest_is_told(run2: Path, open_at: Open) -> None:
    shutil.copytree(run2 / "global_step3", run2 / "global_step12")
    checkpoint = open_at(run2)
    assert "incomplete" in codes(checkpoint, "warning")
    assert checkpoint.facts["tag"] == "global_step3"


def test_without_latest_the_newest_by_number_is_read(run2: Path, open_at: Open) -> None:
    (run2 / "latest").unlink()
    shutil.copytree(run2 / "global_step3", run2 / "global_step12")
    checkpoint = open_at(run2)
    assert checkpoint.facts["tag"] == "global_step12"
    assert "ambiguous" in codes(checkpoint, "warning")


def test_what_an_unfinished_save_left_is_told(run2: Path, open_at: Open) -> None:
    (run2 / "tmp-global_step4").mkdir()
    assert "leftover" in codes(open_at(run2), "warning")


# -- missing and foreign files ---------------------------------------------------------------------------------------


def test_a_missing_rank_is_named(run2: Path, open_at: Open) -> None:
    lost = run2 / "global_step3" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    lost.unlink()
    checkpoint = open_at(run2)
    finding = next(f for f in checkpoint.findings if f.code == "missing-shard")
    assert (finding.severity, finding.where) == ("error", lost.name)
    assert len(checkpoint.weights) == 18, "the weights are whole without it"


def test_placeholders_without_the_optimizer_s_files_are_no_model(run3: Path, open_at: Open) -> None:
    for file in (run3 / "global_step3").glob("*optim_states.pt"):
        file.unlink()
    checkpoint = open_at(run3)
    finding = next(f for f in checkpoint.findings if f.code == "missing-shard")
    assert "placeholders" in finding.message
    assert all(tensor.size for tensor in checkpoint.weights.values())


def test_placeholders_saved_as_the_model_are_told(open_at: Open, lay_down: Callable[..., None], tmp_path: Path) -> None:
    import numpy as np

    from anyckpt.core.tensor import from_array
    from anyckpt.formats.deepspeed.pickled import saved

    empty = {f"layers.{i}.weight": from_array(np.zeros(0, np.float32)) for i in range(3)}
    lay_down([saved("pytorch_model.bin", {**empty, "scale": from_array(np.ones(1, np.float32))})], tmp_path)
    checkpoint = open_at(tmp_path / "pytorch_model.bin")
    finding = next(f for f in checkpoint.findings if f.severity == "error")
    assert finding.code == "incomplete" and "stage 3" in finding.message and "optim_states" in finding.hint


def test_a_rank_s_file_of_another_step_is_an_error(run2: Path, zero3: Path, open_at: Open, tmp_path: Path) -> None:
    from anyckpt.verbs.reshard import reshard

    other = open_at(run2)
    object.__setattr__(other, "step", 4)
    assert other.optimizer is not None
    import numpy as np

    from anyckpt.core.tensor import from_array

    later = dict.fromkeys(other.optimizer.slots["step"], from_array(np.array(9, np.float32)))
    object.__setattr__(other.optimizer, "slots", {**other.optimizer.slots, "step": later})
    reshard(other, tmp_path / "later", dp=2)
    name = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    shutil.copy(tmp_path / "later" / "global_step4" / name, run2 / "global_step3" / name)
    finding = next(f for f in open_at(run2).findings if f.code == "mixed-steps")
    assert finding.severity == "error" and "step 9" in finding.message + finding.where + str(finding)


def test_a_rank_too_many_is_told_and_left_out(run2: Path, open_at: Open) -> None:
    step = run2 / "global_step3"
    name = "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt"
    shutil.copy(step / name.format(1), step / name.format(2))
    checkpoint = open_at(run2)
    assert "extra-shard" in codes(checkpoint, "warning") and not codes(checkpoint)


def test_files_of_another_precision_saved_over_are_told(run2: Path, open_at: Open) -> None:
    step = run2 / "global_step3"
    name = "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    shutil.copy(step / f"bf16_{name}", step / name)
    checkpoint = open_at(run2)
    assert "mixed-steps" in codes(checkpoint, "warning") and not codes(checkpoint)


def test_a_file_cut_short_is_named_and_the_rest_is_read(run2: Path, open_at: Open) -> None:
    file = run2 / "global_step3" / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    file.write_bytes(file.read_bytes()[:4000])
    checkpoint = open_at(run2)
    assert "truncated" in codes(checkpoint)
    assert len(checkpoint.weights) == 18


def test_without_a_model_file_nothing_has_a_name(run2: Path, open_at: Open) -> None:
    (run2 / "global_step3" / "mp_rank_00_model_states.pt").unlink()
    assert "missing-shard" in codes(open_at(run2))


def test_the_names_that_tutorials_draw_are_read(run3: Path, zero3: Path, open_at: Open) -> None:
    step = run3 / "global_step3"
    for file in list(step.iterdir()):
        file.rename(step / file.name.replace("_mp_rank_00", ""))
    step.rename(run3 / "global_step_1000")
    (run3 / "latest").write_text("global_step_1000\n")
    got, want = open_at(run3), open_at(zero3)
    assert not codes(got)
    assert {n: t.tobytes() for n, t in got.weights.items()} == {n: t.tobytes() for n, t in want.weights.items()}


# -- names of files --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind", "numbers"),
    [
        ("mp_rank_03_model_states.pt", "model", {"mp": 3}),
        ("zero_pp_rank_10_mp_rank_01_model_states.pt", "model", {"dp": 10, "mp": 1}),
        ("zero_pp_rank_2_model_states.pt", "model", {"dp": 2}),
        ("bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt", "optim", {"dp": 2, "bf16": True}),
        ("zero_pp_rank_0_mp_rank_00optim_states.pt", "optim", {"dp": 0}),
        ("layer_07-model_01-model_states.pt", "layer", {"layer": 7, "mp": 1}),
        ("layer_12-model_states.pt", "layer", {"layer": 12}),
        ("layer_0_expert_5_mp_rank_00_model_states.pt", "expert", {"layer": 0, "expert": 5}),
        ("expert_5_mp_rank_00_model_states.pt", "expert", {"expert": 5}),
        ("expp_rank_1_mp_rank_00_optim_states.pt", "expert-optim", {"expert": 1}),
    ],
)
def test_a_name_says_what_a_file_is(name: str, kind: str, numbers: dict[str, int]) -> None:
    part = part_of(name)
    assert part is not None and part.kind == kind
    assert {key: getattr(part, key) for key in numbers} == numbers


def test_ranks_are_numbers_not_text() -> None:
    names = [f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (10, 9, 1, 2)]
    assert [part.dp for part in parts_in(names)] == [1, 2, 9, 10]


def test_other_folders_are_not_taken_for_deepspeed(data: Path, tmp_path: Path) -> None:
    for folder in (data / "sharded", data / "adapter", data / "bin"):
        row = formats.of_folder(Place.at(folder))
        assert row is not None and not row.name.startswith("deepspeed")
