"""GGML, GGMF and GGJT files as GGUF would have them: tensors renamed, keys from the few numbers they carry.

What such a file does not say is the epsilon of its norms and the context length. They are put in as the upgrader of
llama.cpp does (5e-6 and 2048), and said to be: Llama 1 has 1e-6, Llama 2 has 1e-5.
"""

from __future__ import annotations

import re
from dataclasses import replace

from anyckpt.core.checkpoint import Checkpoint
from anyckpt.core.ggml.op import dequantize
from anyckpt.core.ggml.types import ID_OF
from anyckpt.core.tensor import Tensor
from anyckpt.finding import Finding, fail
from anyckpt.formats.gguf import kv
from anyckpt.formats.gguf.kv import F32, I32, STRING, Field, Metadata
from anyckpt.formats.gguf.legacy import Legacy
from anyckpt.formats.gguf.vocab import BYTE, CONTROL, NORMAL, SPACE, UNKNOWN
from anyckpt.io.paths import printable

EPSILON = 5e-6
CONTEXT = 2048
NAMES = {
    "tok_embeddings.weight": "token_embd.weight", "norm.weight": "output_norm.weight", "output.weight": "output.weight",
    "attention.wq.weight": "attn_q.weight", "attention.wk.weight": "attn_k.weight",
    "attention.wv.weight": "attn_v.weight",
    "attention.wo.weight": "attn_output.weight", "attention_norm.weight": "attn_norm.weight",
    "feed_forward.w1.weight": "ffn_gate.weight", "feed_forward.w2.weight": "ffn_down.weight",
    "feed_forward.w3.weight": "ffn_up.weight", "ffn_norm.weight": "ffn_norm.weight",
}  # fmt: skip
"""Meta's name, without the layer -> GGUF's."""
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")


def upgraded(checkpoint: Checkpoint, notes: list[Finding]) -> Checkpoint:
    """The checkpoint with GGUF's names and keys. Raises CheckpointError [unmapped-tensor] for a name of another
    model.
    """
    legacy: Legacy = checkpoint.facts["ggml"]
    weights: dict[str, Tensor] = {}
    for name, tensor in checkpoint.weights.items():
        match = _LAYER.fullmatch(name)
        known = NAMES.get(match[2] if match else name)
        if known is None:
            raise fail(
                "unmapped-tensor",
                f"{printable(name)} is in no Llama: only Llama models are upgraded",
                where=checkpoint.path,
            )
        weights[f"blk.{match[1]}.{known}" if match else known] = _modern(tensor)
    notes.append(
        Finding(
            "inferred", "note",
            f"the file does not say the epsilon of its norms nor the context length: {EPSILON:g} and "
            f"{CONTEXT} are written", checkpoint.path,
            "if they are others: anyckpt set FILE llama.attention.layer_norm_rms_epsilon=1e-6",
        )
    )  # fmt: skip
    metadata = Metadata(_keys(checkpoint.path, legacy, weights))
    return replace(checkpoint, weights=weights, facts={"gguf": metadata, "container": checkpoint.facts["container"]})


def _modern(tensor: Tensor) -> Tensor:
    """Blocks that no reader knows any more as the float32 values they stand for."""
    return tensor if tensor.dtype.name in ID_OF else dequantize(tensor)


def _keys(path: str, legacy: Legacy, weights: dict[str, Tensor]) -> dict[str, Field]:
    s = legacy.settings
    head_dim = s["n_embd"] // max(1, s["n_head"])
    keys = weights.get("blk.0.attn_k.weight")
    gate = weights.get("blk.0.ffn_gate.weight")
    n_kv = keys.shape[0] // head_dim if keys is not None and head_dim else s["n_head"]
    fields: dict[str, Field] = {"general.architecture": kv.text("llama"), "general.type": kv.text("model")}
    fields["general.name"] = kv.text(re.split(r"[/\\]", path)[-1].rpartition(".")[0] or "llama")
    numbers = {
        "context_length": CONTEXT, "embedding_length": s["n_embd"], "block_count": s["n_layer"],
        "feed_forward_length": gate.shape[0] if gate is not None else 0, "rope.dimension_count": s["n_rot"],
        "attention.head_count": s["n_head"], "attention.head_count_kv": n_kv, "vocab_size": s["n_vocab"],
    }  # fmt: skip
    fields |= {f"llama.{key}": kv.u32(value) for key, value in numbers.items()}
    fields["llama.attention.layer_norm_rms_epsilon"] = kv.f32(EPSILON)
    fields["general.file_type"] = kv.u32(s["ftype"] % 1000)
    fields["general.quantization_version"] = kv.u32(2)
    tokens, kinds = _vocabulary(legacy)
    fields["tokenizer.ggml.model"] = kv.text("llama")
    fields["tokenizer.ggml.tokens"] = kv.array(STRING, tokens)
    fields["tokenizer.ggml.scores"] = kv.array(F32, list(legacy.scores or [0.0] * len(tokens)))
    fields["tokenizer.ggml.token_type"] = kv.array(I32, kinds)
    for name, token in (("bos", 1), ("eos", 2), ("unknown", 0)):
        fields[f"tokenizer.ggml.{name}_token_id"] = kv.u32(token)
    return fields


def _vocabulary(legacy: Legacy) -> tuple[list[bytes], list[int]]:
    """Tokens and kinds: control pieces are empty there, spaces plain, byte pieces the bare byte."""
    tokens, kinds = [], []
    named = {0: (b"<unk>", UNKNOWN), 1: (b"<s>", CONTROL), 2: (b"</s>", CONTROL)}
    for i, raw in enumerate(legacy.tokens):
        token, kind = raw.replace(b" ", SPACE.encode()), NORMAL
        if i in named:
            token, kind = named[i]
        elif not raw:
            token, kind = f"<control {i}>".encode(), CONTROL
        elif i < 259 and len(raw) == 1:
            token, kind = f"<0x{raw[0]:02X}>".encode(), BYTE
        tokens.append(token)
        kinds.append(kind)
    return tokens, kinds
