"""GGUF back to Hugging Face, and there again: nothing is changed on the way."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import anyckpt
from anyckpt.errors import Refused, UsageError

Case = Callable[[str], dict[str, Any]]
MODELS = ("llama", "llama3", "mistral", "mixtral", "qwen2", "qwen3", "qwen3moe", "gemma2", "gemma3", "phi3", "gpt2")
EXACT = tuple(m for m in MODELS if not m.startswith("gemma"))
"""Gemma's norms are kept plus one, in which the last bits of small values are lost by the converter itself."""


@pytest.mark.parametrize("name", MODELS)
def test_values_names_and_ties_come_back(name: str, official: Path, tmp_path: Path) -> None:
    anyckpt.convert(official / name / "model.gguf", tmp_path / "hf", to="hf")
    got, want = anyckpt.open(tmp_path / "hf").weights, anyckpt.open(official / name / "hf").weights
    ties = {"lm_head.weight"}
    assert set(got) - ties == set(want) - ties
    for tensor in got:
        if tensor not in want:
            continue
        a, b = got[tensor].numpy().astype(np.float32), want[tensor].numpy().astype(np.float32)
        narrowed = b.astype(np.float16).astype(np.float32) if got[tensor].dtype.name == "float16" else b
        assert np.allclose(a, narrowed, rtol=0, atol=0 if name in EXACT else 6e-8), tensor


@pytest.mark.parametrize("name", MODELS)
def test_the_config_says_the_same_sizes(name: str, official: Path, tmp_path: Path) -> None:
    anyckpt.convert(official / name / "model.gguf", tmp_path / "hf", to="hf")
    got = json.loads((tmp_path / "hf" / "config.json").read_text())
    want = json.loads((official / name / "hf" / "config.json").read_text())
    is_llama = name == "mistral"  # GGUF calls both llama; without a window they compute the same
    assert got["architectures"] == (["LlamaForCausalLM"] if is_llama else want["architectures"])
    keys = (
        "hidden_size n_embd num_hidden_layers n_layer num_attention_heads n_head num_key_value_heads "
        "head_dim intermediate_size vocab_size rms_norm_eps layer_norm_epsilon max_position_embeddings sliding_window "
        "num_experts num_local_experts num_experts_per_tok"
    ).split()
    for key in keys:
        if want.get(key) is not None and key in got:
            same = got[key] == want[key]
            assert same or got[key] == pytest.approx(want[key], rel=1e-6), key


@pytest.mark.parametrize("name", EXACT)
def test_there_and_back_and_there_changes_no_tensor_and_no_token(
    name: str, official: Path, case: Case, tmp_path: Path
) -> None:
    extra = case(name)["extra"]
    anyckpt.convert(official / name / "model.gguf", tmp_path / "hf", to="hf")
    anyckpt.convert(
        tmp_path / "hf", tmp_path / "again.gguf", model_name=extra["model_name_argument"], pre=extra.get("pre")
    )
    one, two = anyckpt.open(official / name / "model.gguf"), anyckpt.open(tmp_path / "again.gguf")
    assert set(one.weights) == set(two.weights)
    for tensor in one.weights:
        assert one.weights[tensor].tobytes() == two.weights[tensor].tobytes(), tensor
    before, after = one.facts["gguf"], two.facts["gguf"]
    assert set(before) <= set(after), set(before) - set(after)
    changed = [key for key in before if before.fields[key].encoded() != after.fields[key].encoded()]
    assert changed == []


def test_an_adapter_comes_back_with_the_heads_of_its_base(official: Path, tmp_path: Path) -> None:
    source = official / "lora_llama" / "adapter.gguf"
    with pytest.raises(UsageError, match="number of heads"):
        anyckpt.convert(source, tmp_path / "p", to="hf")
    for base in (official / "llama" / "hf", official / "llama" / "model.gguf"):
        anyckpt.convert(source, tmp_path / "p", to="hf", base=base, force=True)
        got = anyckpt.open(tmp_path / "p").weights
        want = anyckpt.open(official / "lora_llama" / "peft").weights
        assert set(got) == set(want)
        for name, tensor in want.items():
            assert np.array_equal(got[name].numpy(), tensor.numpy().astype(np.float16)), name
    settings = json.loads((tmp_path / "p" / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"]) == (4, 8)
    assert set(settings["target_modules"]) == {"q_proj", "v_proj", "down_proj"}


def test_the_scale_of_rslora_is_kept_and_one_by_module_refused(official: Path, tmp_path: Path) -> None:
    peft = Path(shutil.copytree(official / "lora_llama" / "peft", tmp_path / "peft"))
    settings = json.loads((peft / "adapter_config.json").read_text())
    (peft / "adapter_config.json").write_text(json.dumps({**settings, "use_rslora": True}))
    anyckpt.convert(peft, tmp_path / "a.gguf", base=official / "llama" / "hf")
    assert anyckpt.open(tmp_path / "a.gguf").facts["gguf"]["adapter.lora.alpha"] == 16  # 16 / 4 = 8 / sqrt(4)
    (peft / "adapter_config.json").write_text(json.dumps({**settings, "alpha_pattern": {"q_proj": 2}}))
    with pytest.raises(UsageError, match="scales its modules differently"):
        anyckpt.convert(peft, tmp_path / "b.gguf", base=official / "llama" / "hf")


@pytest.mark.parametrize("quant", ["q4_k_m", "q8_0", "f16"])
def test_blocks_become_the_values_they_stand_for(quant: str, official: Path, tmp_path: Path) -> None:
    anyckpt.convert(official / "quant_llama" / "source.f16.gguf", tmp_path / "q.gguf", quant=quant)
    anyckpt.convert(tmp_path / "q.gguf", tmp_path / "hf", to="hf")
    stored, got = anyckpt.open(tmp_path / "q.gguf").weights, anyckpt.open(tmp_path / "hf").weights
    assert np.array_equal(
        got["model.layers.0.mlp.down_proj.weight"].numpy(), stored["blk.0.ffn_down.weight"].numpy()
    )
    assert np.array_equal(got["model.embed_tokens.weight"].numpy(), stored["token_embd.weight"].numpy())


def test_what_is_quantized_is_not_quantized_again_unasked(official: Path, tmp_path: Path) -> None:
    source = official / "quant_llama" / "Q4_K_M.gguf"
    with pytest.raises(Refused, match="lose once more"):
        anyckpt.convert(source, tmp_path / "q.gguf", quant="q8_0")
    assert not (tmp_path / "q.gguf").exists()
    anyckpt.convert(source, tmp_path / "q.gguf", quant="q8_0", allow_lossy=True)
    assert anyckpt.open(tmp_path / "q.gguf").weights["blk.0.ffn_up.weight"].dtype.name == "q8_0"
    anyckpt.convert(source, tmp_path / "f.gguf", quant="f32")
    got, want = anyckpt.open(tmp_path / "f.gguf").weights, anyckpt.open(source).weights
    assert all(np.array_equal(got[n].numpy(), want[n].numpy()) for n in want)


def test_types_may_be_chosen_by_name(official: Path, tmp_path: Path) -> None:
    source = official / "quant_llama" / "source.f16.gguf"
    anyckpt.convert(source, tmp_path / "q.gguf", quant="q4_k_m", tensor_type=["attn_v=q8_0", "ffn_down=f16"])
    found = anyckpt.open(tmp_path / "q.gguf").weights
    assert found["blk.0.attn_v.weight"].dtype.name == "q8_0"
    assert found["blk.0.ffn_down.weight"].dtype.name == "float16"
    assert found["blk.0.ffn_up.weight"].dtype.name == "q4_k"
    with pytest.raises(UsageError):
        anyckpt.convert(source, tmp_path / "r.gguf", quant="q4_k_m", tensor_type=["attn_v=q9_9"])


def test_a_pre_tokenizer_that_nobody_knows_is_asked_for(official: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(official / "qwen2" / "hf", tmp_path / "hf"))
    text = (source / "tokenizer.json").read_text()
    assert "'ll" in text
    (source / "tokenizer.json").write_text(text.replace("'ll", "'lll"))
    with pytest.raises(UsageError, match="tokenizer") as error:
        anyckpt.convert(source, tmp_path / "m.gguf")
    assert "--pre" in str(error.value.hint)
    assert not (tmp_path / "m.gguf").exists()
    anyckpt.convert(source, tmp_path / "m.gguf", pre="qwen2")
    assert anyckpt.open(tmp_path / "m.gguf").facts["gguf"]["tokenizer.ggml.pre"] == "qwen2"
