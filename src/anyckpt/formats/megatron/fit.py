"""A checkpoint made what a Megatron run of a given layout saves: its options, its spelling, its padded vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from anyckpt.core import ops
from anyckpt.core.checkpoint import Checkpoint, Optimizer
from anyckpt.core.tensor import Tensor, filled
from anyckpt.core.topology import Topology
from anyckpt.errors import Refused, UsageError
from anyckpt.finding import DEFAULT_SEVERITY, Finding
from anyckpt.formats.megatron.ranks import topology_of
from anyckpt.formats.megatron.spelling import respelled, to_local
from anyckpt.formats.megatron.spread import n_experts
from anyckpt.formats.table import WriteOptions
from anyckpt.sharding.tp import padded_vocab

DIVISOR = 128
"""Megatron's default of make_vocab_size_divisible_by."""
_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight", "output_layer.bias", "lm_head.bias")


def fit(checkpoint: Checkpoint, options: WriteOptions) -> Checkpoint:
    """The checkpoint as it will be read again from what is written for `options.topology`.

    `options.extra`: `transformer_impl` ("local", "transformer_engine") and `moe_grouped_gemm` choose the spelling,
    which otherwise stays, `make_vocab_size_divisible_by` the padding; `findings` is given what the reader of the
    result should know.
    Raises UsageError where the layout makes no sense for the model.
    """
    args = dict(checkpoint.config or {})
    saved = checkpoint.topology or topology_of(args)
    topology = settled(options.topology or saved, n_experts(checkpoint.weights) > 0)
    told = options.extra.get("findings")
    notes: list[Finding] = told if isinstance(told, list) else []
    before_core = any(name.startswith("language_model.") for name in checkpoint.weights)
    engine = options.extra.get("transformer_impl") or args.get("transformer_impl") or "transformer_engine"
    grouped = options.extra.get("moe_grouped_gemm")
    grouped = bool(args.get("moe_grouped_gemm")) if grouped is None else bool(grouped)

    def spell(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if before_core and not options.extra.get("core_names"):
            return dict(tensors)
        return respelled(tensors, engine=engine == "transformer_engine", grouped=grouped, names=checkpoint.weights)

    asked = options.extra.get("make_vocab_size_divisible_by")
    n_rows, divisor = _vocabulary(checkpoint.weights, args, topology, saved, notes, asked)

    def padded(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: _with_rows(name, tensor, n_rows) for name, tensor in tensors.items()}

    args |= {
        "tensor_model_parallel_size": topology.tp, "pipeline_model_parallel_size": topology.pp,
        "virtual_pipeline_model_parallel_size": topology.vpp if topology.vpp > 1 else None,
        "expert_model_parallel_size": topology.ep, "expert_tensor_parallel_size": topology.etp,
        "context_parallel_size": topology.cp, "data_parallel_size": topology.dp, "world_size": topology.world,
        "transformer_pipeline_model_parallel_size": topology.pp, "rank": 0, "local_rank": 0,
        "decoder_first_pipeline_num_layers": None, "decoder_last_pipeline_num_layers": None,
        "account_for_embedding_in_pipeline_split": False, "account_for_loss_in_pipeline_split": False,
        "pipeline_model_parallel_layout": None, "num_layers_per_virtual_pipeline_stage": None,
        "transformer_impl": engine, "moe_grouped_gemm": grouped, "padded_vocab_size": n_rows,
        "make_vocab_size_divisible_by": divisor, "iteration": checkpoint.step or 0,
    }  # fmt: skip
    optimizer = checkpoint.optimizer
    if optimizer is not None:
        optimizer = _respelled_optimizer(optimizer, spell, padded)
    return replace(
        checkpoint, weights=padded(spell(checkpoint.weights)), aliases={}, optimizer=optimizer, config=args,
        topology=topology,
    )  # fmt: skip


def settled(asked: Topology, has_experts: bool) -> Topology:
    """The layout that is meant: sizes that a model has no use for follow the others."""
    etp = asked.etp if has_experts else asked.tp
    vpp = asked.vpp if asked.pp > 1 else 1
    ep = asked.ep if has_experts else 1
    per_stage = asked.tp * asked.cp * asked.dp
    if has_experts and per_stage % (ep * etp):
        raise UsageError(
            f"EP {ep} × expert-TP {etp} does not divide the {per_stage} ranks of a pipeline stage (TP × CP × DP)",
            hint=f"give --dp: a multiple of {max(1, ep * etp // asked.tp)}",
        )
    if has_experts and asked.tp % etp:
        raise UsageError(f"expert-TP {etp} does not divide TP {asked.tp}: its ranks would share their files")
    return replace(asked, etp=etp, ep=ep, vpp=vpp, world=per_stage * asked.pp, zero=0)


def _respelled_optimizer(optimizer: Optimizer, spell: Any, padded: Any) -> Optimizer:
    slots = {slot: padded(spell(tensors)) for slot, tensors in optimizer.slots.items()}
    groups = tuple({**g, "params": list(spell(dict.fromkeys(g["params"])))} for g in optimizer.groups)
    return replace(optimizer, slots=slots, groups=groups)


def _vocabulary(
    weights: Mapping[str, Tensor], args: Mapping[str, Any], topology: Topology, saved: Topology, notes: list[Finding],
    asked: int | None,
) -> tuple[int, int]:
    """Rows of the vocabulary as it is written, and the divisor with which Megatron pads to as many.

    Rows that are there are kept where they divide: padding rows take part in Megatron's softmax. `asked`: a divisor
    that the run will have; padding is then made as it makes it.
    """
    plain = to_local({name: t.shape[0] if t.ndim else 0 for name, t in weights.items()})
    n_rows = plain.get("embedding.word_embeddings.weight", 0)
    divisor = args.get("make_vocab_size_divisible_by")
    divisor = divisor if isinstance(divisor, int) and divisor > 0 else DIVISOR
    true = true_vocabulary(args, n_rows)
    if asked:
        rows = padded_vocab(true, asked, topology.tp)
        if rows < n_rows:
            notes.append(note("lossy", f"{n_rows - rows} padding rows of the vocabulary are left out"))
        return rows, asked
    if "padded_vocab_size" not in args:  # of another family: padded for the first time
        return padded_vocab(n_rows, divisor, topology.tp), divisor
    rows = n_rows if n_rows % topology.tp == 0 else padded_vocab(n_rows, divisor, topology.tp)
    if padded_vocab(true, divisor, topology.tp) == rows:
        return rows, divisor
    fitting = divisor * saved.tp // topology.tp if divisor * saved.tp % topology.tp == 0 else 0
    if not fitting or padded_vocab(true, fitting, topology.tp) != rows:
        fitting = rows // topology.tp
    notes.append(Finding(
        "inferred", "note", f"the vocabulary keeps its {rows:,} rows: run Megatron with "
        f"--make-vocab-size-divisible-by {fitting}, or it makes another number of them",
    ))  # fmt: skip
    return rows, fitting


def true_vocabulary(args: Mapping[str, Any], n_rows: int) -> int:
    """Tokens before padding, as far as a run's options say; the rows that are there where they don't.

    NullTokenizer counts one token more than `vocab_size`, its end of document.
    """
    said = args.get("vocab_size")
    if not isinstance(said, int) or isinstance(said, bool) or not 0 < said <= n_rows:
        return n_rows
    true = said + 1 if args.get("tokenizer_type") == "NullTokenizer" else said
    divisor, tp = args.get("make_vocab_size_divisible_by"), args.get("tensor_model_parallel_size", 1)
    if isinstance(divisor, int) and isinstance(tp, int) and divisor > 0 and padded_vocab(true, divisor, tp) != n_rows:
        return n_rows
    return min(true, n_rows)


def _with_rows(name: str, tensor: Tensor, n_rows: int) -> Tensor:
    """A vocabulary's tensor with zeros for the rows that it lacks, without those it has too many."""
    if not name.endswith(_VOCABULARY) or not tensor.ndim or tensor.shape[0] == n_rows or not n_rows:
        return tensor
    if tensor.shape[0] > n_rows:
        return tensor[:n_rows]
    more = filled(tensor.dtype, (n_rows - tensor.shape[0], *tensor.shape[1:]), bytes(tensor.dtype.itemsize))
    return ops.concat((tensor, more), 0)


def note(code: str, message: str) -> Finding:
    """A finding for the reader of the result; what is lost on purpose is no warning."""
    severity = DEFAULT_SEVERITY[code]
    return Finding(code, "note" if severity == "warning" else severity, message)


def refuse_unknown(args: Mapping[str, Any]) -> None:
    """What can't be written for another layout."""
    if args.get("moe_mlp_glu_interleave_size"):
        raise Refused("the experts' gate and up rows are interleaved (moe_mlp_glu_interleave_size)")
