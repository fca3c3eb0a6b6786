"""Which tensor gets which type: llama.cpp's own choice, for eleven sizes of model and every file type."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from anyckpt.core.ggml.types import BY_ID
from anyckpt.errors import UsageError
from anyckpt.formats.gguf.mixture import Model, fitting, more_bits, plan


def test_every_official_plan_is_ours(official: Path) -> None:
    models = json.loads((official / "mixture_plans" / "plans.json").read_text())["plans"]
    n = 0
    for name, model in models.items():
        sizes = model["config"]
        about = Model(sizes["arch"], sizes["L"], sizes["H"], sizes["KV"], sizes.get("E", 0))
        tensors = {}
        for tensor, shape in zip(model["tensors"], model["shapes"]):
            is_float = len(shape) < 2 or "ffn_gate_inp" in tensor or "position_embd" in tensor
            tensors[tensor] = (tuple(shape), "float32" if is_float else "float16")
        for file_type, want in model.items():
            if file_type in ("config", "tensors", "shapes"):
                continue
            base, _, importance = file_type.partition("@")
            n += 1
            if isinstance(want, str):  # the official tool's own refusal
                with pytest.raises(UsageError):
                    plan(tensors, base.lower(), about, has_importance=bool(importance))
                continue
            got = plan(tensors, base.lower(), about, has_importance=bool(importance))
            assert [*got.values()] == [BY_ID[i].name for i in want], (name, file_type)
    assert n > 400


def test_rows_that_are_no_whole_blocks_fall_back_as_llama_cpp_does() -> None:
    assert fitting("x.weight", (8, 96), "q4_k") == "q5_0"
    assert fitting("x.weight", (8, 96), "q6_k") == "q8_0"
    assert fitting("x.weight", (8, 90), "q4_k") == "float16"


def test_more_bits_go_to_the_ends_and_every_third_layer_between() -> None:
    assert [i for i in range(16) if more_bits(i, 16)] == [0, 1, 4, 7, 10, 13, 14, 15]
