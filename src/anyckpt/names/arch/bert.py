"""BERT encoders, as llama.cpp takes them for embeddings: without pooler and heads."""

from __future__ import annotations

from anyckpt.names.arch.table import Architecture, Rule


def _pair(hf: str, gguf: str) -> tuple[Rule, Rule]:
    return Rule((f"{hf}.weight",), f"{gguf}.weight"), Rule((f"{hf}.bias",), f"{gguf}.bias")


LAYER, BLOCK = "encoder.layer.{layer}.", "blk.{layer}."
ARCHITECTURE = Architecture(
    "bert", ("bert",), ("BertModel", "BertForMaskedLM", "BertForSequenceClassification"),
    gguf=(
        Rule(("embeddings.word_embeddings.weight",), "token_embd.weight"),
        Rule(("embeddings.position_embeddings.weight",), "position_embd.weight"),
        Rule(("embeddings.token_type_embeddings.weight",), "token_types.weight"),
        *_pair("embeddings.LayerNorm", "token_embd_norm"),
        *_pair(LAYER + "attention.self.query", BLOCK + "attn_q"),
        *_pair(LAYER + "attention.self.key", BLOCK + "attn_k"),
        *_pair(LAYER + "attention.self.value", BLOCK + "attn_v"),
        *_pair(LAYER + "attention.output.dense", BLOCK + "attn_output"),
        *_pair(LAYER + "attention.output.LayerNorm", BLOCK + "attn_output_norm"),
        *_pair(LAYER + "intermediate.dense", BLOCK + "ffn_up"), *_pair(LAYER + "output.dense", BLOCK + "ffn_down"),
        *_pair(LAYER + "output.LayerNorm", BLOCK + "layer_output_norm"),
    ),
    prefix="bert.", ignored=("embeddings.position_ids", "pooler.dense.*", "cls.predictions*", "cls.seq_relationship*"),
)  # fmt: skip
