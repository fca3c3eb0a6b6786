"""Optimizer state has the right parameter's name, or none."""

from __future__ import annotations

from typing import Any

import pytest
from builders import array, codes
from hypothesis import given, settings
from hypothesis import strategies as st

from anyckpt.core.box import Shape
from anyckpt.core.tensor import Tensor
from anyckpt.finding import Report
from anyckpt.formats.torch.assign import assign, candidates
from anyckpt.formats.torch.optimizer import read_optimizer

GPT = {
    "embed.weight": (67, 16), "ln1.weight": (16,), "ln1.bias": (16,), "qkv.weight": (48, 16), "qkv.bias": (48,),
    "proj.weight": (16, 16), "proj.bias": (16,), "scale": (), "head.weight": (67, 16),
}


def weights(shapes: dict[str, Shape]) -> dict[str, Tensor]:
    return {name: array(*shape) for name, shape in shapes.items()}


def named(groups: list[list[str | None]], shapes: dict[str, Shape], stateless: tuple[str, ...] = ()) -> list[list[Any]]:
    """The names found for groups of a model of these shapes, given only the shapes of their moments."""
    wanted = [[None if name in stateless else shapes[str(name)] for name in group] for group in groups]
    return [list(group) for group in assign(wanted, candidates(weights(shapes), {})).names]


def test_one_group_follows_the_model_without_its_buffers() -> None:
    names = [name for name in GPT if name != "scale"]
    assert named([names], GPT) == [names]


def test_decayed_and_not_decayed_groups_interleave() -> None:
    groups = [[n for n in GPT if len(GPT[n]) == 2], [n for n in GPT if len(GPT[n]) == 1]]
    assert named(groups, GPT) == groups
    assert named(groups[::-1], GPT) == groups[::-1]


def test_running_statistics_are_never_parameters() -> None:
    shapes = {"conv.weight": (8, 3, 3, 3), "bn.weight": (8,), "bn.bias": (8,), "bn.running_mean": (8,),
              "bn.running_var": (8,), "fc.weight": (2, 8), "fc.bias": (2,)}
    names = [n for n in shapes if "running" not in n]
    assert named([names], shapes) == [names]


def test_frozen_parameters_are_left_out_where_shapes_decide() -> None:
    shapes = {"a": (8, 8), "b": (8,), "c": (4, 8), "d": (8, 8), "e": (8,), "f": (5, 8)}
    assert named([["c", "d", "e", "f"]], shapes) == [["c", "d", "e", "f"]]


def test_which_of_equal_layers_were_frozen_is_not_guessed() -> None:
    shapes = {"embed": (9, 8)} | {f"h.{i}.w": (8, 8) for i in range(3)} | {"head": (5, 8)}
    assert named([["embed", "h.1.w", "h.2.w", "head"]], shapes) == [["embed", None, None, "head"]]


def test_a_parameter_without_state_may_stand_in_a_group() -> None:
    names = [name for name in GPT if name != "scale"]
    assert named([names], GPT, stateless=("embed.weight", "qkv.weight")) == [names]


def test_what_could_be_either_of_two_stays_without_a_name() -> None:
    assert named([["head.weight"]], GPT) == [[None]]
    layers = {f"h.{i}.w": (4, 4) for i in range(3)}
    assert named([["h.0.w"], ["h.1.w"], ["h.2.w"]], layers) == [[None], [None], [None]]


@settings(max_examples=60, deadline=None)
@given(
    shapes=st.lists(st.sampled_from([(4, 4), (4,), (8, 4), (8,), (2, 2, 2)]), min_size=1, max_size=14),
    data=st.data(),
)
def test_a_name_that_is_given_is_right_or_no_assignment_fits_better(shapes: list[Shape], data: st.DataObject) -> None:
    """Every order-preserving choice that has names agrees in shape and order: nothing is named against the evidence."""
    model = {f"p{i}": shape for i, shape in enumerate(shapes)}
    owner = data.draw(st.lists(st.integers(-1, 1), min_size=len(shapes), max_size=len(shapes)))
    groups = [[n for n, o in zip(model, owner, strict=True) if o == g] for g in (0, 1)]
    found = assign([[model[n] for n in group] for group in groups], candidates(weights(model), {}))
    assert found.fits
    order = list(model)
    for group, names in zip(groups, found.names, strict=True):
        given_names = [n for n in names if n is not None]
        assert sorted(given_names, key=order.index) == given_names
        assert all(n is None or model[n] == model[g] for n, g in zip(names, group, strict=True))
    everything = [n for names in found.names for n in names if n is not None]
    assert len(set(everything)) == len(everything)


def adam(shapes: dict[Any, Shape], groups: list[dict[str, Any]]) -> dict[str, Any]:
    state = {k: {"step": array(1), "exp_avg": array(*s), "exp_avg_sq": array(*s)} for k, s in shapes.items()}
    return {"state": state, "param_groups": groups}


@pytest.mark.parametrize("keys", [[0, 1], ["0", "1"], [140_001, 140_777]], ids=["ids", "text", "addresses"])
def test_ids_of_every_kind_are_followed_through_the_groups(keys: list[Any]) -> None:
    model = {"w": (3, 2), "b": (3,)}
    saved = adam({keys[1]: (3, 2), keys[0]: (3,)}, [{"lr": 1, "params": [keys[1], keys[0]]}])
    report = Report()
    optimizer = read_optimizer([saved], weights(model), report)
    assert optimizer.groups[0]["params"] == ["w", "b"]
    assert optimizer.slots["exp_avg"]["w"].shape == (3, 2)
    assert optimizer.names_inferred
    assert codes(report) == {"inferred"}


def test_names_in_the_file_are_taken_before_anything_is_inferred() -> None:
    model = {"a": (2,), "b": (2,)}
    by_name = adam({"b": (2,), "a": (2,)}, [{"lr": 1, "params": ["b", "a"]}])
    listed = adam({0: (2,), 1: (2,)}, [{"lr": 1, "params": [0, 1], "param_names": ["b", "a"]}])
    for saved in (by_name, listed):
        report = Report()
        optimizer = read_optimizer([saved], weights(model), report)
        assert optimizer.groups[0]["params"] == ["b", "a"]
        assert not optimizer.names_inferred
        assert not report.findings
        assert "param_names" not in optimizer.groups[0]


def test_shapes_that_contradict_leave_the_state_by_number() -> None:
    report = Report()
    optimizer = read_optimizer([adam({0: (9, 9)}, [{"lr": 1, "params": [0]}])], weights({"w": (3, 2)}), report)
    assert not optimizer.slots
    assert set(optimizer.unmatched["0"]) == {"step", "exp_avg", "exp_avg_sq"}
    assert codes(report) == {"ambiguous"}


def test_tied_weights_are_one_parameter() -> None:
    model = {"embed": (5, 2), "mid": (2, 2), "head": (5, 2)}
    saved = adam({0: (5, 2), 1: (2, 2)}, [{"lr": 1, "params": [0, 1]}])
    optimizer = read_optimizer([saved], weights(model), Report(), aliases={"head": "embed"})
    assert list(optimizer.slots["exp_avg"]) == ["embed", "mid"]


MOMENTS = {"step": 1.0, "exp_avg": (2, 3), "exp_avg_sq": (2, 3)}


@pytest.mark.parametrize(
    ("state", "options", "kind"),
    [
        (MOMENTS, {"decoupled_weight_decay": True, "amsgrad": False}, "AdamW"),
        (MOMENTS, {"decoupled_weight_decay": False, "amsgrad": True}, "Adam"),
        (MOMENTS, {"amsgrad": False}, "Adam or AdamW"),
        ({"momentum_buffer": (2, 3)}, {"nesterov": False, "dampening": 0}, "SGD"),
        ({"momentum_buffer": (2, 3)}, {"ns_steps": 5}, "Muon"),
        ({"step": 1.0, "row_var": (2, 1), "col_var": (1, 3)}, {"beta2_decay": -0.8}, "Adafactor"),
        ({"step": 1, "exp_avg_sq_row": (2,), "exp_avg_sq_col": (3,)}, {"relative_step": True}, "Adafactor"),
        ({"state1": (2, 3), "state2": (2, 3), "absmax1": (1,)}, {"betas": (0.9, 0.999)}, "Adam8bit"),
        ({}, {"nesterov": False, "dampening": 0}, "SGD"),
    ],
)
def test_an_optimizer_is_known_by_its_slots_and_shapes_by_its_factors(
    state: dict[str, Any], options: dict[str, Any], kind: str
) -> None:
    entry = {k: array(*v) if isinstance(v, tuple) else v for k, v in state.items()}
    saved = {"state": {0: entry} if entry else {}, "param_groups": [{"lr": 1, "params": [0], **options}]}
    optimizer = read_optimizer([saved], weights({"w": (2, 3)}), Report())
    assert optimizer.kind == kind
    assert optimizer.groups[0]["params"] == ["w"]
    assert all(list(by_name) == ["w"] for by_name in optimizer.slots.values())


def test_two_optimizers_are_named_together() -> None:
    model = {"g.w": (2, 2), "d.w": (3, 3)}
    first = adam({0: (2, 2)}, [{"lr": 1, "params": [0]}])
    second = adam({0: (3, 3)}, [{"lr": 2, "params": [0]}])
    optimizer = read_optimizer([first, second], weights(model), Report())
    assert set(optimizer.slots["exp_avg"]) == {"g.w", "d.w"}
    assert [g["lr"] for g in optimizer.groups] == [1, 2]


@pytest.mark.frameworks
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("frozen", ["", "h.0", "wte"])
@pytest.mark.parametrize("split", ["one", "decay", "backbone"])
def test_against_real_torch_no_state_ever_has_a_wrong_name(tied: bool, frozen: str, split: str) -> None:
    import torch
    from torch import nn

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wte = nn.Embedding(50, 16)
            self.h = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 64) for _ in range(3))
            self.bn = nn.BatchNorm1d(16)
            self.head = nn.Linear(16, 50, bias=False)
            if tied:
                self.head.weight = self.wte.weight

    model = Model()
    parameters = [(n, p) for n, p in model.named_parameters() if not (frozen and n.startswith(frozen))]
    groups = [parameters]
    if split == "decay":
        groups = [[x for x in parameters if x[1].ndim > 1], [x for x in parameters if x[1].ndim < 2]]
    if split == "backbone":
        groups = [parameters[-5:], parameters[:-5]]
    optimizer = torch.optim.AdamW([{"params": [p for _, p in g]} for g in groups])
    for _, p in parameters:
        p.grad = torch.randn_like(p)
    optimizer.step()
    saved = optimizer.state_dict()
    state = {k: {"exp_avg": array(*v["exp_avg"].shape)} for k, v in saved["state"].items()}
    found = read_optimizer(
        [{"state": state, "param_groups": saved["param_groups"]}],
        weights({n: tuple(t.shape) for n, t in model.state_dict().items() if t.is_floating_point()}),
        Report(), aliases={"head.weight": "wte.weight"} if tied else {},
    )
    got = [name for group in found.groups for name in group["params"]]
    want = [name for group in groups for name, _ in group]
    if frozen == "h.0":  # it could as well be another of the three equal layers: those stay without a name
        assert sum(name.isdecimal() for name in got) == len([n for n in want if n.startswith("h.")])
    assert [g for g in got if not g.isdecimal()] == [w for g, w in zip(got, want, strict=True) if not g.isdecimal()]
    assert frozen == "h.0" or got == want
