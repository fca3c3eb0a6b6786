"""Tied weights of transformers models: which names are one tensor, as the config says.

transformers leaves the second name out of safetensors files, and the loader ties it again from the config. The config
of an older model says nothing where tying is its class's default, so a missing head is then taken as tied: such a model
could not run otherwise. Facts from `_tied_weights_keys` of the models (transformers 5.24).
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from anyckpt.finding import Report
from anyckpt.io.paths import printable

_LM_HEAD = ("lm_head.weight",)
_DECODER = ("cls.predictions.decoder.weight",)

TIED: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("model.embed_tokens.weight", _LM_HEAD),
    ("model.language_model.embed_tokens.weight", _LM_HEAD),
    ("language_model.model.embed_tokens.weight", ("language_model.lm_head.weight",)),
    ("transformer.wte.weight", _LM_HEAD),
    ("wte.weight", _LM_HEAD),
    ("transformer.word_embeddings.weight", _LM_HEAD),
    ("transformer.tokens_embed.weight", _LM_HEAD),
    ("transformer.w.weight", _LM_HEAD),
    ("transformer.word_embedding.weight", ("lm_loss.weight",)),
    ("gpt_neox.embed_in.weight", ("embed_out.weight",)),
    ("model.decoder.embed_tokens.weight", _LM_HEAD),
    ("backbone.embeddings.weight", _LM_HEAD),
    ("backbone.embedding.weight", _LM_HEAD),
    ("shared.weight", ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", *_LM_HEAD)),
    ("model.shared.weight", ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", *_LM_HEAD)),
    *((f"{name}.embeddings.word_embeddings.weight", _DECODER) for name in ("bert", "deberta", "ernie", "layoutlm")),
    ("cls.predictions.bias", ("cls.predictions.decoder.bias",)),
    *((f"{name}.embeddings.word_embeddings.weight", ("lm_head.decoder.weight",)) for name in ("roberta", "mpnet")),
    ("lm_head.bias", ("lm_head.decoder.bias",)),
    ("distilbert.embeddings.word_embeddings.weight", ("vocab_projector.weight",)),
    ("albert.embeddings.word_embeddings.weight", ("predictions.decoder.weight",)),
    ("predictions.bias", ("predictions.decoder.bias",)),
    ("electra.embeddings.word_embeddings.weight", ("generator_lm_head.weight",)),
)
"""(the name that is stored, the names that share it)."""

HEAD_NAMES = {"whisper": {"lm_head.weight": "proj_out.weight"}, "moonshine": {"lm_head.weight": "proj_out.weight"}}
"""Model types that call a head otherwise."""

ALWAYS = ("embed_tokens.weight", "bias")
"""Endings of names that are shared whatever the setting: encoder and decoder of T5 and BART, a bias and its copy."""

HEADS = (
    "ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForMaskedLM", "ForPreTraining", "DoubleHeadsModel",
    "WithLMHead",
)
"""Endings of class names of models with an output head over the vocabulary."""


def declared_ties(
    weights: Mapping[str, Any], config: Mapping[str, Any] | None, report: Report, where: str = "config.json"
) -> dict[str, str]:
    """Names that are not stored because they are tied, each with the name that is: {"lm_head.weight": …}.

    Reports the ties, and a head that is neither stored nor tied, which a loader would fill with random numbers.
    """
    if config is None:
        return {}
    found = {name: stored for name, stored in _pairs(config) if stored in weights and name not in weights}
    always = {name: stored for name, stored in found.items() if name.endswith(ALWAYS) and _has_module(name, weights)}
    heads = {n: stored for n, stored in found.items() if not n.endswith(ALWAYS)} if has_head(config) else {}
    tied = tie_setting(config)
    if heads and tied is False:
        listed = ", ".join(map(printable, heads))
        report.add(
            "missing-tensor",
            f"there is no {listed}, and the config says that it is not tied: a loader would start it at random",
            where=where, severity="warning",
            hint='set "tie_word_embeddings": true if the model was trained so; else get the missing tensor',
        )
        heads = {}
    aliases = {**always, **heads}
    if aliases:
        listed = ", ".join(f"{printable(name)} is {printable(stored)}" for name, stored in aliases.items())
        how = "by its class's default, since it is not stored" if heads and tied is None else "by the config"
        report.add("tied", f"{listed} ({how})", where=where)
    return aliases


def _has_module(name: str, weights: Mapping[str, Any]) -> bool:
    """Whether the model has the part that the name belongs to: an encoder alone has no decoder's embedding."""
    module = name.rpartition("embed_tokens")[0] or name.rpartition(".")[0].rpartition(".")[0]
    return any(other.startswith(module) for other in weights)


def _pairs(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(tied name, stored name) of the table, under the names that this type of model uses."""
    renamed = HEAD_NAMES.get(str(config.get("model_type")), {})
    return [(renamed.get(name, name), stored) for stored, names in TIED for name in names]


def has_head(config: Mapping[str, Any]) -> bool:
    """Whether the config's class has an output head."""
    architectures = config.get("architectures")
    names = architectures if isinstance(architectures, list) else []
    return any(isinstance(name, str) and name.endswith(HEADS) for name in names)


def tie_setting(config: Mapping[str, Any]) -> bool | None:
    """`tie_word_embeddings` of the config, or of its text part; None where neither says."""
    text = config.get("text_config")
    for part in (config, text if isinstance(text, dict) else {}):
        value = part.get("tie_word_embeddings")
        if isinstance(value, bool):
            return value
    return None


def explained(aliases: Mapping[str, str], weights: Container[str], config: Mapping[str, Any] | None) -> set[str]:
    """The aliases that a loader ties by itself from this config, and that may so be left out of a file."""
    if config is None:
        return set()
    heads = has_head(config) and tie_setting(config) is not False and isinstance(config.get("model_type"), str)
    return {
        name for name, stored in _pairs(config)
        if stored in weights and aliases.get(name) == stored and (heads or name.endswith(ALWAYS))
    }  # fmt: skip
