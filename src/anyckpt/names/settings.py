"""The sizes and choices of a model as its two configs tell them: Hugging Face's config.json and Megatron's arguments.

Tables first; functions only for what is not one key beside another: grouped queries, head size, rotary embedding, ties.
Arguments of NeMo (YAML) and of Megatron-Bridge are brought to Megatron-LM's own names before (`plain_arguments`).
Facts: megatron/training/arguments.py of core 0.16, transformers 5.24 configuration files, NeMo 1.23 and 2.4 configs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from anyckpt.errors import UsageError
from anyckpt.names.arch.table import Architecture, Setting

DECODER = (
    Setting("num_hidden_layers", "num_layers"),
    Setting("hidden_size", "hidden_size"),
    Setting("intermediate_size", "ffn_hidden_size"),
    Setting("num_attention_heads", "num_attention_heads"),
    Setting("max_position_embeddings", "max_position_embeddings", 2048),
    Setting("rms_norm_eps", "layernorm_epsilon", 1e-6),
)
GPT2 = (
    Setting("n_layer", "num_layers", 12),
    Setting("n_embd", "hidden_size", 768),
    Setting("n_inner", "ffn_hidden_size"),
    Setting("n_head", "num_attention_heads", 12),
    Setting("n_positions", "max_position_embeddings", 1024),
    Setting("layer_norm_epsilon", "layernorm_epsilon", 1e-5),
)
MIXTRAL = (Setting("num_local_experts", "num_experts", 8), Setting("num_experts_per_tok", "moe_router_topk", 2))
QWEN_EXPERTS = (
    Setting("num_experts", "num_experts", 128, also="num_local_experts"),  # transformers 4 and 5
    Setting("num_experts_per_tok", "moe_router_topk", 8),
    Setting("moe_intermediate_size", "moe_ffn_hidden_size", 768),
)

GATED: Mapping[str, Any] = {
    "swiglu": True, "normalization": "RMSNorm", "position_embedding_type": "rope", "add_qkv_bias": False,
    "qk_layernorm": False, "num_experts": None, "multi_latent_attention": False,
    "moe_shared_expert_intermediate_size": None,
}  # fmt: skip
EXPERTS: Mapping[str, Any] = {"num_experts": ...}
"""`...` stands for any value but None."""
GPT2_IMPLIED: Mapping[str, Any] = {
    "swiglu": False, "normalization": "LayerNorm", "position_embedding_type": "learned_absolute",
    "num_experts": None, "multi_latent_attention": False,
}  # fmt: skip
SILU: Mapping[str, Any] = {"hidden_act": "silu"}

DEFAULTS: Mapping[str, Any] = {
    "swiglu": False, "normalization": "LayerNorm", "position_embedding_type": "learned_absolute",
    "add_qkv_bias": False, "qk_layernorm": False, "multi_latent_attention": False, "add_bias_linear": True,
    "layernorm_epsilon": 1e-5, "rotary_base": 10000, "rotary_percent": 1.0,
}  # fmt: skip
"""What Megatron takes where an option is not given."""

_NEMO: Mapping[str, str] = {
    "num_moe_experts": "num_experts", "rotary_percentage": "rotary_percent", "bias": "add_bias_linear",
    "encoder_seq_length": "seq_length", "gated_linear_unit": "swiglu",
}  # fmt: skip
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""What Megatron's `--use-rope-scaling` has built in (core/models/common/embeddings/rotary_pos_embedding.py)."""


def plain_arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    """Megatron-LM's own arguments, from those or from a config of NeMo or Megatron-Bridge."""
    args = {_NEMO.get(k, k) if _NEMO.get(k, k) == k or _NEMO[k] not in config else k: v for k, v in config.items()}
    activation = args.get("activation")
    if isinstance(activation, str):
        args["swiglu"] = activation.endswith("swiglu")
    norm = args.get("normalization")
    if isinstance(norm, str):
        args["normalization"] = {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm", "layernorm1p": "LayerNorm"}.get(
            norm.lower(), norm
        )
        args["layernorm_zero_centered_gamma"] = norm.lower() == "layernorm1p" or bool(
            args.get("layernorm_zero_centered_gamma")
        )
    if args.get("use_rotary_position_embeddings") and "position_embedding_type" not in args:
        args["position_embedding_type"] = "rope"
    if "untie_embeddings_and_output_weights" not in args and "share_embeddings_and_output_weights" in args:
        args["untie_embeddings_and_output_weights"] = not args["share_embeddings_and_output_weights"]
    return args


def of_arguments(args: Mapping[str, Any], candidates: Sequence[Architecture]) -> Architecture:
    """The architecture whose implied arguments a run has. Raises UsageError, naming what differs, where none is."""
    misses: dict[str, list[str]] = {}
    for found in candidates:
        if not found.megatron or not found.implied:
            continue
        wrong = [key for key, value in found.implied.items() if not _has(args, key, value)]
        if not wrong:
            return found
        misses[found.name] = wrong
    name, wrong = min(misses.items(), key=lambda item: len(item[1]))
    shown = ", ".join(f"{key} {args.get(key, DEFAULTS.get(key))!r}" for key in wrong)
    raise UsageError(
        f"no architecture has these options; the nearest is {name}, but for {shown}",
        hint=f"there are: {', '.join(misses)}",
    )


def _has(args: Mapping[str, Any], key: str, value: Any) -> bool:
    own = args.get(key, DEFAULTS.get(key))
    if value is ...:
        return own is not None
    return own == value or (value is False and own is None)


def hf_config(args: Mapping[str, Any], architecture: Architecture, *, n_tokens: int, dtype: str) -> dict[str, Any]:
    """config.json of the model that `args` (plain) describe. `n_tokens`: rows of the vocabulary as it is written."""
    config: dict[str, Any] = {
        "architectures": [architecture.architectures[0]], "model_type": architecture.model_types[0],
        **architecture.constants,
    }  # fmt: skip
    for setting in architecture.settings:
        value = args.get(setting.megatron, DEFAULTS.get(setting.megatron))
        if value is None:
            raise UsageError(f"the options do not say {setting.megatron}, which {setting.hf} is made of")
        config |= {key: value for key in (setting.hf, setting.also) if key}
    n_heads, hidden = int(args["num_attention_heads"]), int(args["hidden_size"])
    config |= {
        "vocab_size": n_tokens, "tie_word_embeddings": not args.get("untie_embeddings_and_output_weights", False),
        "dtype": dtype, "torch_dtype": dtype,
    }  # fmt: skip
    if architecture.implied.get("position_embedding_type") != "rope":
        tanh = bool(args.get("bias_gelu_fusion") or args.get("openai_gelu"))
        config["activation_function"] = "gelu_new" if tanh else "gelu"
        return config
    config["num_key_value_heads"] = n_groups(args)
    config["head_dim"] = args.get("kv_channels") or hidden // n_heads
    biased = bool(args.get("add_bias_linear", DEFAULTS["add_bias_linear"]))
    if config["model_type"] in ("llama", "qwen3", "qwen3_moe"):
        config["attention_bias"] = biased
    if config["model_type"] == "llama":
        config["mlp_bias"] = biased
    config |= _rope_of(args)
    if config["model_type"] == "qwen3_moe":
        config["norm_topk_prob"] = not args.get("moe_router_pre_softmax", False)
    if "num_local_experts" in config or "num_experts" in config:
        config["router_aux_loss_coef"] = args.get("moe_aux_loss_coeff") or 0.0
    return config


def n_groups(args: Mapping[str, Any]) -> int:
    """Heads of keys and values."""
    groups = args.get("num_query_groups")
    grouped = args.get("group_query_attention", groups is not None)
    return int(groups) if grouped and groups else int(args["num_attention_heads"])


def _rope_of(args: Mapping[str, Any]) -> dict[str, Any]:
    """Both spellings: `rope_theta` is what transformers before 5 reads."""
    theta = float(args.get("rotary_base") or DEFAULTS["rotary_base"])
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if args.get("use_rope_scaling"):
        rope = {"rope_type": "llama3", "rope_theta": theta, "factor": float(args.get("rope_scaling_factor") or 8.0)}
        rope |= _LLAMA3
    out: dict[str, Any] = {"rope_theta": theta, "rope_parameters": rope}
    if rope["rope_type"] != "default":
        out["rope_scaling"] = {k: v for k, v in rope.items() if k != "rope_theta"}
    return out


def megatron_arguments(config: Mapping[str, Any], architecture: Architecture) -> tuple[dict[str, Any], list[str]]:
    """Megatron's arguments of the model that a config.json describes, and what of it they can't say."""
    lost: list[str] = []
    args: dict[str, Any] = {k: v for k, v in {**DEFAULTS, **architecture.implied}.items() if v is not ...}
    for setting in architecture.settings:
        value = config.get(setting.hf, config.get(setting.also))
        args[setting.megatron] = setting.default if value is None else value
    missing = [k for k in ("num_layers", "hidden_size", "num_attention_heads") if args.get(k) is None]
    if missing:
        raise UsageError(f"config.json does not say {', '.join(missing)}")
    args["ffn_hidden_size"] = args.get("ffn_hidden_size") or 4 * args["hidden_size"]
    n_heads = int(args["num_attention_heads"])
    groups = int(config.get("num_key_value_heads") or n_heads)
    args |= {
        "num_query_groups": groups, "group_query_attention": groups != n_heads,
        "kv_channels": config.get("head_dim") or args["hidden_size"] // n_heads,
        "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", _tied(architecture)),
        "seq_length": args["max_position_embeddings"], "encoder_seq_length": args["max_position_embeddings"],
        "use_legacy_models": False, "rotary_interleaved": False,
    }  # fmt: skip
    if architecture.implied.get("position_embedding_type") != "rope":
        activation = config.get("activation_function", "gelu_new")
        args |= {"openai_gelu": activation == "gelu_new", "bias_gelu_fusion": False, "add_bias_linear": True}
        if activation not in ("gelu", "gelu_new"):
            lost.append(f"the activation {activation}")
        return args, lost
    args["add_bias_linear"] = bool(config.get("attention_bias") and config.get("mlp_bias", config["attention_bias"]))
    args["use_rotary_position_embeddings"] = True
    if args.get("num_experts") is not None:
        normalised = config.get("norm_topk_prob", config.get("model_type") != "qwen3_moe")
        args |= {"moe_router_pre_softmax": not normalised, "moe_grouped_gemm": False,
                 "moe_ffn_hidden_size": args.get("moe_ffn_hidden_size") or args["ffn_hidden_size"]}  # fmt: skip
    _read_rope(config, args, lost)
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        lost.append(f"a sliding window of {config['sliding_window']} (give --window-size)")
    return args, lost


def _tied(architecture: Architecture) -> bool:
    """Whether a config of this kind that says nothing ties its embeddings: transformers' default of the class."""
    return architecture.name == "gpt2"


def _read_rope(config: Mapping[str, Any], args: dict[str, Any], lost: list[str]) -> None:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope = rope if isinstance(rope, Mapping) else {}
    theta = rope.get("rope_theta", config.get("rope_theta", 10000.0))
    args["rotary_base"] = int(theta) if float(theta).is_integer() else theta
    args["rotary_percent"] = config.get("partial_rotary_factor", 1.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "llama3":
        args |= {"use_rope_scaling": True, "rope_scaling_factor": rope.get("factor", 8.0)}
        if any(rope.get(k, v) != v for k, v in _LLAMA3.items()):
            lost.append("its rope scaling's frequencies (Megatron has Llama 3's built in)")
    elif kind not in ("default", None):
        lost.append(f"rope scaling of type {kind}")
