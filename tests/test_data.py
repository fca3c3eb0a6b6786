"""The files of tests/data are what their README says, by the judgement of the frameworks that made them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.frameworks


def test_the_checkpoint_equals_its_truth(data: Path) -> None:
    import torch
    from safetensors.torch import load_file

    saved = torch.load(data / "trainer" / "checkpoint.pt", weights_only=False)
    truth = load_file(data / "truth.safetensors")
    assert set(saved["model"]) == set(truth)
    assert all(torch.equal(saved["model"][name], truth[name]) for name in truth)
    assert saved["global_step"] == json.loads((data / "truth.json").read_text())["step"]
    legacy = torch.load(data / "legacy.pth")
    assert all(torch.equal(legacy[name], truth[name]) for name in truth)


def test_a_resumed_run_repeats_the_next_losses(data: Path) -> None:
    import torch
    from transformers import AutoConfig, LlamaForCausalLM

    truth = json.loads((data / "truth.json").read_text())
    saved = torch.load(data / "trainer" / "checkpoint.pt", weights_only=False)
    model = LlamaForCausalLM(AutoConfig.from_pretrained(data / "trainer"))
    model.load_state_dict(saved["model"])
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.load_state_dict(saved["optimizer"])
    losses = []
    for rows in torch.tensor(truth["next_rows"]):
        loss = model(input_ids=rows, labels=rows).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()  # past the warm-up the learning rate stays what the file says
        losses.append(loss.item())
    assert losses == pytest.approx(truth["next_losses"], rel=1e-5)


@pytest.mark.parametrize(("folder", "tolerance"), [("sharded", 1e-5), ("bin", 0.1)])
def test_transformers_loads_the_folders(data: Path, folder: str, tolerance: float) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    truth = json.loads((data / "truth.json").read_text())
    tokens = AutoTokenizer.from_pretrained(data / "trainer")(truth["prompt"], return_tensors="pt")["input_ids"]
    model = AutoModelForCausalLM.from_pretrained(data / folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(tokens).logits[0, -1]
    assert logits.tolist() == pytest.approx(truth["prompt_logits"], abs=tolerance)


def test_the_adapter_merges_to_its_truth(data: Path) -> None:
    import peft
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(data / "sharded")
    merged = peft.PeftModel.from_pretrained(base, str(data / "adapter")).merge_and_unload().state_dict()
    truth = load_file(data / "truth_merged.safetensors")
    assert truth
    assert all(torch.allclose(merged[name], truth[name], atol=1e-6) for name in truth)
