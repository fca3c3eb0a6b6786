"""Any checkpoint into any format that can be written: select, rename, cast, merge, write, prove."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from anyckpt.core import ops
from anyckpt.core.checkpoint import Checkpoint
from anyckpt.core.dtypes import DType
from anyckpt.core.dtypes import dtype as dtype_named
from anyckpt.core.tensor import Tensor
from anyckpt.core.topology import Topology
from anyckpt.errors import UsageError
from anyckpt.finding import DEFAULT_SEVERITY, Finding
from anyckpt.formats.table import Format, WriteOptions, by_ending, writable
from anyckpt.plan.run import Job, Progress
from anyckpt.verbs.gguf import GgufOptions
from anyckpt.verbs.open import open as open_checkpoint
from anyckpt.verbs.reading import refuse_damaged
from anyckpt.verbs.targets import prepared
from anyckpt.verbs.tensors import optimizer_tensors
from anyckpt.verbs.write import Written, write_checkpoint

Source = str | os.PathLike[str] | Checkpoint


def convert(
    source: Source,
    destination: str | os.PathLike[str],
    *,
    to: str | None = None,
    dtype: str | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    keep_dtype: Sequence[str] = (),
    max_shard_size: int = 5_000_000_000,
    tied: Literal["keep", "drop", "clone"] = "keep",
    strip_prefixes: bool = False,
    dense: bool = False,
    merge_adapter: str | os.PathLike[str] | None = None,
    like: str | os.PathLike[str] | None = None,
    world: int | None = None,
    topology: Topology | None = None,
    extra: Mapping[str, Any] | None = None,
    weights: Literal["compute", "master"] = "compute",
    only: Literal["weights", "optimizer"] | None = None,
    quant: str | None = None,
    imatrix: str | os.PathLike[str] | None = None,
    tensor_type: Sequence[str] = (),
    split_max_size: int | None = None,
    model_name: str | None = None,
    pre: str | None = None,
    base: str | os.PathLike[str] | None = None,
    allow_lossy: bool = False,
    prove: bool = False,
    dry_run: bool = False,
    force: bool = False,
    max_memory: int = 1 << 30,
    jobs: int | None = None,
    events: Callable[[Progress], None] | None = None,
) -> Written:
    """Convert `source` (a path or an open checkpoint) to `destination`.

    `to` names a format of `anyckpt formats`; without it the destination's ending decides. `include`, `exclude` and
    `keep_dtype` are globs of tensor names. `max_shard_size` and `max_memory` in bytes. `merge_adapter`: a PEFT adapter
    folder to merge into the source. `like`: as in `open`. `world`: how many ranks a sharded format is written for,
    `topology`: of which kinds (`reshard`); `extra`: what one format's writer may be told besides.
    `weights="master"` writes the optimizer's fp32 masters, `only="optimizer"` its tensors as `parameter/slot`.

    GGUF: `quant` is a file type (q4_k_m …), `imatrix` a file of importances, `tensor_type` PATTERN=TYPE exceptions,
    `split_max_size` bytes of a file of a set, `model_name` and `pre` override what the source says, `base` is the model
    of an adapter that is written as one. `allow_lossy` lets a step lose what no later one can restore.

    Raises CheckpointError where the source has an error finding, UsageError for a request that makes no sense, Refused
    and OutOfSpace before anything is written.
    """
    target = Path(destination)
    row = destination_format(target, to)
    if split_max_size and row.name == "gguf":
        row = writable("gguf-folder")
    checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source, like=like)
    refuse_damaged(checkpoint)
    notes: list[Finding] = []
    if merge_adapter is not None:
        from anyckpt.formats.peft import merged

        checkpoint = merged(checkpoint, open_checkpoint(merge_adapter))
    if weights == "master":
        checkpoint = with_masters(checkpoint)
    if only == "optimizer":
        checkpoint = optimizer_alone(checkpoint)
    if dense:
        checkpoint = checkpoint.view("dense")
    if strip_prefixes:
        checkpoint = checkpoint.view("stripped")
    checkpoint = selected(checkpoint, include, exclude)
    uncast = checkpoint.weights
    if dtype is not None:
        checkpoint = recast(checkpoint, _dtype(dtype), keep_dtype)
    _check_options(row, quant=quant, imatrix=imatrix, tensor_type=tensor_type, pre=pre)
    if row.name != "hf":
        _check_options(row, base=base)
    gguf = GgufOptions(quant, imatrix, tensor_type, model_name, pre, allow_lossy, base)
    checkpoint = prepared(checkpoint, row, gguf, notes)
    training = row.training and only != "weights" and checkpoint.is_training and not (include or exclude)
    if checkpoint.is_training and not training:
        notes.append(_note("lossy", "only the weights are written: optimizer, scheduler and RNG state stay behind"))
    if world is not None and topology is None:
        topology = Topology(world=world)
    # `uncast`: what masters are made of where the source stores none. Writers add to `findings`.
    told = {"training": training, "uncast": uncast, "findings": notes, "split_max_bytes": split_max_size}
    options = WriteOptions(target.name, max_shard_size, tied, topology, {**told, **(extra or {})})
    job = Job(max_memory=max_memory, jobs=jobs, force=force, dry_run=dry_run, prove=prove, events=events)
    written = write_checkpoint(checkpoint, target, row, options, job)
    return replace(written, findings=(*notes, *checkpoint.findings))


def _check_options(row: Format, **given: object) -> None:
    """Refuse options of another format: what is asked for must not be passed over in silence."""
    named = [name for name, value in given.items() if value]
    if named and not row.name.startswith("gguf"):
        option = "--" + named[0].replace("_", "-")
        raise UsageError(f"{option} is for GGUF, and this writes {row.title}", hint="add --to gguf")


def destination_format(target: Path, to: str | None) -> Format:
    """The format asked for, or the one the destination's ending says. Raises UsageError where neither does."""
    if to is not None:
        return writable(to)
    row = by_ending(target.name)
    if row is None:
        raise UsageError(
            f"the name {target.name!r} does not say which format to write", hint="add --to, one of: anyckpt formats"
        )
    return row


def selected(checkpoint: Checkpoint, include: Sequence[str], exclude: Sequence[str]) -> Checkpoint:
    """The tensors whose names match any of `include` (all where empty) and none of `exclude`. UsageError if none."""
    if not include and not exclude:
        return checkpoint
    kept = {
        name: tensor
        for name, tensor in checkpoint.weights.items()
        if (not include or _matches(name, include)) and not _matches(name, exclude)
    }
    if not kept:
        raise UsageError("no tensor matches", hint="see the names with: anyckpt inspect --all")
    return checkpoint.with_weights(kept)


def recast(checkpoint: Checkpoint, dtype: DType, keep: Sequence[str] = ()) -> Checkpoint:
    """Floating-point weights in another dtype, except those whose names match `keep`; integers stay as they are.

    A tied name stays tied: it is cast as the name that it is tied to.
    """
    cast: dict[str, Tensor] = {}
    for name, tensor in checkpoint.weights.items():
        holder = checkpoint.aliases.get(name)
        if holder in cast:
            cast[name] = cast[holder]
        elif tensor.dtype.is_floating and not _matches(name, keep):
            cast[name] = ops.cast(tensor, dtype)
        else:
            cast[name] = tensor
    return checkpoint.with_weights(cast)


def with_masters(checkpoint: Checkpoint) -> Checkpoint:
    """The optimizer's fp32 masters in the place of the weights; weights without a master stay. UsageError if none."""
    masters = checkpoint.optimizer.slots.get("master") if checkpoint.optimizer else None
    if not masters:
        raise UsageError("this checkpoint stores no master weights", hint="leave --weights master out")
    weights = {
        name: masters.get(name) or masters.get(checkpoint.aliases.get(name, "")) or tensor
        for name, tensor in checkpoint.weights.items()
    }
    return checkpoint.with_weights(weights)


def optimizer_alone(checkpoint: Checkpoint) -> Checkpoint:
    """The optimizer's tensors in the place of the weights, as `parameter/slot`. UsageError where there are none."""
    tensors = optimizer_tensors(checkpoint)
    if not tensors:
        raise UsageError("this checkpoint holds no optimizer state", hint="leave --only optimizer out")
    return checkpoint.with_weights(tensors, optimizer=None, scheduler=None, rng=None)


def _matches(name: str, globs: Sequence[str]) -> bool:
    return any(fnmatchcase(name, glob) for glob in globs)


def _dtype(name: str) -> DType:
    try:
        found = dtype_named(name)
    except KeyError:
        found = None
    if found is None or not found.is_floating:
        raise UsageError(f"{name!r} is no floating-point dtype", hint="float32, float16, bfloat16, float8_e4m3fn …")
    return found


def _note(code: str, message: str) -> Finding:
    severity = DEFAULT_SEVERITY[code]
    return Finding(code, "note" if severity == "warning" else severity, message)
