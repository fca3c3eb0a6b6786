"""Checkpoints that Megatron wrote: every tensor and moment as the live model had them, and what trackers say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import anyckpt
from anyckpt.errors import UsageError
from anyckpt.finding import Finding

CASES = [
    "legacy_tp2_pp2_llama_bf16", "legacy_pp2_vpp2_llama_fp32", "legacy_pp2_gpt2_tied_fp16",
    "legacy_tp2_ep2_mixtral_bf16", "legacy_tp2_pp2_dp2_distopt_llama_bf16", "legacymodel_tp2_pp2_llama_bf16_v080",
    "userlayout_pp2_gpt2_tied_fp16", "hf_legacy_tp2_qwen3_fp32", "hf_dist_tp2_llama_fp32",
    "dist_tp2_dp2_dpreshardable_llama_bf16", "dist_tp2_ep2_mixtral_bf16",
    "dist_tp2_pp2_dp2_fullyreshardable_llama_bf16", "zarr_tp2_gpt2_bf16_v0100",
]  # fmt: skip
Real = Callable[[str], Path]


def codes(findings: tuple[Finding, ...]) -> list[str]:
    return [f.code for f in findings if f.severity != "note"]


@pytest.mark.parametrize("case", CASES)
def test_every_tensor_and_moment_is_the_live_models(case: str, real: Real) -> None:
    path = real(case)
    found = anyckpt.open(path)
    root = next(p for p in path.parents if (p / "case.json").exists())
    weights = anyckpt.open(root / "truth.safetensors").weights
    assert weights.keys() == found.weights.keys()
    assert all(found.weights[n].tobytes() == t.tobytes() for n, t in weights.items())
    assert found.optimizer is not None
    for name, tensor in anyckpt.open(root / "truth_optim.safetensors").weights.items():
        parameter, _, slot = name.rpartition("/")
        assert found.optimizer.slots[slot][parameter].tobytes() == tensor.tobytes(), name
    assert found.step == json.loads((root / "case.json").read_text())["extra"]["step"]
    assert codes(found.findings) == [] and anyckpt.verify(path, deep=True).ok


@pytest.mark.parametrize("where", ["iter_0000004", "iter_0000004/mp_rank_00_001"])
def test_a_users_place_inside_the_root_is_understood(where: str, real: Real) -> None:
    root = real("legacy_tp2_pp2_llama_bf16")
    assert anyckpt.open(root / where).weights.keys() == anyckpt.open(root).weights.keys()


def test_a_tracker_that_lies_is_told_and_the_newest_read(real: Real, tmp_path: Path) -> None:
    (tmp_path / "iter_0000004").symlink_to(real("legacy_pp2_gpt2_tied_fp16") / "iter_0000004")
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in (real("legacy_pp2_gpt2_tied_fp16") / "iter_0000004").rglob("*.pt"):
        target = copy / "iter_0000004" / file.parent.name / file.name
        target.parent.mkdir(parents=True)
        target.write_bytes(file.read_bytes())
    tracker.unlink(missing_ok=True)
    tracker = copy / "latest_checkpointed_iteration.txt"
    for text, code in (("9", "incomplete"), ("", "bad-tracker"), ("../x", "bad-tracker")):
        tracker.write_text(text)
        assert codes(anyckpt.open(copy).findings) == [code]
    tracker.write_text("4")
    assert codes(anyckpt.open(copy).findings) == []
    (copy / "iter_0000004").rename(copy / "iter_0000007")
    tracker.write_text("7")
    assert codes(anyckpt.open(copy).findings) == ["inconsistent"]


@pytest.mark.parametrize("case", ["hf_legacy_tp2_gpt2_fp32", "hf_legacy_tp2_qwen2_fp32"])
def test_the_view_hf_is_the_model_that_transformers_agreed_with(case: str, real: Real) -> None:
    want = anyckpt.open(real(case).parent / "hf")
    got = anyckpt.open(real(case)).view("hf")
    assert got.weights.keys() == want.weights.keys()
    assert all(got.weights[n].tobytes() == t.tobytes() for n, t in want.weights.items())
    told = [f.message for f in got.findings if f.code == "lossy"]
    assert len(told) == 1 and "14 padding rows" in told[0], "50 of 64 rows are tokens, which is told"


def test_moments_follow_their_weights_into_the_view(real: Real) -> None:
    got = anyckpt.open(real("hf_legacy_ep2_mixtral_fp32")).view("hf")
    assert got.optimizer is not None
    for slot in ("exp_avg", "exp_avg_sq"):
        assert got.optimizer.slots[slot].keys() == got.weights.keys()
        assert all(got.optimizer.slots[slot][n].shape == t.shape for n, t in got.weights.items())


def test_nemo_is_read_in_place(real: Real) -> None:
    found = anyckpt.open(real("handmade_nemo1_gpt2"))
    want = anyckpt.open(real("handmade_nemo1_gpt2").parent / "truth.safetensors").weights
    assert found.format == "nemo" and found.facts["branch"] == "NeMo 1"
    assert {n: t.tobytes() for n, t in found.weights.items()} == {n: t.tobytes() for n, t in want.items()}
    assert found.config is not None and found.config["num_layers"] == 2


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ("tp=2 pp=2", ""), ("tp=4", "2 query groups don't divide by TP 4; TP may be 1, 2"),
        ("pp=3", "4 layers don't divide by PP 3; PP may be 1, 2, 4"),
        ("tp=1", "load_checkpoint takes them at no other"),
        ("ep=2", "EP 2 is for models with experts"),
    ],
)  # fmt: skip
def test_verify_says_whether_megatron_resumes(layout: str, said: str, real: Real) -> None:
    from anyckpt.verbs.resume import judge

    answer = judge(anyckpt.open(real("legacy_tp2_pp2_llama_bf16")), f"megatron {layout}")
    assert answer.can == (not said) and said in answer.why
    assert ("anyckpt reshard" in answer.command) == (layout == "tp=1")


def test_a_model_without_a_table_is_refused_by_what_differs(real: Real) -> None:
    found = anyckpt.open(real("hf_dist_tp2_llama_fp32"))
    assert found.config is not None
    found.config["normalization"] = "LayerNorm"  # type: ignore[index]
    with pytest.raises(UsageError, match="normalization 'LayerNorm'"):
        found.view("hf")
