"""Tied weights: several names for one tensor. Known from the storage they share, from the config, or from their bytes.

The three differ in what they prove. A shared storage is a tie in the file. A config's `tie_word_embeddings` is a tie in
the model: the head is what the embedding is, whatever a file holds under its name, and mostly the file leaves it out.
Equal bytes are only equal bytes (two fresh biases are as equal), so they are looked for on request.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from anyckpt.core.box import slabs
from anyckpt.core.read import read_box
from anyckpt.core.source import File, Span
from anyckpt.core.tensor import Tensor
from anyckpt.names.versions import base_prefixes

# tied name -> name that holds the bytes, as transformers 5.24 `_tied_weights_keys` has them. `{base}` is the base
# model's prefix. The first row of a head whose source is there is the tie.
TIED_WORD_EMBEDDINGS: tuple[tuple[str, str], ...] = (
    ("lm_head.weight", "model.embed_tokens.weight"),
    ("lm_head.weight", "model.language_model.embed_tokens.weight"),
    ("lm_head.weight", "language_model.model.embed_tokens.weight"),
    ("lm_head.weight", "model.shared.weight"),
    ("lm_head.weight", "led.shared.weight"),
    ("lm_head.weight", "shared.weight"),
    ("lm_head.weight", "model.decoder.embed_tokens.weight"),
    ("lm_head.weight", "transformer.wte.weight"),
    ("lm_head.weight", "transformer.word_embeddings.weight"),
    ("lm_head.weight", "transformer.tokens_embed.weight"),
    ("lm_head.weight", "transformer.w.weight"),
    ("lm_head.weight", "backbone.embeddings.weight"),
    ("lm_head.weight", "gpt_neox.embed_in.weight"),
    ("embed_out.weight", "gpt_neox.embed_in.weight"),
    ("lm_head.decoder.weight", "{base}.embeddings.word_embeddings.weight"),
    ("cls.predictions.decoder.weight", "{base}.embeddings.word_embeddings.weight"),
    ("predictions.decoder.weight", "albert.embeddings.word_embeddings.weight"),
    ("generator_lm_head.weight", "{base}.embeddings.word_embeddings.weight"),
    ("vocab_projector.weight", "distilbert.embeddings.word_embeddings.weight"),
    ("decoder.weight", "model.embeddings.tok_embeddings.weight"),
    ("proj_out.weight", "model.decoder.embed_tokens.weight"),
    ("output_projection.weight", "{base}.embed_tokens.weight"),
    ("lm_loss.weight", "transformer.word_embedding.weight"),
    ("head.weight", "rwkv.embeddings.weight"),
)
# Tied by the model's own structure, whatever tie_word_embeddings says.
ALWAYS_TIED: tuple[tuple[str, str], ...] = (
    ("encoder.embed_tokens.weight", "shared.weight"),
    ("decoder.embed_tokens.weight", "shared.weight"),
    ("model.encoder.embed_tokens.weight", "model.shared.weight"),
    ("model.decoder.embed_tokens.weight", "model.shared.weight"),
    ("cls.predictions.decoder.bias", "cls.predictions.bias"),
    ("lm_head.decoder.bias", "lm_head.bias"),
    ("predictions.decoder.bias", "predictions.bias"),
)
# The first segment of a model type's head, where it is not lm_head.
HEADS: Mapping[str, str] = {
    "whisper": "proj_out", "gpt_neox": "embed_out", "rwkv": "head", "xlnet": "lm_loss", "albert": "predictions",
    "distilbert": "vocab_projector", "electra": "generator_lm_head", "convbert": "generator_lm_head",
    "biogpt": "output_projection", "modernbert": "decoder",
    **dict.fromkeys(
        """bert megatron-bert big_bird deberta deberta-v2 mobilebert layoutlm ernie roformer nystromformer fnet
        squeezebert""".split(),
        "cls",
    ),
}  # fmt: skip
HEADED = ("LMHead", "ForCausalLM", "ForMaskedLM", "ForConditionalGeneration", "ForPreTraining", "Seq2SeqLM")
FIRST_BYTES = 64 << 10  # what is hashed first: nearly all tensors of one shape differ within it


@dataclass(frozen=True, slots=True)
class Tie:
    """`tied` is another name of `kept`. `why`: "storage", "config" or "bytes". `is_present`: the file has both."""

    tied: str
    kept: str
    why: str
    is_present: bool = True


def storage_identity(tensor: Tensor) -> Hashable | None:
    """What two descriptions of the same bytes in the same layout have in common; None where that can't be told.

    Files are told apart by device and inode where they are local, so two openings of one file agree.
    """
    if tensor.op is not None or not tensor.pieces:
        return None
    parts: list[Hashable] = []
    for piece in tensor.pieces:
        source = piece.source
        if not isinstance(source, Span):
            return None
        file, offset = file_identity(source.file)
        box = None if piece.box is None else (piece.box.start, piece.box.stop)
        parts.append((file, offset + source.offset, source.swap, box, piece.strides))
    return (tensor.dtype.name, tensor.shape, tuple(parts))


def file_identity(file: File) -> tuple[Hashable, int]:
    """The file on disk that holds `file`'s bytes as they are, as (identity, offset in it); else `file` itself."""
    base, offset = file.on_disk() or (file, 0)
    fingerprint = getattr(base, "fingerprint", None)
    return (fingerprint, offset) if fingerprint is not None else (id(base), offset)


def by_storage(weights: Mapping[str, Tensor]) -> dict[str, str]:
    """Names that describe the same bytes: later name -> first name."""
    first: dict[Hashable, str] = {}
    tied = {}
    for name, tensor in weights.items():
        key = storage_identity(tensor) if tensor.size else None
        if key is not None and (kept := first.setdefault(key, name)) != name:
            tied[name] = kept
    return tied


def by_config(config: Mapping[str, Any] | None, weights: Mapping[str, Tensor]) -> tuple[Tie, ...]:
    """Ties that the config of a Hugging Face model declares, present in `weights` or left out of it.

    A config without `tie_word_embeddings` means True: transformers 4 leaves out what equals that default. A head that
    is not in `weights` is told of only where `architectures` has one.
    """
    if not config:
        return ()
    text = config.get("text_config")
    flag = config.get("tie_word_embeddings")
    if flag is None and isinstance(text, Mapping):
        flag = text.get("tie_word_embeddings")
    is_tied = flag is not False
    architectures = config.get("architectures") or ()
    is_headed = any(isinstance(a, str) and any(word in a for word in HEADED) for a in architectures)
    found: dict[str, Tie] = {}
    for tied, kept in (*(TIED_WORD_EMBEDDINGS if is_tied else ()), *ALWAYS_TIED):
        for source in _bases(kept, config):
            if tied in found or source not in weights or tied == source:
                continue
            other = weights.get(tied)
            if other is None and not (is_headed and _is_head_of(tied, config)):
                continue
            if other is None or other.shape == weights[source].shape:
                found[tied] = Tie(tied, source, "config", other is not None)
    return tuple(found.values())


def _bases(kept: str, config: Mapping[str, Any]) -> list[str]:
    if "{base}" not in kept:
        return [kept]
    return [kept.format(base=prefix.rstrip(".")) for prefix in base_prefixes(config)]


def _is_head_of(tied: str, config: Mapping[str, Any]) -> bool:
    """Whether a head that the file leaves out has this name: several rows share one source."""
    return tied.split(".")[0] == HEADS.get(str(config.get("model_type", "")), "lm_head")


def by_bytes(weights: Mapping[str, Tensor], *, max_elements: int = 1 << 20) -> dict[str, str]:
    """Names whose tensors have the same dtype, shape and bytes: later name -> first name. Reads what may be equal.

    Memory stays at a slab of `max_elements`. Tensors of one element are left out: equal scalars mean nothing.
    """
    groups: dict[Hashable, list[str]] = {}
    for name, tensor in weights.items():
        if tensor.size > 1 and tensor.is_stored:
            groups.setdefault((tensor.dtype.name, tensor.shape), []).append(name)
    tied: dict[str, str] = {}
    for names in groups.values():
        for few in _same_digest(weights, names, FIRST_BYTES, 1) if len(names) > 1 else []:
            for same in _same_digest(weights, few, max_elements * 8, None):
                tied.update(dict.fromkeys(same[1:], same[0]))
    return tied


def _same_digest(
    weights: Mapping[str, Tensor], names: list[str], slab_bytes: int, n_slabs: int | None
) -> list[list[str]]:
    """Groups of two and more names that agree in their first `n_slabs` slabs (all where None)."""
    by_digest: dict[bytes, list[str]] = {}
    for name in names:
        tensor = weights[name]
        digest = hashlib.blake2b(digest_size=20)
        for i, box in enumerate(slabs(tensor.shape, max(1, slab_bytes // max(1, tensor.dtype.itemsize)))):
            if n_slabs is not None and i >= n_slabs:
                break
            digest.update(np.ascontiguousarray(read_box(tensor, box)).reshape(-1).view(np.uint8).data)
        by_digest.setdefault(digest.digest(), []).append(name)
    return [group for group in by_digest.values() if len(group) > 1]
