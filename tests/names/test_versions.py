"""Older spellings: found with certainty, changed on request, in both directions."""

from __future__ import annotations

import numpy as np
import pytest

from anyckpt.core.checkpoint import Checkpoint, Optimizer
from anyckpt.core.tensor import Tensor, from_array
from anyckpt.errors import Refused
from anyckpt.names import versions


def tensor(*shape: int) -> Tensor:
    return from_array(np.random.default_rng(0).standard_normal(shape).astype(np.float32))


def test_gamma_and_beta_are_a_norms_weight_and_bias() -> None:
    shapes = {"bert.LayerNorm.gamma": (4,), "bert.LayerNorm.beta": (4,), "stage.0.gamma": (4,), "x.norm2.beta": (4,)}
    assert versions.older_names(shapes).new_of == {
        "bert.LayerNorm.gamma": "bert.LayerNorm.weight",
        "bert.LayerNorm.beta": "bert.LayerNorm.bias",
        "x.norm2.beta": "x.norm2.bias",
    }


def test_a_spelling_never_takes_a_name_that_is_there() -> None:
    assert not versions.older_names({"norm.gamma": (4,), "norm.weight": (4,)}).new_of


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            {"conv.weight_g": (8, 1, 1), "conv.weight_v": (8, 3, 3)},
            ["conv.parametrizations.weight.original0", "conv.parametrizations.weight.original1"],
        ),
        (
            {"weight_g": (1, 5), "weight_v": (2, 5)},
            ["parametrizations.weight.original0", "parametrizations.weight.original1"],
        ),
        (
            {"fc.weight_orig": (4, 3), "fc.weight_u": (4,), "fc.weight_v": (3,)},
            [f"fc.parametrizations.weight.{leaf}" for leaf in ("original", "0._u", "0._v")],
        ),
    ],
)
def test_parametrized_names_there_and_back(old: dict[str, tuple[int, ...]], new: list[str]) -> None:
    there = versions.older_names(old).new_of
    assert list(there.values()) == new
    back = versions.older_names({there[n]: s for n, s in old.items()}, backwards=True).new_of
    assert {there[n]: n for n in old} == dict(back)


def test_a_g_that_does_not_fit_its_v_is_something_else() -> None:
    assert not versions.older_names({"x_g": (3,), "x_v": (4, 5)}).new_of


def test_buffers_that_newer_versions_compute_are_told_from_biases() -> None:
    shapes = {
        "h.0.attn.bias": (1, 1, 8, 8), "h.0.attn.masked_bias": (), "h.0.attn.c_attn.bias": (24,),
        "layers.0.attention.bias": (16,), "layers.0.rotary_emb.inv_freq": (8,), "embeddings.position_ids": (1, 16),
    }  # fmt: skip
    assert set(versions.obsolete_names(shapes)) == {
        "h.0.attn.bias", "h.0.attn.masked_bias", "layers.0.rotary_emb.inv_freq", "embeddings.position_ids",
    }


def test_modernised_renames_weights_and_moments_and_drops_buffers_on_request() -> None:
    one = tensor(4)
    checkpoint = Checkpoint(
        "torch", "x.pt", {"LayerNorm.gamma": one, "attn.masked_bias": tensor()},
        optimizer=Optimizer({"exp_avg": {"LayerNorm.gamma": one}}, ({"params": ["LayerNorm.gamma"]},)),
    )
    newer = versions.modernised(checkpoint, drop_obsolete=True)
    assert list(newer.weights) == ["LayerNorm.weight"]
    assert newer.optimizer is not None
    assert list(newer.optimizer.slots["exp_avg"]) == ["LayerNorm.weight"]
    assert newer.optimizer.groups[0]["params"] == ["LayerNorm.weight"]
    assert list(versions.modernised(checkpoint).weights) == ["LayerNorm.weight", "attn.masked_bias"]
    assert {f.code for f in versions.note(checkpoint.weights)} == {"older-spelling"}


@pytest.mark.parametrize("names", [("c.weight_g", "c.weight_v"), ("c.parametrizations.weight.original0",
                                                                   "c.parametrizations.weight.original1")])
def test_weight_norm_is_computed_on_request(names: tuple[str, str]) -> None:
    g, v = tensor(6, 1, 1), tensor(6, 3, 2)
    plain = versions.materialised(Checkpoint("torch", "x.pt", {names[0]: g, names[1]: v}))
    want = v.numpy() * (g.numpy() / np.sqrt((v.numpy() ** 2).sum((1, 2), keepdims=True)))
    assert list(plain.weights) == ["c.weight"]
    np.testing.assert_allclose(plain.weights["c.weight"].numpy(), want, rtol=1e-6)


def test_moments_of_a_weight_norm_are_never_made_up() -> None:
    g, v = tensor(6, 1), tensor(6, 3)
    moments = Optimizer({"exp_avg": {"c.weight_g": g, "c.weight_v": v}})
    with pytest.raises(Refused, match="moments"):
        versions.materialised(Checkpoint("torch", "x.pt", {"c.weight_g": g, "c.weight_v": v}, optimizer=moments))


@pytest.mark.frameworks
def test_torch_agrees_on_both_spellings_and_on_the_product() -> None:
    import torch

    from anyckpt.core.dtypes import DTYPES

    older = torch.nn.utils.weight_norm(torch.nn.Conv1d(3, 5, 2))
    newer = torch.nn.utils.parametrizations.weight_norm(torch.nn.Conv1d(3, 5, 2))
    state = {k: from_array(v.detach().numpy().copy(), DTYPES["float32"]) for k, v in older.state_dict().items()}
    renamed = versions.modernised(Checkpoint("torch", "x.pt", state))
    assert set(renamed.weights) == set(newer.state_dict())
    product = versions.materialised(Checkpoint("torch", "x.pt", state)).weights["weight"].numpy()
    torch.nn.utils.remove_weight_norm(older)
    np.testing.assert_allclose(product, older.weight.detach().numpy(), rtol=1e-6)


@pytest.mark.frameworks
def test_base_prefixes_are_those_of_transformers() -> None:
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES as MASKED

    known = {kind for kinds in versions.BASE_PREFIXES.values() for kind in kinds} | versions.OWN_NAME
    for kind in ("llama", "gpt2", "bert", "roberta", "gpt_neox", "mamba", "bloom", "distilbert", "camembert", "opt"):
        name = CAUSAL.get(kind) or MASKED[kind]
        assert kind in known
        assert versions.base_prefixes({"model_type": kind}) == [f"{getattr(transformers, name).base_model_prefix}."]
