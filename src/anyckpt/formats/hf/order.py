"""The order in which a model's class defines its parameters, where files list them by name.

An optimizer's state gives numbers, counted along `model.named_parameters()`; a safetensors file lists its tensors by
dtype and name. Each class below is its modules' names in the order of its `__init__` (transformers 5.24,
`modeling_*.py`), what stands in the repeated blocks between bars. A name goes where the first entry found in it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from anyckpt.errors import UsageError

if TYPE_CHECKING:
    from anyckpt.core.checkpoint import Checkpoint

_LLAMA = """
embed_tokens
| self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj self_attn.q_norm self_attn.k_norm
  mlp.gate. mlp.experts mlp.gate_proj mlp.up_proj mlp.down_proj
  input_layernorm post_attention_layernorm pre_feedforward_layernorm post_feedforward_layernorm
| model.norm lm_head
"""
_PHI3 = """
embed_tokens
| self_attn.o_proj self_attn.qkv_proj mlp.gate_up_proj mlp.down_proj input_layernorm post_attention_layernorm
| model.norm lm_head
"""
_GPT2 = "wte wpe | ln_1 attn.c_attn attn.c_proj ln_2 mlp.c_fc mlp.c_proj | ln_f lm_head"
_GPT_NEOX = """
embed_in
| input_layernorm post_attention_layernorm attention.query_key_value attention.dense mlp.dense_h_to_4h
  mlp.dense_4h_to_h
| final_layer_norm embed_out lm_head
"""
_OPT = """
embed_tokens embed_positions project_out project_in decoder.final_layer_norm
| self_attn.k_proj self_attn.v_proj self_attn.q_proj self_attn.out_proj self_attn_layer_norm fc1 fc2 final_layer_norm
| lm_head
"""
_BERT = """
word_embeddings position_embeddings token_type_embeddings embeddings.LayerNorm
| attention.self.query attention.self.key attention.self.value attention.output.dense attention.output.LayerNorm
  intermediate.dense output.dense output.LayerNorm
| pooler cls.predictions.bias cls.predictions.transform.dense cls.predictions.transform.LayerNorm
  cls.seq_relationship classifier qa_outputs
"""

_CLASSES: dict[str, str] = {
    **dict.fromkeys("llama mistral qwen2 qwen3 gemma gemma2 gemma3_text".split(), _LLAMA),
    "phi3": _PHI3, "gpt2": _GPT2, "gpt_neox": _GPT_NEOX, "opt": _OPT, "bert": _BERT,
}  # fmt: skip
_BLOCK = re.compile(r"(?:^|\.)(?:layers|h|layer)\.(\d+)\.")
_NUMBER = re.compile(r"\.(\d+)(?=\.|$)")


def in_model_order(names: Iterable[str], config: Mapping[str, Any] | None) -> list[str] | None:
    """The names as the model lists them; None where its class is not in the table, or a name has no place in it.

    >>> in_model_order(["lm_head.weight", "model.norm.weight", "model.embed_tokens.weight"], {"model_type": "llama"})
    ['model.embed_tokens.weight', 'model.norm.weight', 'lm_head.weight']
    """
    listed = _CLASSES.get(str((config or {}).get("model_type")))
    if listed is None:
        return None
    before, inside, after = (part.split() for part in listed.split("|"))
    places = [*before, *inside, *after]
    keyed: list[tuple[tuple[Any, ...], str]] = []
    for name in names:
        place = next((i for i, part in enumerate(places) if part in name), None)
        if place is None:
            return None
        block = _BLOCK.search(name)
        outer = (len(before), int(block[1]), place) if block else (place, -1, 0)
        numbers = tuple(int(n) for n in _NUMBER.findall(name))
        keyed.append(((*outer, numbers, name.endswith("bias"), name), name))
    return [name for _, name in sorted(keyed)]


def order_of(reference: Checkpoint) -> list[str]:
    """The reference's tensors in its model's order, tied names once.

    Raises UsageError where it lists them by name and its model's class is not known.
    """
    names = [name for name in reference.weights if name not in reference.aliases]
    if reference.facts.get("container") != "safetensors":
        return names
    ordered = in_model_order(names, reference.config)
    if ordered is None:
        raise UsageError(
            "the reference lists its tensors by name, and their order in the model is not known",
            hint="name a reference that torch.save wrote (its order is the model's), or a JSON file {name: shape}",
        )
    return ordered
