"""Pairing names: certain steps only, and the nearest name for what is left."""

from __future__ import annotations

import numpy as np

from anyckpt.core.checkpoint import Checkpoint
from anyckpt.core.dtypes import DTYPES
from anyckpt.core.source import Span
from anyckpt.core.tensor import Tensor, from_array, from_source
from anyckpt.io.view import MemoryFile
from anyckpt.names import ties
from anyckpt.names.match import match, nearest, nearest_of

TARGET = {"embed.weight": (8, 4), "fc.weight": (4, 4), "norm.weight": (4,)}


def prefixed(prefix: str, names: dict[str, tuple[int, ...]] = TARGET) -> dict[str, tuple[int, ...]]:
    return {prefix + name: shape for name, shape in names.items()}


def test_equal_names_need_no_explanation() -> None:
    found = match(TARGET, TARGET)
    assert found.is_complete
    assert not found.how


def test_wrappers_on_either_side() -> None:
    for source, target in ((prefixed("module._orig_mod."), TARGET), (TARGET, prefixed("_orig_mod.module."))):
        found = match(source, target)
        assert found.is_complete
        assert set(found.how.values()) == {"wrapper prefix"}
    assert not match(prefixed("module."), TARGET, wrappers=False).source_of


def test_an_unknown_prefix_is_taken_only_if_it_explains_everything() -> None:
    found = match({**prefixed("net."), "loss.weight": (3,)}, TARGET)
    assert found.source_of["fc.weight"] == "net.fc.weight"
    assert found.unexpected == ("loss.weight",)
    assert found.how["fc.weight"] == "prefix 'net.'"
    one_short = prefixed("net.")
    del one_short["net.norm.weight"]
    assert not match(one_short, TARGET).source_of
    other_shape = {**prefixed("net."), "net.norm.weight": (5,)}
    assert not match(other_shape, TARGET).source_of


def test_a_base_model_goes_into_a_model_with_a_head() -> None:
    target = {**prefixed("bert."), "classifier.weight": (2, 4)}
    found = match(TARGET, target)
    assert found.missing == ("classifier.weight",)
    assert found.how["bert.fc.weight"] == "prefix 'bert.'"


def test_older_spellings_are_paired_with_newer_ones() -> None:
    found = match({"module.norm.gamma": (4,), "module.w": (2,)}, {"norm.weight": (4,), "w": (2,)})
    assert found.source_of == {"w": "module.w", "norm.weight": "module.norm.gamma"}
    assert found.how["norm.weight"] == "older spelling"


def test_shapes_that_differ_are_told_and_a_scalar_may_have_an_axis() -> None:
    found = match({"a": (2,), "s": (1,)}, {"a": (3,), "s": ()})
    assert found.shapes == {"a": ((2,), (3,))}


def test_the_nearest_name_prefers_its_shape() -> None:
    others = {"layers.1.attn.q.weight": (4, 4), "layers.1.attn.k.weight": (2, 4), "head.bias": (4,)}
    near = nearest("blocks.1.attn.k.weight", (2, 4), others)
    assert near is not None
    assert near.nearest == "layers.1.attn.k.weight"
    assert near.fits
    assert "nearest layers.1.attn.k.weight [2, 4]" in str(near)
    assert len(nearest_of(["blocks.1.attn.k.weight"] * 3, {"blocks.1.attn.k.weight": (2, 4)}, others, limit=2)) == 2
    assert nearest("x", (1,), {}) is None


def spans(*offsets: int) -> list[Tensor]:
    file = MemoryFile("m", bytes(range(64)))
    return [from_source(DTYPES["float32"], (2,), Span(file, offset, 8)) for offset in offsets]


def test_ties_by_storage_are_the_same_bytes_in_the_same_layout() -> None:
    a, b, c = spans(0, 0, 8)
    assert ties.by_storage({"a": a, "b": b, "c": c}) == {"b": "a"}


def test_ties_by_bytes_read_what_may_be_equal() -> None:
    x = np.arange(40_000, dtype=np.float32)
    y = x.copy()
    y[-1] = 0
    weights = {"a": from_array(x), "b": from_array(y), "c": from_array(x), "s": from_array(np.float32([1])),
               "t": from_array(np.float32([1]))}
    assert ties.by_bytes(weights) == {"c": "a"}


def test_ties_by_config_are_told_present_or_left_out() -> None:
    e = from_array(np.zeros((8, 4), np.float32))
    llama = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True}
    left_out = ties.by_config(llama, {"model.embed_tokens.weight": e})
    assert left_out == (ties.Tie("lm_head.weight", "model.embed_tokens.weight", "config", False),)
    both = ties.by_config(llama, {"model.embed_tokens.weight": e, "lm_head.weight": e})
    assert [t.is_present for t in both] == [True]
    assert not ties.by_config({**llama, "tie_word_embeddings": False}, {"model.embed_tokens.weight": e})
    bert = {"model_type": "bert", "architectures": ["BertForMaskedLM"]}
    assert [t.tied for t in ties.by_config(bert, {"bert.embeddings.word_embeddings.weight": e})] == [
        "cls.predictions.decoder.weight"
    ]
    assert not ties.by_config({**bert, "architectures": ["BertModel"]}, {"bert.embeddings.word_embeddings.weight": e})
    assert Checkpoint("hf", "x", {}).aliases == {}
