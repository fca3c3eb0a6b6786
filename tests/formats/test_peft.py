"""PEFT adapters: read without their base, and merged into it as peft itself merges them."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anyckpt.errors import UsageError
from anyckpt.formats import hf, peft
from anyckpt.formats.table import WriteOptions


def changed(checkpoint: Any, **config: Any) -> Any:
    return replace(checkpoint, config={**checkpoint.config, **config})


def test_adapter_is_read_without_its_base(data: Path, tmp_path: Path, codes: Any, read: Any) -> None:
    shutil.copytree(data / "adapter", tmp_path / "adapter")
    checkpoint, report = read(tmp_path / "adapter")
    assert checkpoint.format == "peft"
    assert checkpoint.config["peft_type"] == "LORA"
    assert checkpoint.facts["base"] == "../sharded"
    assert all(name.startswith("base_model.model.") for name in checkpoint.weights)
    assert not codes(tmp_path / "adapter")
    assert report.verdict == "safe"


def test_merged_weights_are_those_of_the_live_model(data: Path, read: Any) -> None:
    base, adapter = read(data / "sharded")[0], read(data / "adapter")[0]
    merged = peft.merged(base, adapter)
    truth, _ = read(data / "truth_merged.safetensors")
    assert set(merged.weights) == set(base.weights)
    for name, tensor in merged.weights.items():
        if name in truth.weights:
            assert np.allclose(tensor.numpy(), truth.weights[name].numpy(), rtol=0, atol=1e-6)
        else:
            assert tensor is base.weights[name]
    assert dict(merged.aliases) == dict(base.aliases)


def test_modules_saved_whole_replace_the_bases_and_untie(corpus: Path, data: Path, read: Any) -> None:
    base, adapter = read(corpus / "torch/peft_lora/base")[0], read(corpus / "torch/peft_lora/adapter")[0]
    truth = read(corpus / "torch/peft_lora/truth.safetensors")[0].weights
    merged = peft.merged(base, adapter)
    for name, tensor in merged.weights.items():
        assert np.allclose(tensor.numpy(), truth[f"merged/{name}"].numpy(), rtol=0, atol=1e-6), name
    tied = read(data / "sharded")[0]
    head = {"base_model.model.lm_head.weight": tied.weights["model.norm.weight"]}
    untied = peft.merged(tied, adapter.with_weights(head))
    assert not untied.aliases
    assert untied.config is not None
    assert untied.config["tie_word_embeddings"] is False
    written = {layout.name: layout for layout in hf.write(untied, WriteOptions())}
    assert json.loads(written["config.json"].parts[0].content)["tie_word_embeddings"] is False


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "IA3"}, "IA3"),
        ({"r": 8}, "rank 2"),
        ({"use_dora": True}, "DoRA"),
        ({"init_lora_weights": "pissa_niter_4"}, "pissa"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"alpha_pattern": {"(a*)*b": 3}}, "pattern"),
        ({"alpha_pattern": {".*.*.*.*x": 3}}, "pattern"),
    ],
)
def test_what_merging_would_get_wrong_is_refused(config: dict[str, Any], message: str, data: Path, read: Any) -> None:
    base, adapter = read(data / "sharded")[0], read(data / "adapter")[0]
    with pytest.raises(UsageError, match=message):
        peft.merged(base, changed(adapter, **config))


def test_an_adapter_of_another_model_is_refused(data: Path, read: Any) -> None:
    base, adapter = read(data / "sharded")[0], read(data / "adapter")[0]
    other = base.with_weights({n: t for n, t in base.weights.items() if "layers.1" not in n})
    with pytest.raises(UsageError, match="does not have"):
        peft.merged(other, adapter)
    with pytest.raises(UsageError, match="no PEFT adapter"):
        peft.merged(base, base)


def test_patterns_override_rank_and_alpha_for_the_modules_they_match(data: Path, read: Any) -> None:
    adapter = changed(read(data / "adapter")[0], alpha_pattern={r"layers\.1\..*q_proj": 16}, use_rslora=True)
    factors, _ = peft._parts(adapter.weights)
    scales = {name: peft.scaling(adapter.config, name, found) for name, found in factors.items()}
    assert scales["model.layers.0.self_attn.q_proj"] == pytest.approx(4 / 2**0.5)
    assert scales["model.layers.1.self_attn.q_proj"] == pytest.approx(16 / 2**0.5)


VARIANTS = {
    "plain": {"target_modules": ["q_proj", "down_proj"], "r": 3, "lora_alpha": 5},
    "rslora": {"target_modules": ["q_proj"], "r": 4, "lora_alpha": 8, "use_rslora": True},
    "dora": {"target_modules": ["q_proj", "up_proj"], "r": 3, "lora_alpha": 6, "use_dora": True},
    "patterns": {
        "target_modules": ["q_proj", "v_proj"], "r": 2, "lora_alpha": 4, "rank_pattern": {"q_proj": 5},
        "alpha_pattern": {r"layers\.1\.self_attn\.v_proj": 9},
    },
    "embedding": {"target_modules": ["embed_tokens", "k_proj"], "r": 2, "lora_alpha": 4},
    "saved": {"target_modules": ["o_proj"], "r": 2, "lora_alpha": 4, "modules_to_save": ["norm"]},
    "conv1d": {"target_modules": ["c_attn", "c_proj"], "r": 2, "lora_alpha": 4, "fan_in_fan_out": True},
    "bias": {"target_modules": ["c_attn"], "r": 2, "lora_alpha": 4, "fan_in_fan_out": True, "bias": "all"},
    "lora_bias": {"target_modules": ["c_fc"], "r": 2, "lora_alpha": 4, "fan_in_fan_out": True, "lora_bias": True},
}  # fmt: skip


@pytest.mark.frameworks
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("variant", VARIANTS)
def test_merging_equals_what_peft_merges(variant: str, tmp_path: Path, read: Any) -> None:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    if any(module.startswith("c_") for module in VARIANTS[variant]["target_modules"]):
        base = GPT2LMHeadModel(GPT2Config(vocab_size=31, n_embd=16, n_layer=2, n_head=2, n_positions=8))
    else:
        base = LlamaForCausalLM(LlamaConfig(
            vocab_size=31, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, tie_word_embeddings=False,
        ))  # fmt: skip
    base.save_pretrained(tmp_path / "base")
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **VARIANTS[variant]))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(tmp_path / "adapter")
    wanted = model.merge_and_unload().state_dict()
    merged = peft.merged(read(tmp_path / "base")[0], read(tmp_path / "adapter")[0])
    assert set(merged.weights) == set(wanted)
    for name, tensor in wanted.items():
        assert np.allclose(merged.weights[name].numpy(), tensor.numpy(), rtol=1e-5, atol=2e-6), name


@pytest.mark.frameworks
@pytest.mark.filterwarnings("ignore")
def test_convolutions_are_merged_as_peft_merges_them(tmp_path: Path, read: Any) -> None:
    import torch
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import save_file

    torch.manual_seed(6)
    base = torch.nn.Sequential(torch.nn.Conv2d(3, 6, 3), torch.nn.Conv2d(6, 4, 1))
    save_file({name: t.clone() for name, t in base.state_dict().items()}, tmp_path / "base.safetensors")
    model = get_peft_model(base, LoraConfig(target_modules=["0", "1"], r=2, lora_alpha=4))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(tmp_path / "adapter")
    wanted = model.merge_and_unload().state_dict()
    merged = peft.merged(read(tmp_path / "base.safetensors")[0], read(tmp_path / "adapter")[0])
    for name, tensor in wanted.items():
        assert np.allclose(merged.weights[name].numpy(), tensor.numpy(), rtol=1e-5, atol=2e-6), name
