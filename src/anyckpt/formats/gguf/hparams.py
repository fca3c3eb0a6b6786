"""config.json -> the model's keys, in the order and kinds that the official converter writes them.

The converter reads configs through transformers, which fills in what a config leaves out: `DEFAULTS` and `normalised`
do that for the architectures that are written here (transformers 5.24). Facts: `conversion/*.py` of llama.cpp build
11434.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from anyckpt.errors import UsageError
from anyckpt.formats.gguf import kv
from anyckpt.formats.gguf.kv import Field

Config = Mapping[str, Any]
Settings = tuple[tuple[str, tuple[str, ...]], ...]
"""GGUF's key, and the names it may have in a config, the first that is there counting."""
Fields = dict[str, Field]

_DECODER = {"rms_norm_eps": 1e-6, "max_position_embeddings": 32768}
DEFAULTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "llama": {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048, "vocab_size": 32000},
        "mistral": {"rms_norm_eps": 1e-6, "max_position_embeddings": 131072, "num_key_value_heads": 8,
        "vocab_size": 32000},
        "mixtral": {
            "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "num_key_value_heads": 8, "rope_theta": 1e6,
            "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32000,
        },
        "qwen2": _DECODER,
        "qwen3": {**_DECODER, "head_dim": 128},
        "qwen3_moe": {**_DECODER, "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8,
                      "moe_intermediate_size": 768},
        "gemma2": {
            "rms_norm_eps": 1e-6, "max_position_embeddings": 8192, "num_key_value_heads": 4, "head_dim": 256,
            "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "sliding_window": 4096,
        },
        "gemma3_text": {
            "rms_norm_eps": 1e-6, "max_position_embeddings": 131072, "num_attention_heads": 8, "num_key_value_heads": 4,
            "head_dim": 256, "sliding_window": 4096, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
            "vocab_size": 262208,
            "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
        },
        "phi3": {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "original_max_position_embeddings": 4096},
        "gpt2": {"layer_norm_epsilon": 1e-5, "n_positions": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12},
        "bert": {"layer_norm_eps": 1e-12, "max_position_embeddings": 512, "type_vocab_size": 2},
        "deepseek_v2": {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048, "n_group": None, "topk_group": None,
                        "routed_scaling_factor": 1.0, "norm_topk_prob": False, "first_k_dense_replace": 0},
        "deepseek_v3": {"rms_norm_eps": 1e-6, "max_position_embeddings": 4096, "n_group": 8, "topk_group": 4,
                        "routed_scaling_factor": 2.5, "norm_topk_prob": True, "first_k_dense_replace": 3},
    }
)  # fmt: skip
"""model_type -> what transformers takes for settings that config.json leaves out."""

HEAD_DIM_FROM_HIDDEN = ("llama", "mistral")
"""Types whose config always has a head_dim once it is loaded."""
NO_ROPE = ("gpt2", "bert")


def normalised(config: Config) -> dict[str, Any]:
    """The config as transformers has it in memory: the text part on top, defaults filled in, one form of rope
    settings.
    """
    text = config.get("text_config")
    merged = {**config, **text} if isinstance(text, dict) else dict(config)
    kind = str(merged.get("model_type"))
    if kind == "gemma3":
        kind = "gemma3_text"
    out = {**DEFAULTS.get(kind, {}), **merged}
    if kind not in (*NO_ROPE,):
        if out.get("num_key_value_heads") is None and "num_attention_heads" in out:
            out["num_key_value_heads"] = out["num_attention_heads"]
        if kind in HEAD_DIM_FROM_HIDDEN and out.get("head_dim") is None:
            out["head_dim"] = out["hidden_size"] // out["num_attention_heads"]
        if kind.startswith("deepseek"):
            out["head_dim"] = out["qk_rope_head_dim"]
        out["rope_parameters"] = _rope(out, kind)
    for key in ("sliding_window_pattern",):
        out.setdefault(key, out.get(f"_{key}"))
    return out


def _rope(config: Config, kind: str) -> dict[str, Any]:
    """Rope settings in one dict; gemma3 has two of them, by kind of layer."""
    found = config.get("rope_parameters")
    if isinstance(found, dict) and found:
        rope: dict[str, Any] = {k: dict(v) if isinstance(v, dict) else v for k, v in found.items()}
        if kind == "phi3":
            rope.setdefault("original_max_position_embeddings", config.get("original_max_position_embeddings"))
            rope.setdefault("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
        return rope
    scaling = dict(config.get("rope_scaling") or {})
    theta = config.get("rope_theta")
    base = {
        "rope_theta": 10000.0 if theta is None else theta,
        "rope_type": scaling.get("rope_type", scaling.get("type", "default")),
    }
    if kind == "gemma3_text":
        local = {"rope_type": "default", "rope_theta": config.get("rope_local_base_freq", 10000.0)}
        return {"sliding_attention": local, "full_attention": {**scaling, **base}}
    if kind == "phi3":
        base["partial_rotary_factor"] = config.get("partial_rotary_factor", 1.0)
        base["original_max_position_embeddings"] = config.get("original_max_position_embeddings")
    return {**scaling, **base}


def _first(config: Config, *keys: str) -> Any:
    """The value of the first key that is there, even where it is null."""
    return next((config[key] for key in keys if key in config), None)


def _need(config: Config, *keys: str) -> Any:
    found = _first(config, *keys)
    if found is None:
        raise UsageError(f"config.json lacks {keys[0]}, which GGUF needs", hint="add it to the config of the source")
    return found


def _number(value: Any) -> Field:
    """u32, or an array where it differs from layer to layer."""
    return kv.array(kv.I32, value) if isinstance(value, list) else kv.u32(value)


def _common(config: Config, a: str, out: Fields) -> None:
    """What most architectures write, in this order."""
    sizes: Settings = (
        ("block_count", ("n_layers", "num_hidden_layers", "n_layer", "num_layers")),
        ("context_length", ("max_position_embeddings", "n_ctx", "n_positions", "max_length", "max_sequence_length",
                            "model_max_length")),
        ("embedding_length", ("hidden_size", "n_embd", "dim")),
        ("feed_forward_length", ("prefix_dense_intermediate_size", "dense_intermediate_size", "intermediate_size",
        "n_inner",
                                 "hidden_dim")),
        ("attention.head_count", ("num_attention_heads", "n_head", "n_heads")),
        ("attention.head_count_kv", ("num_key_value_heads", "n_kv_heads")),
    )  # fmt: skip
    for key, names in sizes:
        if (value := _first(config, *names)) is not None:
            out[f"{a}.{key}"] = _number(value)
    if config.get("is_causal") is False:
        out[f"{a}.attention.causal"] = kv.boolean(False)
    _rope_keys(config, a, out)
    epsilons: Settings = (
        ("attention.layer_norm_rms_epsilon", ("rms_norm_eps", "norm_eps")),
        ("attention.layer_norm_epsilon", ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")),
    )
    for key, names in epsilons:
        if (value := _first(config, *names)) is not None:
            out[f"{a}.{key}"] = kv.f32(value)
    counts: Settings = (
        ("expert_count", ("num_local_experts", "num_experts", "n_routed_experts")),
        ("expert_used_count", ("num_experts_per_tok", "num_experts_per_token", "top_k_experts")),
        ("expert_group_count", ("n_group",)),
        ("expert_group_used_count", ("topk_group",)),
    )
    for key, names in counts:
        if (value := _first(config, *names)) is not None:
            out[f"{a}.{key}"] = _number(value)
    score = _first(config, "score_function", "scoring_func", "score_func")
    if score is not None:
        functions = {"softmax": 1, "sigmoid": 2}
        if score not in functions:
            raise UsageError(f"llama.cpp knows no expert gating by {score!r}")
        out[f"{a}.expert_gating_func"] = kv.u32(functions[score])
    if (value := config.get("head_dim")) is not None:
        out[f"{a}.attention.key_length"] = kv.u32(value)
        out[f"{a}.attention.value_length"] = kv.u32(value)


def _rope_keys(config: Config, a: str, out: Fields) -> None:
    rope: Config = config.get("rope_parameters") or {}
    full: Config = rope.get("full_attention", rope)
    kind, factor = full.get("rope_type"), full.get("factor")
    if kind in ("linear", "yarn") and factor is not None:
        out[f"{a}.rope.scaling.type"] = kv.text(kind)
        out[f"{a}.rope.scaling.factor"] = kv.f32(factor)
        if kind == "yarn":
            out[f"{a}.rope.scaling.original_context_length"] = kv.u32(_need(full, "original_max_position_embeddings"))
            for key, names in (
                ("yarn_ext_factor", ("extrapolation_factor",)), ("yarn_attn_factor", ("attention_factor",
                "attn_factor")),
                ("yarn_beta_fast", ("beta_fast",)), ("yarn_beta_slow", ("beta_slow",)),
            ):  # fmt: skip
                if (value := _first(full, *names)) is not None:
                    out[f"{a}.rope.scaling.{key}"] = kv.f32(value)
    elif kind in ("su", "longrope"):
        out[f"{a}.rope.scaling.type"] = kv.text("longrope")
    if (theta := full.get("rope_theta")) is not None:
        out[f"{a}.rope.freq_base"] = kv.f32(theta)
    if (theta := (rope.get("sliding_attention") or {}).get("rope_theta")) is not None:
        out[f"{a}.rope.freq_base_swa"] = kv.f32(theta)


def _head_dim(config: Config) -> int:
    found = config.get("head_dim")
    return int(found if found is not None else config["hidden_size"] // config["num_attention_heads"])


FILE_TYPE = "general.file_type"


def _llama(config: Config, a: str, file_type: int, out: Fields) -> None:
    _common(config, a, out)
    out[FILE_TYPE] = kv.u32(file_type)
    out[f"{a}.vocab_size"] = kv.u32(config["vocab_size"])
    out[f"{a}.rope.dimension_count"] = kv.u32(_head_dim(config))


def _plain(config: Config, a: str, file_type: int, out: Fields) -> None:
    _common(config, a, out)
    out[FILE_TYPE] = kv.u32(file_type)


def _qwen3moe(config: Config, a: str, file_type: int, out: Fields) -> None:
    _plain(config, a, file_type, out)
    for key, name in (
        ("expert_feed_forward_length", "moe_intermediate_size"),
        ("expert_shared_feed_forward_length", "shared_expert_intermediate_size"),
    ):
        if (value := config.get(name)) is not None:
            out[f"{a}.{key}"] = kv.u32(value)


def _gemma2(config: Config, a: str, file_type: int, out: Fields) -> None:
    for key, name in (
        ("context_length", "max_position_embeddings"), ("embedding_length", "hidden_size"),
        ("block_count", "num_hidden_layers"), ("feed_forward_length", "intermediate_size"),
        ("attention.head_count", "num_attention_heads"), ("attention.head_count_kv", "num_key_value_heads"),
    ):  # fmt: skip
        out[f"{a}.{key}"] = kv.u32(_need(config, name))
    out[f"{a}.attention.layer_norm_rms_epsilon"] = kv.f32(config["rms_norm_eps"])
    out[f"{a}.attention.key_length"] = out[f"{a}.attention.value_length"] = kv.u32(config["head_dim"])
    out[FILE_TYPE] = kv.u32(file_type)
    out[f"{a}.attn_logit_softcapping"] = kv.f32(_need(config, "attn_logit_softcapping"))
    out[f"{a}.final_logit_softcapping"] = kv.f32(_need(config, "final_logit_softcapping"))
    out[f"{a}.attention.sliding_window"] = kv.u32(_need(config, "sliding_window"))


def _gemma3(config: Config, a: str, file_type: int, out: Fields) -> None:
    _plain(config, a, file_type, out)
    out[f"{a}.attention.key_length"] = out[f"{a}.attention.value_length"] = kv.u32(config["head_dim"])
    if cap := config.get("final_logit_softcapping"):
        out[f"{a}.final_logit_softcapping"] = kv.f32(cap)
    if config.get("sliding_window_pattern") != 1:
        out[f"{a}.attention.sliding_window"] = kv.u32(_need(config, "sliding_window"))


def _phi3(config: Config, a: str, file_type: int, out: Fields) -> None:
    rope = config["rope_parameters"]
    n_embd, n_head = int(config["hidden_size"]), int(config["num_attention_heads"])
    dimensions = int(rope.get("partial_rotary_factor", 1.0) * n_embd) // n_head
    for key, value in (
        ("context_length", _need(config, "n_positions", "max_position_embeddings")),
        ("rope.scaling.original_context_length", _need(rope, "original_max_position_embeddings")),
        ("embedding_length", n_embd), ("feed_forward_length", config["intermediate_size"]),
        ("block_count", config["num_hidden_layers"]), ("attention.head_count", n_head),
        ("attention.head_count_kv", config["num_key_value_heads"]),
    ):  # fmt: skip
        out[f"{a}.{key}"] = kv.u32(value)
    out[f"{a}.attention.layer_norm_rms_epsilon"] = kv.f32(config["rms_norm_eps"])
    out[f"{a}.rope.dimension_count"] = kv.u32(dimensions)
    out[f"{a}.rope.freq_base"] = kv.f32(rope["rope_theta"])
    out[FILE_TYPE] = kv.u32(file_type)
    out[f"{a}.attention.sliding_window"] = kv.u32(config.get("sliding_window") or 0)  # 0 tells Phi-4 from Phi-3


def early_keys(architecture: str, config: Config) -> Fields:
    """Keys that the converter writes with the tensors it computes, and so before all others."""
    rope: Config = config.get("rope_parameters") or {}
    if architecture != "phi3" or not rope.get("long_factor"):
        return {}
    return {"phi3.rope.scaling.attn_factor": kv.f32(_long_attention_factor(config))}


def _long_attention_factor(config: Config) -> float:
    rope = config["rope_parameters"]
    original = rope["original_max_position_embeddings"]
    scale = config["max_position_embeddings"] / original
    if scale <= 1:
        return 1.0
    if rope.get("rope_type") == "yarn":
        return 0.1 * math.log(scale) + 1.0
    return math.sqrt(1 + math.log(scale) / math.log(original))


def _gpt2(config: Config, a: str, file_type: int, out: Fields) -> None:
    width = int(_need(config, "n_embd"))
    for key, value in (
        ("block_count", config["n_layer"]), ("context_length", _need(config, "n_ctx", "n_positions")),
        ("embedding_length", width), ("feed_forward_length", 4 * width), ("attention.head_count", config["n_head"]),
    ):  # fmt: skip
        out[f"{a}.{key}"] = kv.u32(value)
    out[f"{a}.attention.layer_norm_epsilon"] = kv.f32(config["layer_norm_epsilon"])
    out[FILE_TYPE] = kv.u32(file_type)


def _bert(config: Config, a: str, file_type: int, out: Fields) -> None:
    _plain(config, a, file_type, out)
    out[f"{a}.attention.causal"] = kv.boolean(False)


def _deepseek2(config: Config, a: str, file_type: int, out: Fields) -> None:
    config = {**config, "num_key_value_heads": 1}  # MLA runs as attention with one group
    _plain(config, a, file_type, out)
    has_experts = config.get("n_routed_experts") is not None
    dense = config.get("first_k_dense_replace")
    rank = config.get("kv_lora_rank", 512)
    rope_dim, nope_dim = config["qk_rope_head_dim"], config["qk_nope_head_dim"]
    out[f"{a}.leading_dense_block_count"] = kv.u32(
        dense if dense is not None else 0 if has_experts else config["num_hidden_layers"]
    )
    out[f"{a}.vocab_size"] = kv.u32(config["vocab_size"])
    if config.get("q_lora_rank") is not None:
        out[f"{a}.attention.q_lora_rank"] = kv.u32(config["q_lora_rank"])
    for key, value in (
        ("attention.kv_lora_rank", rank), ("attention.key_length", rank + rope_dim), ("attention.value_length", rank),
        ("attention.key_length_mla", nope_dim + rope_dim), ("attention.value_length_mla", config["v_head_dim"]),
        ("expert_feed_forward_length", _need(config, "moe_intermediate_size", "intermediate_size")),
    ):  # fmt: skip
        out[f"{a}.{key}"] = kv.u32(value)
    if has_experts:
        out[f"{a}.expert_count"] = kv.u32(config["n_routed_experts"])
    out[f"{a}.expert_shared_count"] = kv.u32(config.get("n_shared_experts") or 0)
    if config.get("routed_scaling_factor") is not None:
        out[f"{a}.expert_weights_scale"] = kv.f32(config["routed_scaling_factor"])
    if config.get("norm_topk_prob"):
        out[f"{a}.expert_weights_norm"] = kv.boolean(True)
    out[f"{a}.rope.dimension_count"] = kv.u32(rope_dim)
    if (scale := config["rope_parameters"].get("mscale_all_dim")) is not None:
        out[f"{a}.rope.scaling.yarn_log_multiplier"] = kv.f32(0.1 * scale)


Writer = Callable[[Config, str, int, Fields], None]
WRITERS: Mapping[str, tuple[str, Writer]] = MappingProxyType(
    {
        "llama": ("llama", _llama), "mixtral": ("llama", _llama), "qwen2": ("qwen2", _plain), "qwen3": ("qwen3",
        _plain),
        "qwen3moe": ("qwen3moe", _qwen3moe), "gemma2": ("gemma2", _gemma2), "gemma3": ("gemma3", _gemma3),
        "phi3": ("phi3", _phi3), "gpt2": ("gpt2", _gpt2), "bert": ("bert", _bert), "deepseek2": ("deepseek2",
        _deepseek2),
    }
)  # fmt: skip
"""Architecture table -> (GGUF's name for it, what writes its keys)."""


def model_keys(architecture: str, config: Config, file_type: int) -> Fields:
    """The keys of a model. `config` as `normalised` gives it. Raises UsageError where it lacks what llama.cpp needs."""
    name, writer = WRITERS[architecture]
    out: Fields = {}
    try:
        writer(config, name, file_type, out)
    except KeyError as error:
        raise UsageError(f"config.json lacks {error.args[0]}, which GGUF needs") from error
    except (TypeError, ValueError, OverflowError) as error:
        raise UsageError(f"config.json holds a setting that makes no sense: {error}") from error
    return out


POOLING = {"mean": 1, "cls": 2, "lasttoken": 3}
POOLED = ("bert", "qwen2", "qwen3", "qwen3moe")
"""Architectures that are also embedding models: sentence-transformers' pooling is written."""


def pooling_key(architecture: str, pooling: Config | None) -> Fields:
    """`ARCH.pooling_type` from the config of a sentence-transformers pooling module."""
    if architecture not in ("bert", "qwen2", "qwen3") or pooling is None:
        return {}
    chosen = next((word for word, key in (("mean", "mean_tokens"), ("cls", "cls_token"), ("lasttoken", "lasttoken"))
                   if pooling.get(f"pooling_mode_{key}")), pooling.get("pooling_mode"))  # fmt: skip
    if chosen not in POOLING:
        raise UsageError(
            "the pooling of this model is none that llama.cpp has", hint="mean, cls and last token are known"
        )
    return {f"{WRITERS[architecture][0]}.pooling_type": kv.u32(POOLING[chosen])}


def rope_tensors(architecture: str, config: Config) -> dict[str, list[float]]:
    """Tensors that the converter computes from the config: float32 divisors of the rotary frequencies."""
    rope: Config = config.get("rope_parameters") or {}
    full: Config = rope.get("full_attention", rope)
    if architecture in ("llama", "mixtral") and str(full.get("rope_type", "")).lower() == "llama3":
        return {"rope_freqs.weight": _llama3_factors(full, _head_dim(config))}
    if architecture == "phi3" and rope.get("long_factor"):
        return {"rope_factors_long.weight": rope["long_factor"], "rope_factors_short.weight": rope["short_factor"]}
    return {}


def _llama3_factors(rope: Config, dimensions: int) -> list[float]:
    """1 for short wavelengths, `factor` for long ones, between them a smooth step.

    In float32, and scalars divided by tensors as torch does it, by the reciprocal; torch's power differs from the
    rounded one by one unit in the last place for about one setting in a hundred.
    """
    import numpy as np

    one = np.float32(1)
    exponents = np.arange(0, dimensions, 2, dtype=np.float32) / np.float32(dimensions)
    powers = np.float64(rope.get("rope_theta", 10000.0)) ** exponents.astype(np.float64)
    frequencies = one / powers.astype(np.float32)
    factor, low, high = rope.get("factor", 8.0), rope.get("low_freq_factor", 1.0), rope.get("high_freq_factor", 4.0)
    original = rope.get("original_max_position_embeddings", 8192)
    out: list[float] = []
    for frequency in frequencies:
        wavelength = (one / frequency) * np.float32(2 * math.pi)
        if wavelength < original / high:
            out.append(1.0)
        elif wavelength > original / low:
            out.append(float(factor))
        else:
            smooth = ((one / wavelength) * np.float32(original) - np.float32(low)) / np.float32(high - low)
            out.append(float(one / ((one - smooth) / np.float32(factor) + smooth)))
    return out
