"""Keys of a GGUF file -> config.json: the inverse of `hparams.py`, as far as the file knows.

What it does not know is said by the architecture itself (activation, class) or left to transformers' defaults.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from anyckpt.core.box import Shape
from anyckpt.errors import UsageError
from anyckpt.formats.gguf.hparams import rope_tensors
from anyckpt.formats.gguf.kv import Metadata

CONSTANTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"},
        "mixtral": {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_act": "silu"},
        "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu"},
        "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu"},
        "qwen3moe": {
            "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_act": "silu",
            "norm_topk_prob": True,
            "decoder_sparse_step": 1, "mlp_only_layers": [],
        },
        "gemma2": {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2",
        "hidden_activation": "gelu_pytorch_tanh"},
        "gemma3": {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh"},
        "phi3": {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "hidden_act": "silu"},
        "gpt2": {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "activation_function": "gelu_new"},
        "bert": {"architectures": ["BertModel"], "model_type": "bert", "hidden_act": "gelu"},
        "deepseek2": {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_act": "silu"},
    }
)  # fmt: skip
"""Architecture table -> what every model of it has in its config."""

SIZES: Sequence[tuple[str, str]] = (
    ("block_count", "num_hidden_layers"), ("context_length", "max_position_embeddings"), ("embedding_length",
    "hidden_size"),
    ("feed_forward_length", "intermediate_size"), ("attention.head_count", "num_attention_heads"),
    ("attention.head_count_kv", "num_key_value_heads"), ("attention.key_length", "head_dim"),
    ("attention.layer_norm_rms_epsilon", "rms_norm_eps"), ("attention.layer_norm_epsilon", "layer_norm_eps"),
    ("attention.sliding_window", "sliding_window"), ("attn_logit_softcapping", "attn_logit_softcapping"),
    ("final_logit_softcapping", "final_logit_softcapping"), ("expert_used_count", "num_experts_per_tok"),
    ("expert_feed_forward_length", "moe_intermediate_size"),
)  # fmt: skip
OTHER_NAMES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "gpt2": {
            "num_hidden_layers": "n_layer", "max_position_embeddings": "n_positions", "hidden_size": "n_embd",
            "num_attention_heads": "n_head", "layer_norm_eps": "layer_norm_epsilon", "intermediate_size": "n_inner",
        },
    }
)  # fmt: skip
EXPERT_COUNT = {"mixtral": "num_local_experts", "qwen3moe": "num_experts", "deepseek2": "n_routed_experts"}
TOKENS = (("bos", "bos"), ("eos", "eos"), ("padding", "pad"))


def table_of(metadata: Metadata) -> str:
    """The architecture table of a file: GGUF calls Mixtral a llama with experts. Raises UsageError for one without."""
    name = metadata.architecture
    if name == "llama" and metadata.number("llama.expert_count") > 0:
        return "mixtral"
    if name not in CONSTANTS:
        known = ", ".join(CONSTANTS)
        raise UsageError(f"no table for the architecture {name or '(none)'!r}", hint=f"there are: {known}")
    return name


def config_of(metadata: Metadata, shapes: Mapping[str, Shape], rope: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """config.json of a file.

    `shapes` of its tensors, under its names; `rope`: the values of `rope_freqs.weight` and its like, where it has them.
    """
    table = table_of(metadata)
    out: dict[str, Any] = dict(CONSTANTS[table])
    renamed = OTHER_NAMES.get(table, {})
    for key, name in SIZES:
        value = metadata.of_model(key)
        if value is not None:
            out[renamed.get(name, name)] = _plain(value)
    embedding = shapes.get("token_embd.weight")
    if embedding:
        out["vocab_size"] = embedding[0]
    if (n_experts := metadata.of_model("expert_count")) and table in EXPERT_COUNT:
        out[EXPERT_COUNT[table]] = int(n_experts)
    if table not in ("gpt2", "bert"):
        out["rope_parameters"] = _rope(metadata, table, out, rope)
    out["tie_word_embeddings"] = "output.weight" not in shapes
    _special(metadata, table, shapes, out)
    for key, name in TOKENS:
        value = metadata.get(f"tokenizer.ggml.{key}_token_id")
        out[f"{name}_token_id"] = None if value is None else int(value)
    return out


def _plain(value: Any) -> Any:
    """A number, or a list of them; float32 in as few digits as give it back."""
    if isinstance(value, float):
        import numpy as np

        return float(str(np.float32(value)))
    return value.tolist() if hasattr(value, "tolist") else value


def _rope(
    metadata: Metadata, table: str, config: dict[str, Any], rope: Mapping[str, Sequence[float]]
) -> dict[str, Any]:
    base = {"rope_theta": _plain(metadata.of_model("rope.freq_base", 10000.0)), "rope_type": "default"}
    kind = metadata.of_model("rope.scaling.type")
    if kind in ("linear", "yarn"):
        base |= {"rope_type": kind, "factor": _plain(metadata.of_model("rope.scaling.factor", 1.0))}
        for key, name in (
            ("original_context_length", "original_max_position_embeddings"), ("yarn_beta_fast", "beta_fast"),
            ("yarn_beta_slow", "beta_slow"), ("yarn_ext_factor", "extrapolation_factor"),
            ("yarn_attn_factor", "attention_factor"),
        ):  # fmt: skip
            if (value := metadata.of_model(f"rope.scaling.{key}")) is not None:
                base[name] = _plain(value)
        if (scale := metadata.of_model("rope.scaling.yarn_log_multiplier")) is not None:
            base["mscale"] = base["mscale_all_dim"] = _plain(scale * 10)
    if table == "phi3":
        dimensions, heads = metadata.of_model("rope.dimension_count"), config["num_attention_heads"]
        base["partial_rotary_factor"] = dimensions * heads / config["hidden_size"] if dimensions else 1.0
        original = metadata.of_model("rope.scaling.original_context_length")
        if original is not None:
            base["original_max_position_embeddings"] = config["original_max_position_embeddings"] = original
        if "rope_factors_long.weight" in rope:
            base |= {
                "rope_type": "longrope", "long_factor": [_plain(float(v)) for v in rope["rope_factors_long.weight"]],
                "short_factor": [_plain(float(v)) for v in rope["rope_factors_short.weight"]],
            }  # fmt: skip
    if "rope_freqs.weight" in rope:
        base |= _llama3(table, base, config, list(rope["rope_freqs.weight"]))
    if table == "gemma3":
        local = _plain(metadata.of_model("rope.freq_base_swa", 10000.0))
        return {"full_attention": base, "sliding_attention": {"rope_type": "default", "rope_theta": local}}
    return base


def _llama3(table: str, base: dict[str, Any], config: dict[str, Any], values: list[float]) -> dict[str, Any]:
    """The settings that give these divisors. Raises UsageError where none of the usual ones do."""
    import numpy as np

    factor = max(values)
    for low, high in ((1.0, 4.0), (1.0, 2.0), (1.0, 8.0), (2.0, 4.0)):
        for original in (8192, *(1 << n for n in range(5, 21))):
            settings = {
                "rope_type": "llama3", "factor": _plain(float(factor)), "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }  # fmt: skip
            made = rope_tensors(table, {**config, "rope_parameters": {**base, **settings}}).get("rope_freqs.weight", [])
            if len(made) == len(values) and np.allclose(made, values, rtol=1e-5):
                return settings
    raise UsageError(
        "rope_freqs.weight is of no setting that is known", hint="leave it out: --exclude rope_freqs.weight"
    )


def _special(metadata: Metadata, table: str, shapes: Mapping[str, Shape], out: dict[str, Any]) -> None:
    """Settings that single families derive from tensors or from other keys."""
    has_bias = "blk.0.attn_q.bias" in shapes
    if table in ("llama", "qwen3", "qwen3moe", "gemma2", "gemma3"):
        out["attention_bias"] = has_bias
    if table == "llama":
        out["mlp_bias"] = "blk.0.ffn_gate.bias" in shapes
    if table in ("gemma2", "gemma3"):
        out["query_pre_attn_scalar"] = out.get("head_dim", 256)
    if table == "gemma3":
        n = int(out["num_hidden_layers"])
        out["layer_types"] = ["full_attention" if (i + 1) % 6 == 0 else "sliding_attention" for i in range(n)]
    if table == "phi3" and not out.get("sliding_window"):
        out["sliding_window"] = None
    if table == "gpt2":
        out["n_ctx"] = out["n_positions"]
        out["n_inner"] = None if out.get("n_inner") == 4 * out["n_embd"] else out.get("n_inner")
    if table == "bert":
        out["type_vocab_size"] = shapes["token_types.weight"][0] if "token_types.weight" in shapes else 2
    if table == "deepseek2":
        _deepseek(metadata, shapes, out)


def _deepseek(metadata: Metadata, shapes: Mapping[str, Shape], out: dict[str, Any]) -> None:
    rope_dim = int(metadata.of_model("rope.dimension_count", 64))
    out["num_key_value_heads"] = out["num_attention_heads"]
    out.pop("head_dim", None)
    out |= {
        "qk_rope_head_dim": rope_dim, "qk_nope_head_dim": int(metadata.of_model("attention.key_length_mla",
        0)) - rope_dim,
        "v_head_dim": int(metadata.of_model("attention.value_length_mla", 0)),
        "kv_lora_rank": int(metadata.of_model("attention.kv_lora_rank", 0)),
        "q_lora_rank": metadata.of_model("attention.q_lora_rank"),
        "n_shared_experts": int(metadata.of_model("expert_shared_count", 0)),
        "first_k_dense_replace": int(metadata.of_model("leading_dense_block_count", 0)),
        "routed_scaling_factor": _plain(metadata.of_model("expert_weights_scale", 1.0)),
        "norm_topk_prob": bool(metadata.of_model("expert_weights_norm", False)),
        "n_group": metadata.of_model("expert_group_count"), "topk_group": metadata.of_model("expert_group_used_count"),
    }  # fmt: skip
    is_v3 = any(name.endswith("exp_probs_b.bias") for name in shapes) or metadata.of_model("expert_gating_func") == 2
    if not is_v3:
        out |= {"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2"}
