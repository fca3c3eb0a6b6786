"""llama.cpp, gguf-py and transformers judge what we write: they load it, and answer as with their own files."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import anyckpt
from anyckpt.core.ggml import native

pytestmark = pytest.mark.frameworks

Case = Callable[[str], dict[str, Any]]
DECODERS = "llama llama3 mistral mixtral qwen2 qwen3 qwen3moe gemma2 gemma3 phi3 gpt2".split()
QUANTS = (
    "f32 f16 bf16 q8_0 q4_0 q4_1 q5_0 q5_1 q2_k q3_k_s q3_k_m q3_k_l q4_k_s q4_k_m q5_k_s q5_k_m q6_k iq4_nl iq4_xs "
    "iq3_s iq3_m tq1_0 tq2_0 mxfp4"
).split()
PROMPT = [1, 5, 9, 22, 40, 7]
TEXTS = (
    "the quick brown fox", "Größe 東京 42", "def f(x):\n    return x + 1\n\n  Yellow 1234567", "", " ", "<s>x</s>",
    "e\u0301",
)  # fmt: skip


def _complete(path: Path, n: int, **more: Any) -> dict[str, Any]:
    """llama.cpp's answer to PROMPT, greedily."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx, params.n_parallel, params.n_gpu_layers, params.warmup = 256, 1, 0, False
    params.cpuparams.n_threads = 1
    server = xllamacpp.Server(params)
    asked = {"prompt": PROMPT, "n_predict": n, "temperature": 0, "top_k": 1, "ignore_eos": True, "cache_prompt": False}
    answer = server.handle_completions({**asked, **more})
    assert isinstance(answer, dict), answer
    return answer


def _text(path: Path) -> str:
    return str(_complete(path, 32)["choices"][0]["text"])


@pytest.mark.parametrize("quant", QUANTS)
def test_llama_cpp_runs_every_type_that_is_written(quant: str, official: Path, tmp_path: Path) -> None:
    anyckpt.convert(official / "quant_llama" / "source.f16.gguf", tmp_path / "q.gguf", quant=quant)
    text = _text(tmp_path / "q.gguf")
    assert text
    if quant == "q4_k_m":
        assert text == _text(official / "quant_llama" / "Q4_K_M.gguf")
    if quant in ("f32", "f16"):
        assert text == _text(official / "quant_llama" / "source.f16.gguf")


@pytest.mark.parametrize("name", DECODERS)
def test_llama_cpp_says_the_same_of_our_file_as_of_its_own(
    name: str, official: Path, case: Case, tmp_path: Path
) -> None:
    """From the folder, through Hugging Face and back again, in a set of files."""
    pre = case(name)["extra"].get("pre")
    want = _text(official / name / "model.gguf")
    anyckpt.convert(official / name / "hf", tmp_path / "m.gguf", pre=pre)
    anyckpt.convert(tmp_path / "m.gguf", tmp_path / "hf", to="hf")
    anyckpt.convert(tmp_path / "hf", tmp_path / "set", to="gguf-folder", pre=pre, split_max_size=20_000)
    first = min((tmp_path / "set").iterdir())
    assert [_text(tmp_path / "m.gguf"), _text(first)] == [want, want]


@pytest.mark.parametrize("name", ["ggml_f16.bin", "ggmf_v1_f16.bin", "ggjt_v1_f16.bin", "ggjt_v3_q4_0.bin"])
def test_llama_cpp_runs_upgraded_files_of_2023(name: str, official: Path, tmp_path: Path) -> None:
    anyckpt.convert(official / "legacy" / name, tmp_path / "m.gguf", to="gguf")
    anyckpt.convert(official / "legacy" / "gguf_v2_f16.gguf", tmp_path / "v3.gguf", to="gguf")
    text = _text(tmp_path / "m.gguf")
    assert text
    if "f16" in name:
        assert text == _text(tmp_path / "v3.gguf")


@pytest.mark.parametrize("name", [n for n in DECODERS if n not in ("gemma2", "gemma3")])
def test_transformers_loads_what_comes_back_and_computes_the_same(
    name: str, official: Path, case: Case, tmp_path: Path
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    extra = case(name)["extra"]
    anyckpt.convert(official / name / "hf", tmp_path / "m.gguf", quant="f32", pre=extra.get("pre"))
    anyckpt.convert(tmp_path / "m.gguf", tmp_path / "hf", to="hf")
    logits = []
    for folder in (official / name / "hf", tmp_path / "hf"):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        with torch.no_grad():
            logits.append(model(torch.tensor([PROMPT])).logits)
    assert torch.allclose(logits[0], logits[1], atol=1e-5, rtol=0), (logits[0] - logits[1]).abs().max()


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_transformers_computes_nearly_the_same_where_norms_were_kept_plus_one(
    name: str, official: Path, case: Case, tmp_path: Path
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    anyckpt.convert(
        official / name / "hf", tmp_path / "m.gguf", quant="f32", pre=case(name)["extra"].get("pre")
    )
    anyckpt.convert(tmp_path / "m.gguf", tmp_path / "hf", to="hf")
    logits = []
    for folder in (official / name / "hf", tmp_path / "hf"):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        with torch.no_grad():
            logits.append(model(torch.tensor([PROMPT])).logits)
    assert torch.allclose(logits[0], logits[1], atol=1e-4, rtol=0), (logits[0] - logits[1]).abs().max()


@pytest.mark.parametrize("name", DECODERS)
def test_the_tokenizer_that_comes_back_gives_the_same_ids(name: str, official: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    anyckpt.convert(official / name / "model.gguf", tmp_path / "hf", to="hf")
    theirs = AutoTokenizer.from_pretrained(official / name / "hf")
    ours = AutoTokenizer.from_pretrained(tmp_path / "hf")
    # transformers' class for Llama puts a space before the first word only, that for Mistral before all
    for text in TEXTS if name != "mistral" else TEXTS[:4]:
        assert ours(text)["input_ids"] == theirs(text)["input_ids"], text
    assert ours.eos_token == theirs.eos_token
    if theirs.chat_template:
        assert ours.chat_template == theirs.chat_template


def test_llama_cpp_and_transformers_agree_on_a_model_that_we_wrote(official: Path, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    anyckpt.convert(official / "llama" / "hf", tmp_path / "m.gguf", quant="f32")
    answer = _complete(tmp_path / "m.gguf", 1, logprobs=5)
    model = AutoModelForCausalLM.from_pretrained(official / "llama" / "hf", dtype=torch.float32).eval()
    with torch.no_grad():
        want = model(torch.tensor([PROMPT])).logits[0, -1].log_softmax(-1)
    top = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    assert len(top) == 5
    for row in top:
        assert math.isclose(row["logprob"], want[row["id"]].item(), abs_tol=0.005), row


@pytest.mark.parametrize("quant", ["f32", "q4_k_m", "q5_k_s", "iq4_xs", "tq1_0", "mxfp4"])
def test_gguf_py_reads_the_same_values(quant: str, official: Path, tmp_path: Path) -> None:
    from gguf import GGUFReader
    from gguf.quants import dequantize

    anyckpt.convert(official / "quant_llama" / "hf", tmp_path / "q.gguf", quant=quant)
    theirs, ours = GGUFReader(tmp_path / "q.gguf"), anyckpt.open(tmp_path / "q.gguf")
    assert [t.name for t in theirs.tensors] == list(ours.weights)
    for tensor in theirs.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        want = ours.weights[tensor.name].numpy().astype(np.float32)
        assert np.array_equal(values.astype(np.float32), want), tensor.name
    keys = {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
    for key, value in ours.facts["gguf"].items():
        got = value.tolist() if isinstance(value, np.ndarray) else value
        assert keys[key] == got, key


@pytest.mark.skipif(native.library() is None, reason="the extra `gguf` is not installed")
def test_llama_cpp_runs_what_an_importance_matrix_helped_to_write(official: Path, tmp_path: Path) -> None:
    source = official / "quant_llama" / "source.f16.gguf"
    weights = {n: np.ones(t.shape[-1], "<f4") for n, t in anyckpt.open(source).weights.items() if t.ndim == 2}
    out = len(weights).to_bytes(4, "little")
    for n, w in weights.items():
        out += len(n).to_bytes(4, "little") + n.encode() + (1).to_bytes(4, "little") + len(w).to_bytes(4, "little")
        out += w.tobytes()
    (tmp_path / "i.dat").write_bytes(out)
    anyckpt.convert(source, tmp_path / "q.gguf", quant="iq3_xxs", imatrix=tmp_path / "i.dat")
    assert _text(tmp_path / "q.gguf")
