"""Megatron's columns: every row both ways, every size, every configuration there and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anyckpt.core.tensor import Tensor, from_array
from anyckpt.errors import CheckpointError, UsageError
from anyckpt.formats.megatron.parts import partition_of
from anyckpt.names import settings as sizes
from anyckpt.names.arch import find
from anyckpt.names.arch.table import Architecture
from anyckpt.sharding.tp import join, split
from anyckpt.verbs.megatron import rules_for

TABLES = [a for a in find.architectures() if a.megatron]
STACKS = ("language_model.", "")


def weights_of(table: Architecture, heads: int, groups: int, size: int, ranks: int) -> dict[str, Tensor]:
    """A layer and the ends of a model under Hugging Face's names, in shapes that `ranks` divide."""
    hidden, ffn, experts = heads * size, 4 * ranks, 2
    rows = {"q_proj": heads * size, "k_proj": groups * size, "v_proj": groups * size, "o_proj": hidden}
    numbers = np.random.default_rng(0)
    out: dict[str, Tensor] = {}
    for rule in table.megatron:
        for pattern in rule.hf:
            for expert in range(experts) if "{expert}" in pattern else (0,):
                name = pattern.replace("{layer}", "0").replace("{expert}", str(expert))
                module, _, leaf = name.rpartition(".")
                module = module.rpartition(".")[2]
                out_rows = rows.get(module) or (ffn if module in ("gate_proj", "up_proj", "w1", "w3") else hidden)
                columns = ffn if module in ("down_proj", "w2") else hidden
                shape: tuple[int, ...] = (out_rows, columns) if leaf == "weight" else (out_rows,)
                if module in ("embed_tokens", "lm_head", "wte"):
                    shape = (8 * ranks, hidden)
                elif "norm" in module or module.startswith("ln_"):
                    shape = (hidden,)
                elif table.name == "gpt2":
                    wide = {"c_attn": (hidden, 3 * hidden), "c_fc": (hidden, ffn), "wpe": (16, hidden)}
                    inner = (ffn, hidden) if "mlp.c_proj" in name else (hidden, hidden)
                    shape = wide.get(module, inner)
                    shape = shape if leaf == "weight" else shape[1:]
                out[name] = from_array(numbers.integers(0, 1000, shape).astype(np.int32))
    return out


@pytest.mark.parametrize("table", TABLES, ids=lambda t: t.name)
@given(groups=st.integers(1, 3), repeats=st.integers(1, 3), size=st.sampled_from([2, 4]), ranks=st.integers(1, 3))
@settings(max_examples=12, deadline=None)
def test_every_row_gives_every_bit_back_at_every_size(
    table: Architecture, groups: int, repeats: int, size: int, ranks: int
) -> None:
    groups = groups * ranks
    heads = groups if table.name == "gpt2" else groups * repeats
    config = {"num_attention_heads": heads, "num_key_value_heads": groups}
    weights = weights_of(table, heads, groups, size, ranks)
    theirs = find.forward(weights, table, table.megatron, config).tensors
    for name, tensor in theirs.items():
        partition = partition_of(name, theirs)
        assert partition is not None, name
        if tensor.ndim > 1 or partition not in ("row", "expert_row"):
            theirs[name] = join(split(tensor, partition, ranks), partition)
    back = find.inverse(theirs, table.megatron, config).tensors
    assert back.keys() == weights.keys()
    assert all(np.array_equal(back[name].numpy(), t.numpy()) for name, t in weights.items())


@pytest.mark.parametrize("table", TABLES, ids=lambda t: t.name)
def test_the_tables_partition_is_the_formats_own(table: Architecture) -> None:
    weights = weights_of(table, 4, 4, 4, 1)
    theirs = find.forward(weights, table, table.megatron, {"num_attention_heads": 4}).tensors
    rules = {rule.name: rule for rule in table.megatron}
    for name in theirs:
        rule = rules[find.template_of(name)[0]]
        assert rule.partition == partition_of(name, theirs), name


@pytest.mark.parametrize("table", TABLES, ids=lambda t: t.name)
def test_a_config_survives_the_way_through_arguments(table: Architecture) -> None:
    config: dict[str, Any] = {s.hf: (s.default or 8 * (i + 2)) for i, s in enumerate(table.settings)}
    config |= {"model_type": table.model_types[0], "num_attention_heads": 16, "n_head": 16, "head_dim": 24}
    config |= {"num_key_value_heads": 16 if table.name == "gpt2" else 4, "rope_theta": 1e6, "tie_word_embeddings": True}
    args, lost = sizes.megatron_arguments(config, table)
    assert not lost and sizes.of_arguments(args, TABLES) is table
    back = sizes.hf_config(args, table, n_tokens=77, dtype="float32")
    for setting in table.settings:
        assert back[setting.hf] == config[setting.hf], setting.hf
    assert back["tie_word_embeddings"] and back["vocab_size"] == 77
    if table.name != "gpt2":
        assert (back["num_key_value_heads"], back["head_dim"], back["rope_theta"]) == (4, 24, 1e6)


def test_numbers_and_moments_go_by_their_own_rules() -> None:
    table = find.named("qwen2")
    step = from_array(np.array(7.0, np.float32))
    names = {"decoder.layers.0.self_attention.linear_qkv.weight": step}
    found = find.inverse(names, rules_for(table, "step"), {"num_attention_heads": 4}).tensors
    assert [n.rpartition("self_attn.")[2] for n in found] == ["q_proj.weight", "k_proj.weight", "v_proj.weight"]
    assert all(t is step for t in found.values())


def test_a_name_without_a_rule_is_refused_with_the_nearest() -> None:
    table = find.named("llama")
    stray = {"decoder.layers.0.mlp.linear_fc9.weight": from_array(np.zeros((2, 2), np.float32))}
    with pytest.raises(CheckpointError, match="linear_fc"):
        find.inverse(stray, table.megatron, {"num_attention_heads": 1})


def test_options_of_no_known_model_say_what_differs() -> None:
    with pytest.raises(UsageError, match="multi_latent_attention"):
        sizes.of_arguments({**sizes.GATED, "multi_latent_attention": True, "num_attention_heads": 4}, TABLES)


def test_nemo_spells_the_same_options_its_own_way() -> None:
    args = sizes.plain_arguments({
        "activation": "fast-swiglu", "normalization": "rmsnorm", "bias": False, "num_moe_experts": 8,
        "share_embeddings_and_output_weights": False, "position_embedding_type": "rope", "num_attention_heads": 4,
    })  # fmt: skip
    assert sizes.of_arguments(args, TABLES).name == "mixtral"
    assert args["untie_embeddings_and_output_weights"] and args["add_bias_linear"] is False
