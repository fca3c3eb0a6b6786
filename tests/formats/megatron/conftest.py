"""A small model of Megatron's in memory, and the files of the real one where they are at hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anyckpt.core.checkpoint import Checkpoint, Optimizer
from anyckpt.core.tensor import Tensor, from_array
from anyckpt.core.topology import Topology

CORPUS = Path(__file__).resolve().parents[4] / "shared" / "corpus" / "megatron"


@pytest.fixture(scope="session")
def real() -> Callable[[str], Path]:
    """The folder of a checkpoint that Megatron wrote; skips where the corpus is not there."""

    def find(case: str) -> Path:
        folder = CORPUS / case
        if not folder.is_dir():
            pytest.skip(f"needs {case} of the corpus of real checkpoints, which is not in the repository")
        return folder / json.loads((folder / "case.json").read_text())["path"]

    return find


@pytest.fixture(scope="session")
def model() -> Callable[..., Checkpoint]:
    """A llama-like checkpoint with its optimizer: `layers`, `experts`, `bf16` with masters, `flat` optimizer."""

    def make(
        *, layers: int = 4, experts: int = 0, bf16: bool = False, flat: bool = False, tied: bool = False
    ) -> Checkpoint:
        numbers = np.random.default_rng(7)

        def tensor(*shape: int) -> np.ndarray[Any, Any]:
            return numbers.standard_normal(shape).astype(np.float32)

        arrays: dict[str, np.ndarray[Any, Any]] = {"embedding.word_embeddings.weight": tensor(64, 16)}
        for layer in range(layers):
            lead = f"decoder.layers.{layer}."
            arrays[f"{lead}input_layernorm.weight"] = tensor(16)
            arrays[f"{lead}self_attention.linear_proj.weight"] = tensor(16, 16)
            arrays[f"{lead}self_attention.linear_qkv.weight"] = tensor(48, 16)
            arrays[f"{lead}self_attention.linear_qkv.bias"] = tensor(48)
            arrays[f"{lead}pre_mlp_layernorm.weight"] = tensor(16)
            if experts:
                arrays[f"{lead}mlp.router.weight"] = tensor(experts, 16)
            for module in [f"experts.local_experts.{e}." for e in range(experts)] or [""]:
                arrays[f"{lead}mlp.{module}linear_fc1.weight"] = tensor(64, 16)
                arrays[f"{lead}mlp.{module}linear_fc2.weight"] = tensor(16, 32)
        arrays["decoder.final_layernorm.weight"] = tensor(16)
        if not tied:
            arrays["output_layer.weight"] = tensor(64, 16)
        masters = {name: from_array(array) for name, array in arrays.items()}
        weights = {name: _half(t) if bf16 else t for name, t in masters.items()}
        slots: dict[str, dict[str, Tensor]] = {
            slot: {name: from_array(np.abs(tensor(*t.shape))) for name, t in masters.items()}
            for slot in ("exp_avg", "exp_avg_sq")
        }
        if bf16 or flat:
            slots["master"] = masters
        groups = [{"lr": 0.1, "wd_mult": w, "lr_mult": 1.0, "weight_decay": 0.1 * w, "is_expert_parallel": False,
                   "step": 3.0, "params": []} for w in (1.0, 0.0)]  # fmt: skip
        args = {
            "num_layers": layers, "hidden_size": 16, "num_attention_heads": 4, "num_query_groups": 4, "swiglu": True,
            "group_query_attention": True, "ffn_hidden_size": 32, "num_experts": experts or None,
            "normalization": "RMSNorm", "position_embedding_type": "rope", "add_qkv_bias": True, "kv_channels": 4,
            "add_bias_linear": False, "untie_embeddings_and_output_weights": not tied, "padded_vocab_size": 64,
            "make_vocab_size_divisible_by": 8, "vocab_size": 60, "transformer_impl": "local", "bf16": bf16,
            "use_distributed_optimizer": flat, "tensor_model_parallel_size": 1, "max_position_embeddings": 16,
            "layernorm_epsilon": 1e-5,
        }  # fmt: skip
        return Checkpoint(
            "megatron", "memory", weights, optimizer=Optimizer(slots, tuple(groups), "AdamW"), step=3,
            scheduler={"num_steps": 24}, config=args, topology=Topology(),
        )  # fmt: skip

    return make


def _half(tensor: Tensor) -> Tensor:
    import ml_dtypes

    return from_array(tensor.numpy().astype(ml_dtypes.bfloat16))


@pytest.fixture(scope="session")
def same() -> Callable[[Checkpoint, Checkpoint], None]:
    """Asserts that weights and every slot but the step are equal, bit for bit."""

    def compare(a: Checkpoint, b: Checkpoint) -> None:
        pairs: list[tuple[Any, Any]] = [(a.weights, b.weights)]
        assert a.optimizer is not None and b.optimizer is not None
        slots = (a.optimizer.slots.keys() | b.optimizer.slots.keys()) - {"step"}
        pairs += [(a.optimizer.slots.get(slot, {}), b.optimizer.slots.get(slot, {})) for slot in sorted(slots)]
        for one, other in pairs:
            assert one.keys() == other.keys()
            for name in one:
                assert (one[name].dtype, one[name].shape) == (other[name].dtype, other[name].shape), name
                assert one[name].tobytes() == other[name].tobytes(), name

    return compare
