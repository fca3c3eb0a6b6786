"""A reference gives what a folder lacks: here, which parameters an optimizer's numbers mean."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import anyckpt
from anyckpt.errors import UsageError

ORDER = """
pos embed.weight blocks.0.ln1.weight blocks.0.ln1.bias blocks.0.qkv.weight blocks.0.qkv.bias blocks.0.proj.weight
blocks.0.proj.bias blocks.0.ln2.weight blocks.0.ln2.bias blocks.0.up.weight blocks.0.up.bias blocks.0.down.weight
blocks.0.down.bias norm.weight norm.bias
""".split()


def test_the_order_of_a_reference_names_an_optimizers_numbers(corpus: Path, tmp_path: Path) -> None:
    folder = corpus / "torch/accelerate_state/ckpt"
    alone = anyckpt.open(folder)
    assert alone.optimizer is not None
    assert "ambiguous" in {f.code for f in alone.findings}
    shapes = {name: list(alone.weights[name].shape) for name in ORDER}
    (tmp_path / "like.json").write_text(json.dumps(shapes))
    named = anyckpt.open(folder, like=tmp_path / "like.json")
    assert "ambiguous" not in {f.code for f in named.findings}
    truth = anyckpt.open(corpus / "torch/accelerate_state/truth_optim.safetensors").weights
    assert named.optimizer is not None
    assert "ambiguous" not in {f.code for f in named.findings}
    for slot, tensors in named.optimizer.slots.items():
        assert sorted(tensors) == sorted(ORDER)
        for name, tensor in tensors.items():
            assert tensor.tobytes() == truth[f"{name}/{slot}"].tobytes()


def test_a_reference_without_an_order_is_refused(corpus: Path) -> None:
    folder = corpus / "torch/accelerate_state"
    with pytest.raises(UsageError, match="order"):
        anyckpt.open(folder / "ckpt", like=folder / "truth.safetensors")
