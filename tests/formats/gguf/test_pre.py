"""How a byte-level tokenizer cuts text: every name that llama.cpp has for it, and what comes back from a name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from anyckpt.formats.gguf import kv, pre
from anyckpt.formats.gguf.kv import I32, STRING, Metadata
from anyckpt.formats.gguf.tokens import tokenizer_files


def _tokenizer(name: str | None) -> dict[str, Any]:
    fields = {
        "tokenizer.ggml.model": kv.text("gpt2"), "tokenizer.ggml.tokens": kv.array(STRING, ["a", "b", "ab"]),
        "tokenizer.ggml.token_type": kv.array(I32, [1, 1, 1]), "tokenizer.ggml.merges": kv.array(STRING, ["a b"]),
    }  # fmt: skip
    if name is not None:
        fields["tokenizer.ggml.pre"] = kv.text(name)
    return {key: json.loads(data) for key, data in tokenizer_files(Metadata(fields)).items()}


@pytest.mark.parametrize("name", [name for name, _, _ in pre.KNOWN])
def test_a_name_that_goes_to_a_tokenizer_comes_back_from_it(name: str) -> None:
    files = _tokenizer(name)
    cleans = files["tokenizer_config.json"].get("clean_up_tokenization_spaces", True)
    assert pre.name_of(files["tokenizer.json"], cleans_spaces=cleans) == name


@pytest.mark.parametrize("name", [*pre.ALSO_CALLED])
def test_other_names_of_the_same_cut_alike(name: str) -> None:
    one, other = _tokenizer(name)["tokenizer.json"], _tokenizer(pre.ALSO_CALLED[name])["tokenizer.json"]
    assert one["pre_tokenizer"] == other["pre_tokenizer"]


def test_a_file_that_names_none_is_cut_as_llama_cpp_cuts_by_default() -> None:
    assert len(_tokenizer(None)["tokenizer.json"]["pre_tokenizer"]["pretokenizers"]) == 5


def test_nothing_is_invented_for_a_name_that_is_not_known() -> None:
    assert _tokenizer("someone-elses") == {}
