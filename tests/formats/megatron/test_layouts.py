"""One model at many layouts: what is written for any of them reads as the same model, moments and masters included."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import anyckpt
from anyckpt.core.checkpoint import Checkpoint
from anyckpt.core.topology import Topology
from anyckpt.errors import Refused, UsageError
from anyckpt.formats.megatron.ranks import loading_ranks, written_ranks
from anyckpt.formats.megatron.spread import registered, spread

Same = Callable[[Checkpoint, Checkpoint], None]
Model = Callable[..., Checkpoint]

LAYOUTS = [
    ({}, Topology(tp=2, pp=2)),
    ({"bf16": True}, Topology(tp=4)),
    ({"bf16": True, "flat": True}, Topology(tp=2, pp=2, vpp=2, dp=3)),
    ({"flat": True}, Topology(pp=4, dp=2)),
    ({"bf16": True, "tied": True}, Topology(pp=2)),
    ({"bf16": True, "tied": True, "flat": True}, Topology(tp=2, pp=2, dp=2)),
    ({"experts": 4, "bf16": True}, Topology(tp=2, ep=2, etp=1, dp=2)),
    ({"experts": 4, "bf16": True, "flat": True}, Topology(tp=2, ep=2, etp=2, dp=2)),
    ({"experts": 4}, Topology(tp=2, ep=1, etp=1)),
    ({"experts": 4, "bf16": True, "flat": True}, Topology(tp=1, pp=2, ep=4, dp=4)),
]


@pytest.mark.parametrize("form", ["megatron", "megatron-dist"])
@pytest.mark.parametrize(("kind", "layout"), LAYOUTS, ids=lambda x: str(x).replace(" ", ""))
def test_every_layout_holds_the_same_training_state(
    form: str, kind: dict[str, bool], layout: Topology, model: Model, same: Same, tmp_path: Path
) -> None:
    source = model(**kind)
    anyckpt.convert(source, tmp_path / "out", to=form, topology=layout)
    found = anyckpt.open(tmp_path / "out")
    assert found.format == form and found.step == 3 and not [f for f in found.findings if f.severity == "error"]
    assert found.topology is not None and (found.topology.tp, found.topology.pp) == (layout.tp, layout.pp)
    same(source, found)
    assert anyckpt.verify(tmp_path / "out", deep=True).ok


def test_two_ways_round_give_the_same_files(model: Model, same: Same, tmp_path: Path) -> None:
    anyckpt.convert(model(bf16=True, flat=True), tmp_path / "a", to="megatron", topology=Topology(tp=2, pp=2, dp=2))
    anyckpt.convert(anyckpt.open(tmp_path / "a"), tmp_path / "b", to="megatron-dist", topology=Topology(pp=4))
    anyckpt.convert(anyckpt.open(tmp_path / "b"), tmp_path / "c", to="megatron", topology=Topology(tp=2, pp=2, dp=2))
    for file in sorted((tmp_path / "a").rglob("distrib_optim.pt")):
        assert file.read_bytes() == (tmp_path / "c" / file.relative_to(tmp_path / "a")).read_bytes()
    same(anyckpt.open(tmp_path / "a"), anyckpt.open(tmp_path / "c"))


def test_spelling_is_a_choice(model: Model, tmp_path: Path) -> None:
    extra = {"transformer_impl": "transformer_engine", "moe_grouped_gemm": True}
    anyckpt.convert(model(experts=2), tmp_path / "out", to="megatron", topology=Topology(), extra=extra)
    names = anyckpt.open(tmp_path / "out").weights
    assert "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight" in names
    assert "decoder.layers.0.pre_mlp_layernorm.weight" in names, "before experts a norm stays by itself"
    assert "decoder.layers.0.mlp.experts.linear_fc1.weight1" in names


def test_what_does_not_divide_is_refused_with_what_would(model: Model, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        anyckpt.convert(model(), tmp_path / "out", to="megatron", topology=Topology(pp=3))
    assert "1, 2, 4" in caught.value.hint
    with pytest.raises(UsageError):
        anyckpt.convert(model(experts=4), tmp_path / "out", to="megatron", topology=Topology(ep=3, dp=3))
    assert not (tmp_path / "out").exists()


def test_half_an_optimizer_is_refused(model: Model, tmp_path: Path) -> None:
    source = model()
    assert source.optimizer is not None
    del source.optimizer.slots["exp_avg"]["output_layer.weight"]  # type: ignore[attr-defined]
    with pytest.raises(Refused, match="no exp_avg for 1"):
        anyckpt.convert(source, tmp_path / "out", to="megatron", topology=Topology(tp=2))
    anyckpt.convert(source, tmp_path / "out", to="megatron", topology=Topology(tp=2), only="weights")


def test_a_missing_rank_is_told_and_its_part_absent(model: Model, tmp_path: Path) -> None:
    anyckpt.convert(model(), tmp_path / "out", to="megatron", topology=Topology(tp=2, pp=2))
    shutil.rmtree(tmp_path / "out" / "iter_0000003" / "mp_rank_01_001")
    found = anyckpt.open(tmp_path / "out")
    assert [f.code for f in found.findings if f.severity == "error"] == ["missing-shard"]
    assert not found.weights["output_layer.weight"].is_stored
    assert found.weights["embedding.word_embeddings.weight"].is_stored


def test_a_copied_rank_is_told(model: Model, tmp_path: Path) -> None:
    anyckpt.convert(model(), tmp_path / "out", to="megatron", topology=Topology(tp=2))
    folder = tmp_path / "out" / "iter_0000003"
    other = anyckpt.convert(model(layers=2), tmp_path / "other", to="megatron", topology=Topology(tp=2))
    assert other.files
    shutil.copy(tmp_path / "other" / "iter_0000003/mp_rank_01/model_optim_rng.pt", folder / "mp_rank_01")
    assert not anyckpt.verify(tmp_path / "out", deep=True).ok


def test_masters_that_do_not_round_to_their_weights_are_told(model: Model, tmp_path: Path) -> None:
    source = model(bf16=True)
    assert source.optimizer is not None
    masters = source.optimizer.slots["master"]
    name = "decoder.final_layernorm.weight"
    other = masters["embedding.word_embeddings.weight"][0]
    masters[name] = type(other)(masters[name].dtype, (16,), other.pieces, other.op)  # type: ignore[index]
    anyckpt.convert(source, tmp_path / "out", to="megatron", topology=Topology(tp=2))
    codes = [f.code for f in anyckpt.verify(tmp_path / "out", deep=True).findings]
    assert "master-mismatch" in codes


@pytest.mark.parametrize(
    ("topology", "written", "loading"),
    [
        (Topology(tp=2, etp=2), [(0, 0), (1, 0)], [(0, 0), (1, 0)]),
        (Topology(tp=2, ep=2, etp=1, dp=2), [(0, 0), (1, 1)], [(0, 0), (1, 1)]),
        (Topology(tp=2, ep=2, etp=2, dp=2), [(0, 0), (1, 0), (0, 1), (1, 1)], [(0, 0), (1, 0), (0, 1), (1, 1)]),
        (Topology(tp=2, ep=1, etp=1, dp=2), [(0, 0)], [(0, 0), (1, 0)]),
    ],
)
def test_files_are_those_of_ranks_whose_coordinates_they_name(
    topology: Topology, written: list[tuple[int, int]], loading: list[tuple[int, int]]
) -> None:
    assert written_ranks(topology) == written
    assert loading_ranks(topology) == loading


def test_parameters_come_as_megatron_registers_them(model: Model) -> None:
    source = model(layers=12, experts=2)
    assert registered(sorted(source.weights)) == list(source.weights)


def test_a_rank_counts_its_layers_and_experts_from_zero(model: Model) -> None:
    chunks = spread(model(experts=4).weights, Topology(pp=2, ep=2, dp=2), {"untie_embeddings_and_output_weights": True})
    names = chunks[0, 1, 1][0]
    assert "decoder.layers.0.mlp.experts.local_experts.1.linear_fc1.weight" in names
    assert not any("layers.2" in n or "local_experts.2" in n or "embedding" in n for n in names)


def test_padding_rows_are_zeros_and_leave_again(model: Model, tmp_path: Path) -> None:
    extra = {"make_vocab_size_divisible_by": 24}
    anyckpt.convert(model(), tmp_path / "out", to="megatron", topology=Topology(tp=4), extra=extra)
    table = anyckpt.open(tmp_path / "out").weights["embedding.word_embeddings.weight"].numpy()
    assert table.shape == (96, 16) and not table[64:].any()
    view = anyckpt.open(tmp_path / "out").view("hf")
    assert view.weights["model.embed_tokens.weight"].shape == (60, 16)
    assert np.array_equal(view.weights["model.embed_tokens.weight"].numpy(), table[:60])
