"""Every architecture's GGUF column gives back the tensors it was given, whatever their sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anyckpt.core.tensor import Tensor, from_array
from anyckpt.errors import CheckpointError
from anyckpt.names.arch import find
from anyckpt.names.arch.table import Architecture, Rule


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    """Sizes of a small model."""
    groups, queries, half = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    return {
        "num_attention_heads": groups * queries, "num_key_value_heads": groups, "head_dim": 2 * half,
        "num_hidden_layers": draw(st.integers(1, 3)), "n_experts": draw(st.integers(1, 3)),
        "hidden_size": draw(st.integers(1, 5)) * 2,
        "qk_nope_head_dim": draw(st.integers(1, 3)), "v_head_dim": draw(st.integers(1, 3)),
    }  # fmt: skip


def _shape(pattern: str, rule: Rule, c: dict[str, Any]) -> tuple[int, ...]:
    heads, groups, size, width = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"], c["hidden_size"]
    rows = {"rotary order of queries": heads * size, "rotary order of keys": groups * size}.get(rule.op.name, 2 * width)
    if rule.parting is not None and rule.parting.name == "MLA's keys and values":
        rows = heads * (c["qk_nope_head_dim"] + c["v_head_dim"])
    if pattern.endswith(("bias", "norm.weight")) and rule.op.name not in ("rotary order of queries", "transpose"):
        return (rows,)
    if pattern.endswith(("gate_up_proj", "experts.down_proj")):
        return (c["n_experts"], rows, width)
    return (rows, width)


def _model(architecture: Architecture, c: dict[str, Any]) -> dict[str, Tensor]:
    rng = np.random.default_rng(0)
    taken: set[str] = set()
    out: dict[str, Tensor] = {}
    for rule in architecture.gguf:
        if rule.name in taken:
            continue  # another way to save the same
        taken.update((rule.name, *rule.also))
        for pattern in rule.hf:
            for layer in range(c["num_hidden_layers"]) if "{layer}" in pattern else (0,):
                for expert in range(c["n_experts"]) if "{expert}" in pattern else (0,):
                    name = pattern.replace("{layer}", str(layer)).replace("{expert}", str(expert))
                    values = rng.integers(-64, 64, _shape(pattern, rule, c)).astype(np.float32)
                    out[name] = from_array(values)
    return out


@pytest.mark.parametrize("name", find.MODULES)
@given(config=configs())
@settings(max_examples=12, deadline=None)
def test_there_and_back_gives_every_bit(name: str, config: dict[str, Any]) -> None:
    architecture = find.named(name)
    model = _model(architecture, config)
    there = find.forward(model, architecture, architecture.gguf, config)
    assert there.ignored == ()
    back = find.inverse(there.tensors, architecture.gguf, config).tensors
    assert set(back) == set(model)
    for tensor, values in model.items():
        assert back[tensor].tobytes() == values.tobytes(), tensor


def test_a_tensor_that_no_rule_knows_is_an_error_that_names_the_nearest() -> None:
    llama = find.named("llama")
    odd = {"model.layers.0.self_attn.q_prj.weight": from_array(np.zeros((2, 2), np.float32))}
    with pytest.raises(CheckpointError, match=r"q_prj.weight; the nearest is model.layers.\{layer\}.self_attn.q_proj"):
        find.forward(odd, llama, llama.gguf, {"num_attention_heads": 1})


def test_an_expert_that_is_missing_is_an_error() -> None:
    mixtral = find.named("mixtral")
    model = _model(mixtral, {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 2, "num_hidden_layers": 1,
                             "n_experts": 3, "hidden_size": 4})  # fmt: skip
    gone = next(n for n in model if "experts.1." in n)
    del model[gone]
    with pytest.raises(CheckpointError, match="is missing"):
        find.forward(model, mixtral, mixtral.gguf, {"num_attention_heads": 2, "num_key_value_heads": 1})
