"""Which part of a saved object is the model, and what the rest is."""

from __future__ import annotations

from typing import Any

import pytest
from builders import array, codes, read_bytes, saved

from anyckpt.core.inert import Global, Mapping, Opaque
from anyckpt.errors import CheckpointError
from anyckpt.finding import Report
from anyckpt.formats.torch.state import read_state
from anyckpt.formats.torch.unwrap import unwrap

W = {"layer.weight": array(2, 2), "layer.bias": array(2)}
OPTIMIZER: dict[str, Any] = {"state": {}, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}


@pytest.mark.parametrize(
    ("root", "path", "rest"),
    [
        (dict(W), "", set()),
        ({"model": W, "epoch": 3}, "model", {"epoch"}),
        ({"state_dict": W, "optimizer": OPTIMIZER}, "state_dict", {"optimizer"}),
        ({"module": W, "ema": W}, "module", {"ema"}),
        ({"model_ema": W, "model": W}, "model", {"model_ema"}),
        ({"model": {"state_dict": W, "cfg": 1}, "it": 2}, "model.state_dict", {"it", "cfg"}),
        ({"checkpoint": {"model": W}, "step": 1}, "checkpoint.model", {"step"}),
        ({"epoch": 1, "optimizer": OPTIMIZER, **W}, "", {"epoch", "optimizer"}),
        ([W, 5], "0", {"1"}),
    ],
)
def test_a_wrapped_state_dict_is_found(root: Any, path: str, rest: set[str]) -> None:
    found = unwrap(root)
    assert set(found.entries) == set(W)
    assert ".".join(found.path) == path
    assert set(found.rest) == rest


def test_several_models_are_joined_with_their_keys() -> None:
    found = unwrap({"encoder": W, "decoder": W, "optim_e": OPTIMIZER, "g_ema": W})
    assert set(found.entries) == {f"{part}.{name}" for part in ("encoder", "decoder") for name in W}
    assert set(found.rest) == {"optim_e", "g_ema"}


def test_nested_dicts_and_lists_are_joined_with_dots() -> None:
    found = unwrap({"model": {"blocks": [{"w": array(1)}, {"w": array(2)}], "head": {"b": array(3)}}})
    assert list(found.entries) == ["blocks.0.w", "blocks.1.w", "head.b"]


def test_one_tensor_and_a_list_of_tensors_have_names() -> None:
    assert list(unwrap(array(2)).entries) == ["tensor"]
    assert list(unwrap([array(1), array(2)]).entries) == ["0", "1"]


def test_a_whole_module_gives_what_state_dict_would() -> None:
    def module(name: str, **state: Any) -> Opaque:
        empty: dict[str, Any] = {"_parameters": {}, "_buffers": {}, "_modules": {}}
        return Opaque(Global("my", name), state={**empty, **state})

    norm = module(
        "Norm", _parameters={"weight": array(2), "bias": None}, _buffers={"mean": array(2), "scratch": array(9)},
        _non_persistent_buffers_set={"scratch"},
    )
    found = unwrap(module("Net", _parameters={"p": array(1)}, _modules={"norm": norm, "none": None}))
    assert list(found.entries) == ["p", "norm.weight", "norm.mean"]
    assert found.module_class == "my.Net"


def test_shared_containers_do_not_multiply_without_end() -> None:
    deep: Any = [array(1)]
    for _ in range(40):
        deep = [deep, deep]
    with pytest.raises(CheckpointError, match="multiply"):
        unwrap(deep)
    empty: Any = []
    for _ in range(40):
        empty = [empty, empty]
    assert not unwrap({"a": empty, "w": array(1)}).rest.keys() - {"a"}


def test_a_module_that_holds_itself_ends() -> None:
    module = Opaque(Global("my", "Net"), state={"_parameters": {}, "_buffers": {}, "_modules": {}})
    module.state["_modules"] = {"a": module, "b": module}
    with pytest.raises(CheckpointError, match="multiply"):
        unwrap(module)


def test_counters_scheduler_and_rng_are_told_apart() -> None:
    root = {
        "model": W, "optimizer": OPTIMIZER, "lr_scheduler": {"last_epoch": 2}, "rng_state": array(8, dtype="uint8"),
        "epoch": 2, "global_step": array(1, dtype="int64", start=41), "args": {"lr": 0.1}, "best": 0.5,
    }
    checkpoint = read_state(root, format="torch", path="x", report=Report(), facts={})
    assert (checkpoint.epoch, checkpoint.step) == (2, 41)
    assert checkpoint.scheduler == {"last_epoch": 2}
    assert checkpoint.rng is root["rng_state"]
    assert checkpoint.config == {"lr": 0.1}
    assert set(checkpoint.state) == {"args", "best"}


def test_ties_and_other_models_are_noted() -> None:
    shared = array(4, 4)
    root = {"model": Mapping({"embed": shared, "head": shared}), "ema": {"embed": array(4, 4)}}
    checkpoint, report = read_bytes(saved(root))
    assert checkpoint.aliases == {"head": "embed"}
    assert {"tied", "other-state"} <= codes(report)
    assert "ema" in checkpoint.state


def test_an_optimizer_alone_has_slots_by_number() -> None:
    state = {0: {"exp_avg": array(2), "step": 3.0}}
    checkpoint, _ = read_bytes(saved({"state": state, "param_groups": [{"lr": 1.0, "params": [0]}]}))
    assert not checkpoint.weights
    assert checkpoint.optimizer is not None
    assert list(checkpoint.optimizer.slots["exp_avg"]) == ["0"]
    assert checkpoint.step == 3
