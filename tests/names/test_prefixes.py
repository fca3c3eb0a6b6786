"""Wrapper prefixes: found, named and stripped to a fixed point, in weights, ties and optimizer alike."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyckpt.core.checkpoint import Checkpoint, Optimizer
from anyckpt.core.tensor import from_array
from anyckpt.errors import Refused, UsageError
from anyckpt.names.prefixes import WRAPPERS, common_prefix, find, note, strip, stripped

PLAIN = ["embed.weight", "layers.0.fc.weight", "layers.0.fc.bias", "head.weight"]
WHOLE = [w.segment for w in WRAPPERS]


@pytest.mark.parametrize("segment", WHOLE)
def test_each_wrapper_of_the_table_is_stripped_from_the_front(segment: str) -> None:
    result = strip([f"{segment}.{name}" for name in PLAIN])
    assert list(result.old_of) == PLAIN
    assert [f.segment for f in result.removed] == [segment]
    assert result.removed[0].n_names == len(PLAIN)


@given(st.lists(st.sampled_from(WHOLE), max_size=5), st.booleans())
def test_nested_wrappers_in_any_order_are_stripped_to_the_same_names(wrappers: list[str], inner: bool) -> None:
    prefix = "".join(f"{w}." for w in wrappers)
    names = [prefix + name for name in PLAIN]
    if inner:
        names = [name.replace("layers.0.", "layers.0._orig_mod._checkpoint_wrapped_module.") for name in names]
    result = strip(names)
    assert list(result.old_of) == PLAIN
    assert not strip(result.old_of).changed


def test_inner_wrappers_are_stripped_where_they_stand() -> None:
    names = ["layers.0._orig_mod.attn.q.weight", "layers.1._fsdp_wrapped_module._fpw_module.w", "norm.weight"]
    assert list(strip(names).old_of) == ["layers.0.attn.q.weight", "layers.1.w", "norm.weight"]


def test_module_is_a_wrapper_only_where_all_names_have_it() -> None:
    names = ["block.module.weight", "module.weight", "head.weight"]
    assert not strip(names).changed


def test_averaged_model_keeps_its_counter() -> None:
    assert list(strip(["n_averaged", "module.fc.weight"]).old_of) == ["n_averaged", "fc.weight"]


def test_the_prefix_of_an_adapter_file_stays() -> None:
    names = ["base_model.model.q_proj.lora_A.weight", "base_model.model.q_proj.lora_B.weight"]
    assert not strip(names).changed


def test_flat_parameters_keep_their_own_name() -> None:
    assert list(strip(["_flat_param", "blocks.0._fsdp_wrapped_module._flat_param"]).old_of) == [
        "_flat_param", "blocks.0._flat_param",
    ]


def test_a_tensor_is_never_left_without_a_name() -> None:
    assert list(strip(["module", "module._orig_mod"]).old_of) == ["module", "module._orig_mod"]


def test_whole_tree_prefixes_go_on_request_only_and_once() -> None:
    names = ["model.model.embed.weight", "model.lm_head.weight"]
    assert not strip(names).changed
    assert list(strip(names, also=["model."]).old_of) == ["model.embed.weight", "lm_head.weight"]
    wrapped = [f"net.module.{name}" for name in PLAIN]
    assert list(strip(wrapped, also=["net."]).old_of) == PLAIN
    assert list(strip(["a.module.w", "b.module.w"], also=["*.module."]).old_of) == ["a.w", "b.w"]


def test_a_prefix_that_no_name_has_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match=r"no name begins with 'net\.'"):
        strip(PLAIN, also=["net."])


def test_a_collision_is_refused_and_names_both() -> None:
    with pytest.raises(Refused, match=r"'a\.w' and '_orig_mod\.a\.w'"):
        strip(["a.w", "_orig_mod.a.w"])


def test_what_all_names_begin_with_is_found_as_a_question() -> None:
    found = find([f"module.net.{name}" for name in PLAIN])
    assert [(f.segment, f.where) for f in found] == [("module", "front"), ("net", "asked")]
    assert [f.code for f in note(found, len(PLAIN))] == ["prefixed"]
    assert common_prefix(["0.weight", "0.bias"]) == ""


def checkpoint(prefix: str, optimizer_prefix: str) -> Checkpoint:
    one = from_array(np.arange(3, dtype=np.float32))
    weights = {f"{prefix}{name}": one for name in PLAIN}
    names = [f"{optimizer_prefix}{name}" for name in PLAIN[:3]]
    optimizer = Optimizer({"exp_avg": dict.fromkeys(names, one)}, ({"lr": 0.1, "params": names},))
    return Checkpoint(
        "torch", "x.pt", weights, {f"{prefix}head.weight": f"{prefix}embed.weight"}, optimizer,
        facts={"subclasses": {f"{prefix}embed.weight": "kept"}},
    )


@pytest.mark.parametrize(("weights", "optimizer"), [("module.", "module."), ("_orig_mod.", ""), ("", "module.")])
def test_weights_ties_slots_and_groups_stay_in_step(weights: str, optimizer: str) -> None:
    plain = stripped(checkpoint(weights, optimizer))
    assert list(plain.weights) == PLAIN
    assert dict(plain.aliases) == {"head.weight": "embed.weight"}
    assert plain.optimizer is not None
    assert list(plain.optimizer.slots["exp_avg"]) == PLAIN[:3]
    assert plain.optimizer.groups[0]["params"] == PLAIN[:3]
    assert plain.optimizer.groups[0]["lr"] == 0.1
    assert list(plain.facts["subclasses"]) == ["embed.weight"]


def test_a_checkpoint_without_wrappers_is_returned_as_it_is() -> None:
    plain = checkpoint("", "")
    assert stripped(plain) is plain
