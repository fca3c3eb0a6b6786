"""Megatron-core and transformers judge what was written: the same logits, and the next losses of the same optimizer."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import anyckpt
from anyckpt.core.checkpoint import Checkpoint, Optimizer
from anyckpt.core.tensor import from_array
from anyckpt.core.topology import Topology

pytestmark = pytest.mark.frameworks
JUDGE = Path(__file__).with_name("judge.py")
N_TOKENS = 96
SIZES = {
    "vocab_size": N_TOKENS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 0,
    "eos_token_id": 0,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "head_dim": 16}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2Config", {"vocab_size": N_TOKENS, "n_positions": 64, "n_embd": 32, "n_layer": 4, "n_head": 4}),
    "llama": ("LlamaConfig", SIZES),
    "llama3": ("LlamaConfig", {**SIZES, "tie_word_embeddings": True, "rope_parameters": LLAMA3}),
    "mistral": ("MistralConfig", {**SIZES, "sliding_window": None}),
    "qwen2": ("Qwen2Config", SIZES),
    "qwen3": ("Qwen3Config", {**SIZES, "head_dim": 16}),
    "mixtral": ("MixtralConfig", {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3moe": ("Qwen3MoeConfig", {
        **SIZES, **EXPERTS, "num_experts": 4, "moe_intermediate_size": 24, "norm_topk_prob": True,
    }),
}  # fmt: skip


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A random model of transformers by name, saved once; norms are not all ones."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    pytest.importorskip("megatron.core")
    root = tmp_path_factory.mktemp("hub")

    def make(name: str) -> Path:
        folder = root / name
        if not folder.exists():
            kind, options = MODELS[name]
            torch.manual_seed(3)
            model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**options)).float()
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.ndim == 1:
                        parameter.add_(0.1 * torch.randn_like(parameter))
            model.save_pretrained(folder)
        return folder

    return make


def tokens() -> list[list[int]]:
    return np.random.default_rng(5).integers(0, N_TOKENS, (2, 9)).tolist()


def megatron(folder: Path, form: str, layout: Topology, out: Path, **more: Any) -> dict[str, Any]:
    """What megatron-core makes of a checkpoint at a layout."""
    import torch

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    job = {
        "checkpoint": str(folder), "form": form, "tp": layout.tp, "pp": layout.pp, "ep": layout.ep, "etp": layout.etp,
        "dp": layout.dp, "tokens": tokens(), "out": str(out / "result.pt"), "port": port, **more,
    }  # fmt: skip
    (out / "job.json").write_text(json.dumps(job))
    done = subprocess.run(
        [sys.executable, str(JUDGE), str(out / "job.json")], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    result: dict[str, Any] = torch.load(out / "result.pt")
    return result


def transformers_logits(folder: Path) -> Any:
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        return model.eval()(torch.tensor(tokens())[:, :-1]).logits


LOADED = [
    ("gpt2", "torch", Topology(tp=2, pp=2, etp=2)),
    ("llama", "torch_dist", Topology(tp=2, pp=2, etp=2)),
    ("llama3", "torch", Topology(pp=2)),
    ("mistral", "torch_dist", Topology(tp=2, etp=2)),
    ("qwen2", "torch", Topology(tp=2, etp=2)),
    ("qwen3", "torch_dist", Topology(pp=2)),
    ("mixtral", "torch", Topology(tp=2, ep=2, etp=1, dp=2)),
    ("qwen3moe", "torch_dist", Topology(ep=2, dp=2)),
]


@pytest.mark.parametrize(("name", "form", "layout"), LOADED, ids=lambda x: str(x).replace(" ", ""))
def test_megatron_computes_what_transformers_does_and_the_way_back_loses_no_bit(
    name: str, form: str, layout: Topology, hub: Callable[[str], Path], tmp_path: Path
) -> None:
    source = hub(name)
    written = layout if form == "torch" else Topology()  # the other form loads at any layout
    to = "megatron" if form == "torch" else "megatron-dist"
    anyckpt.convert(source, tmp_path / "m", to=to, topology=written, extra={"transformer_impl": "local"})
    got = megatron(tmp_path / "m", form, layout, tmp_path)["logits"][..., :N_TOKENS]
    assert abs(got - transformers_logits(source)).max() < 1e-5
    anyckpt.convert(tmp_path / "m", tmp_path / "back", to="hf")
    one, other = anyckpt.open(source).weights, anyckpt.open(tmp_path / "back").weights
    assert one.keys() == other.keys() and all(one[n].tobytes() == other[n].tobytes() for n in one)


def test_transformers_loads_the_config_that_comes_back(hub: Callable[[str], Path], tmp_path: Path) -> None:
    for name in MODELS:
        anyckpt.convert(hub(name), tmp_path / name, to="megatron", topology=Topology())
        anyckpt.convert(tmp_path / name, tmp_path / f"{name}-back", to="hf")
        want, got = transformers_logits(hub(name)), transformers_logits(tmp_path / f"{name}-back")
        assert (want == got).all(), name


@pytest.mark.parametrize(
    ("form", "written", "layout"),
    [
        ("torch", Topology(tp=2, etp=2), Topology(tp=2, etp=2)),
        ("torch_dist", Topology(tp=4, pp=2, etp=4), Topology(tp=2, etp=2)),
        ("torch_dist", Topology(), Topology()),
    ],
)
def test_the_next_losses_are_those_of_the_same_optimizer(
    form: str, written: Topology, layout: Topology, hub: Callable[[str], Path], tmp_path: Path
) -> None:
    source = with_moments(anyckpt.open(hub("gpt2")))
    to = "megatron" if form == "torch" else "megatron-dist"
    extra = {"transformer_impl": "local", "make_vocab_size_divisible_by": N_TOKENS // written.tp}
    anyckpt.convert(source, tmp_path / "m", to=to, topology=written, extra=extra)
    got = megatron(tmp_path / "m", form, layout, tmp_path, steps=3)["losses"]
    assert np.abs(np.array(got) - np.array(torch_losses(hub("gpt2"), source))).max() < 2e-6


def with_moments(checkpoint: Checkpoint) -> Checkpoint:
    """As after five steps of AdamW without weight decay."""
    numbers = np.random.default_rng(11)
    slots: dict[str, dict[str, Any]] = {"exp_avg": {}, "exp_avg_sq": {}, "step": {}}
    for name, t in checkpoint.weights.items():
        if name not in checkpoint.aliases:
            slots["exp_avg"][name] = from_array((numbers.standard_normal(t.shape) * 1e-3).astype(np.float32))
            slots["exp_avg_sq"][name] = from_array((numbers.random(t.shape) * 1e-5 + 1e-6).astype(np.float32))
            slots["step"][name] = from_array(np.array(5, np.float32))
    options = {
        "lr": 1e-2, "weight_decay": 0.0, "betas": (0.9, 0.999), "eps": 1e-8, "amsgrad": False, "foreach": None,
        "maximize": False, "capturable": False, "differentiable": False, "fused": None, "decoupled_weight_decay": True,
    }  # fmt: skip
    return replace(checkpoint, optimizer=Optimizer(slots, ({**options, "params": list(slots["step"])},)), step=5)


def torch_losses(folder: Path, checkpoint: Checkpoint) -> list[float]:
    """Three steps of torch's own AdamW with that state."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    model.eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    assert checkpoint.optimizer is not None
    for name, parameter in model.named_parameters():
        optimizer.state[parameter] = {
            slot: torch.tensor(checkpoint.optimizer.slots[slot][name].numpy())
            for slot in ("step", "exp_avg", "exp_avg_sq")
        }
    batch = torch.tensor(tokens())
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        logits = model(batch[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.reshape(-1, N_TOKENS), batch[:, 1:].reshape(-1))
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses
