"""What `anyckpt PATH` answers, on files of a real training run."""

from __future__ import annotations

from pathlib import Path

import pytest

from anyckpt.core.checkpoint import Checkpoint
from anyckpt.verbs.inspect import inspect
from anyckpt.verbs.loading import device_note, loading


def test_a_trainers_checkpoint(data: Path) -> None:
    found = inspect(data / "trainer" / "checkpoint.pt")
    assert (found.format, found.is_training, found.verdict, found.ok) == ("torch", True, "safe", True)
    assert (found.step, found.epoch, found.has_scheduler) == (40, 3, True)
    assert found.n_tensors == 21
    assert found.n_parameters == 5456
    assert found.ties == {"lm_head.weight": "model.embed_tokens.weight"}
    assert found.optimizer is not None
    assert found.optimizer.kind == "AdamW"
    assert set(found.optimizer.slots) == {"step", "exp_avg", "exp_avg_sq"}
    assert found.optimizer.settings["lr"] == pytest.approx(0.005)
    sizes = found.sizes
    assert sizes.weights == 5456 * 4
    assert sizes.optimizer == 2 * 5456 * 4 + 20 * 4
    assert sizes.rest == sizes.on_disk - sizes.weights - sizes.optimizer


def test_layers_are_folded(data: Path) -> None:
    rows = {row.name: row for row in inspect(data / "sharded").tree}
    assert rows["model.layers.{0..1}.mlp.up_proj.weight"].count == 2
    assert rows["model.layers.{0..1}.mlp.up_proj.weight"].shape == (24, 16)
    assert sum(row.count for row in rows.values()) == 21


def test_which_global_stands_in_the_way_of_weights_only(data: Path) -> None:
    how = inspect(data / "trainer" / "checkpoint.pt").loading
    assert how.weights_only is False
    assert set(how.stands_in_the_way) == {"argparse.Namespace", "pathlib.PosixPath"}
    assert how.oldest_torch == "1.6"
    steps = [command for command, _ in inspect(data / "trainer" / "checkpoint.pt").next_steps]
    assert any(step.startswith("anyckpt sanitize") for step in steps)


def test_how_each_kind_is_loaded(data: Path) -> None:
    assert "AutoModelForCausalLM.from_pretrained" in inspect(data / "sharded").loading.snippet[-1]
    legacy = inspect(data / "legacy.pth").loading
    assert legacy.weights_only is True
    assert "weights_only=True" in legacy.snippet[1]
    assert "PeftModel" in inspect(data / "adapter").loading.snippet[-1]


def test_what_devices_mean() -> None:
    assert device_note(["cpu"]) == ""
    assert "a cuda device" in device_note(["cuda:0", "cpu"])
    assert "8 cuda devices" in device_note(["cuda:7"])
    saved = Checkpoint("torch", "x.pt", {}, facts={"devices": {"cuda:10": 1, "cuda:9": 2, "cpu": 1}})
    assert loading(saved).devices == ("cpu", "cuda:9", "cuda:10")


def test_strange_facts_of_a_config_do_no_harm() -> None:
    for config in ({"architectures": 3}, {"architectures": []}, {"architectures": [None]}, {}):
        assert loading(Checkpoint("hf", "x", {}, config=config)).snippet
