"""Any checkpoint as GGUF has it: tensors under llama.cpp's names, in the types asked for, with all metadata.

    from Hugging Face names   by the architecture's table; keys from config.json and the tokenizer   `as_gguf`
    from GGUF                 keys as they are, tensors in other types
    from GGML, GGMF, GGJT     renamed, keys from the few numbers they carry
    from a PEFT adapter       llama.cpp's adapter
    `verbs/gguf_adapter.py`

The types are the converter's for f32, f16, bf16 and the quantizer's for all others; both in one pass from the source.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from anyckpt.core import ops
from anyckpt.core.checkpoint import Checkpoint
from anyckpt.core.dtypes import DTYPES
from anyckpt.core.ggml.op import dequantize, narrow, quantize
from anyckpt.core.ggml.types import BLOCK_TYPES, spelling
from anyckpt.core.tensor import Tensor, from_array
from anyckpt.errors import CheckpointError, Refused, UsageError
from anyckpt.finding import DEFAULT_SEVERITY, Finding
from anyckpt.formats.gguf import hparams, kv, mixture, naming, vocab
from anyckpt.formats.gguf.files import Files
from anyckpt.formats.gguf.kv import Field, Metadata
from anyckpt.formats.gguf.write import SPLIT_KEYS
from anyckpt.io.local import open_local
from anyckpt.io.paths import printable
from anyckpt.names.arch import find
from anyckpt.names.arch.table import Architecture
from anyckpt.names.prefixes import stripped

LOSSY_HINT = "quantize from the original weights, or accept the loss with --allow-lossy"
ALWAYS_F32 = ("ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight", "position_embd.weight", "token_types.weight")
"""Endings of tensors that the converter keeps in float32 whatever the output type."""


@dataclass(frozen=True, slots=True)
class GgufOptions:
    """`quant`: a file type of `mixture.FILE_TYPES` or auto. `tensor_types`: PATTERN=TYPE in order. `base`: an
    adapter's.
    """

    quant: str | None = None
    imatrix: str | os.PathLike[str] | None = None
    tensor_types: Sequence[str] = ()
    model_name: str | None = None
    pre: str | None = None
    allow_lossy: bool = False
    base: str | os.PathLike[str] | None = None

    def overrides(self) -> list[tuple[str, str]]:
        """`PATTERN=TYPE` taken apart. Raises UsageError for another form."""
        out = []
        for text in self.tensor_types:
            pattern, equals, kind = text.rpartition("=")
            if not equals or not pattern:
                raise UsageError(
                    f"--tensor-type {text!r} is not PATTERN=TYPE", hint="as in: --tensor-type ffn_down=q6_k"
                )
            out.append((pattern, mixture.type_named(kind)))
        return out


def as_gguf(checkpoint: Checkpoint, options: GgufOptions, notes: list[Finding]) -> Checkpoint:
    """The checkpoint as the GGUF writer takes it. Adds to `notes` what is worth knowing.

    Raises UsageError where the model or its tokenizer is not known, CheckpointError for tensors that no rule knows,
    Refused for a step that loses values unless `allow_lossy`.
    """
    held = checkpoint.facts.get("gguf")
    if isinstance(held, Metadata):
        return _from_gguf(checkpoint, held, options)
    if "ggml" in checkpoint.facts:
        from anyckpt.formats.gguf.upgrade import upgraded

        newer = upgraded(checkpoint, notes)
        return _from_gguf(newer, newer.facts["gguf"], options)
    if checkpoint.format == "peft":
        from anyckpt.verbs.gguf_adapter import adapter_as_gguf

        return adapter_as_gguf(checkpoint, options)
    return _from_hub(checkpoint, options, notes)


# --- from Hugging Face names ---


def _from_hub(checkpoint: Checkpoint, options: GgufOptions, notes: list[Finding]) -> Checkpoint:
    config = checkpoint.config
    if not config or not ("model_type" in config or "architectures" in config):
        raise UsageError(
            "GGUF needs to know the model, and there is no config.json beside these weights",
            hint="put the model's config.json (and tokenizer files) into the folder of the source",
        )
    table = find.of_config(config)
    full = hparams.normalised(config)
    files = Files.of(checkpoint.assets)
    mapped, ignored = _mapped(checkpoint, table, full)
    if ignored:
        notes.append(_note("lossy", f"GGUF has no place for {len(ignored)} tensors ({printable(ignored[0])} …)"))
    if table.name == "gemma3":
        mapped = _without_rows_beyond(mapped, files)
    extra = {
        name: from_array(np.asarray(values, np.float32))
        for name, values in hparams.rope_tensors(table.name, full).items()
    }
    _check_layer_types(table, full, notes)
    quant = (options.quant or "auto").lower()
    plain = "bf16" if (source := _main_float(mapped)) == "bfloat16" else "f16"
    name, file_type, _ = mixture.file_type(plain if quant == "auto" else quant)
    base = name if name in mixture.FLOATS else plain if source in ("bfloat16", "float16") else "f32"
    tensors = {**extra, **mapped}
    fields = _keys(checkpoint, table, full, files, tensors, file_type, options)
    targets = {n: _converter_type(n, t, mixture.FLOATS[base]) for n, t in tensors.items()}
    if name in mixture.FLOATS:
        cast = {n: _as_float(t, targets[n], options.allow_lossy) for n, t in tensors.items()}
        return _made(checkpoint, cast, Metadata(fields))
    fields = _marked(fields, file_type)
    return _made(checkpoint, _quantized(tensors, targets, name, Metadata(fields), options), Metadata(fields))


def _mapped(
    checkpoint: Checkpoint, table: Architecture, config: Mapping[str, Any]
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Tensors under GGUF's names; wrapper prefixes are taken off where the names as they are mean nothing."""
    drop = _left_out(table, config)
    try:
        found = find.forward(_untied(checkpoint), table, table.gguf, config, drop)
    except CheckpointError as error:
        if error.finding.code != "unmapped-tensor":
            raise
        plain = stripped(checkpoint)
        if list(plain.weights) == list(checkpoint.weights):
            raise
        found = find.forward(_untied(plain), table, table.gguf, config, drop)
    return found.tensors, found.ignored


def _untied(checkpoint: Checkpoint) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in checkpoint.weights.items() if name not in checkpoint.aliases}


def _left_out(table: Architecture, config: Mapping[str, Any]) -> Callable[[str], bool]:
    """Names that llama.cpp has no use for: DeepSeek's tied head, and its layers that predict further tokens."""
    if table.name != "deepseek2":
        return lambda _: False
    n_layers, tied = int(config["num_hidden_layers"]), bool(config.get("tie_word_embeddings"))

    def drop(name: str) -> bool:
        template, numbers = find.template_of(name)
        beyond = template.startswith("model.layers.{layer}.") and numbers[0] >= n_layers
        return beyond or (tied and name in ("lm_head.weight", "model.lm_head.weight"))

    return drop


def _without_rows_beyond(tensors: dict[str, Tensor], files: Files) -> dict[str, Tensor]:
    """Gemma 3: rows of the embedding behind the tokenizer's last token go."""
    tokenizer = files.table("tokenizer.json")
    if "tokenizer.model" in files or not tokenizer:
        return tensors
    n = len((tokenizer.get("model") or {}).get("vocab") or {}) + len(tokenizer.get("added_tokens") or [])
    embedding = tensors.get("token_embd.weight")
    if embedding is None or not 0 < n < embedding.shape[0]:
        return tensors
    return {**tensors, "token_embd.weight": embedding[:n]}


def _check_layer_types(table: Architecture, config: Mapping[str, Any], notes: list[Finding]) -> None:
    """Gemma 3's order of local and global layers has no key: llama.cpp takes every sixth for global."""
    kinds = config.get("layer_types")
    if table.name != "gemma3" or not isinstance(kinds, list):
        return
    if any((kind == "full_attention") != ((i + 1) % 6 == 0) for i, kind in enumerate(kinds)):
        notes.append(
            Finding(
                "lossy", "warning",
                "the order of local and global layers is not the usual 5 to 1, which GGUF can't say: "
                "llama.cpp will compute other results", "config.json", "run this model with transformers",
            )
        )  # fmt: skip


def _main_float(tensors: Mapping[str, Tensor]) -> str:
    """The first 16-bit type of a tensor of two axes; float32 where there is none."""
    found = (t.dtype.name for t in tensors.values() if t.ndim >= 2 and t.dtype.name in ("bfloat16", "float16"))
    return next(found, "float32")


def _keys(
    checkpoint: Checkpoint, table: Architecture, config: Mapping[str, Any], files: Files, tensors: Mapping[str, Tensor],
    file_type: int, options: GgufOptions,
) -> dict[str, Field]:  # fmt: skip
    """All metadata in the converter's order."""
    name = hparams.WRITERS[table.name][0]
    folder = Path(checkpoint.path).resolve().name
    shapes = [(n, t.shape) for n, t in tensors.items()]
    fields = {
        "general.architecture": kv.text(name),
        **hparams.early_keys(table.name, config),
        "general.type": kv.text("model"),
    }
    fields |= naming.general_keys(files, folder, shapes, options.model_name)
    fields |= hparams.model_keys(table.name, config, file_type)
    fields |= hparams.pooling_key(table.name, files.pooling())
    fields["general.quantization_version"] = kv.u32(2)
    return {**fields, **vocab.tokenizer_keys(table.name, config, files, options.pre)}


def _converter_type(name: str, tensor: Tensor, output: str) -> str:
    """The converter's choice between the output type and float32."""
    small = tensor.ndim <= 1 or name.endswith(("_norm.weight", *ALWAYS_F32)) or not name.endswith(".weight")
    return "float32" if small else output


def _as_float(tensor: Tensor, kind: str, allow_lossy: bool) -> Tensor:
    """A tensor in a plain type; float16 refuses what it can't hold."""
    tensor = dequantize(tensor)
    if kind == "float16" and not allow_lossy and tensor.dtype.name != "float16":
        return narrow(tensor)
    return ops.cast(tensor, DTYPES[kind])


# --- from GGUF ---


def _from_gguf(checkpoint: Checkpoint, metadata: Metadata, options: GgufOptions) -> Checkpoint:
    fields = {key: value for key, value in metadata.fields.items() if key not in SPLIT_KEYS}
    if options.model_name is not None:
        fields["general.name"] = kv.text(options.model_name)
    if options.pre is not None:
        fields["tokenizer.ggml.pre"] = kv.text(options.pre)
    if options.quant is None or options.quant.lower() == "auto":
        return _made(checkpoint, dict(checkpoint.weights), Metadata(fields))
    name, file_type, _ = mixture.file_type(options.quant)
    fields = _marked(fields, file_type)
    current = {n: t.dtype.name for n, t in checkpoint.weights.items()}
    tensors = _quantized(checkpoint.weights, current, name, Metadata(fields), options)
    return _made(checkpoint, tensors, Metadata(fields))


def _marked(fields: Mapping[str, Field], file_type: int) -> dict[str, Field]:
    """The keys that the quantizer sets; its library takes a key out and puts it at the end."""
    marks = {"general.quantization_version": kv.u32(2), "general.file_type": kv.u32(file_type)}
    return {**{key: value for key, value in fields.items() if key not in marks}, **marks}


def _quantized(
    tensors: Mapping[str, Tensor], current: Mapping[str, str], ftype: str, metadata: Metadata, options: GgufOptions
) -> dict[str, Tensor]:
    """The quantizer's types, in its order. `current`: the type of what is not quantized."""
    importance = _importance(options)
    shapes = {name: (t.shape, current[name]) for name, t in tensors.items()}
    targets = mixture.plan(
        shapes, ftype, mixture.Model.of(metadata), has_importance=importance is not None, overrides=options.overrides()
    )
    out: dict[str, Tensor] = {}
    for name, kind in targets.items():
        tensor = tensors[name]
        if kind == tensor.dtype.name:
            out[name] = tensor
            continue
        _refuse_second_loss(name, tensor, kind, options.allow_lossy)
        if kind not in BLOCK_TYPES:
            out[name] = _as_float(tensor, kind, options.allow_lossy)
            continue
        weights = _importance_of(name, tensor, importance)
        if weights is None and mixture.needs_importance(name, kind, ftype):
            raise Refused(
                f"{name} as {spelling(kind)} is worthless without an importance matrix",
                hint="give one with --imatrix FILE (llama-imatrix makes it)",
            )
        out[name] = quantize(tensor, DTYPES[kind], weights)
    return out


def _refuse_second_loss(name: str, tensor: Tensor, kind: str, allow_lossy: bool) -> None:
    if tensor.dtype.name in BLOCK_TYPES and kind != "float32" and not allow_lossy:
        raise Refused(
            f"{name} is {spelling(tensor.dtype.name)} already: {spelling(kind)} would lose once more", hint=LOSSY_HINT
        )


def _importance(options: GgufOptions) -> dict[str, Tensor] | None:
    if options.imatrix is None:
        return None
    from anyckpt.formats.gguf.importance import read_importance

    return read_importance(open_local(options.imatrix))


def _importance_of(name: str, tensor: Tensor, importance: Mapping[str, Tensor] | None) -> Tensor | None:
    """The matrix's row for a tensor: [columns], or [experts, columns]. Raises UsageError where its size is another."""
    found = importance.get(name) if importance else None
    if found is None:
        return None
    n_experts = prod(tensor.shape[:-2])
    columns = tensor.shape[-1]
    if found.size != n_experts * columns:
        if name == "token_embd.weight":
            return None
        raise UsageError(
            f"the importance matrix has {found.size:,} values for {name}, which needs {n_experts * columns:,}",
            hint="it was measured on another model",
        )
    return ops.reshape(found, (columns,) if n_experts == 1 else (n_experts, columns))


def _made(checkpoint: Checkpoint, weights: Mapping[str, Tensor], metadata: Metadata) -> Checkpoint:
    """A checkpoint of nothing but what GGUF holds."""
    return replace(
        checkpoint, format="gguf", weights=weights, aliases={}, optimizer=None, scheduler=None, rng=None, state={},
        config=None, assets=(), topology=None, facts={"gguf": metadata},
    )  # fmt: skip


def _note(code: str, message: str) -> Finding:
    severity = DEFAULT_SEVERITY[code]
    return Finding(code, "note" if severity == "warning" else severity, message)
