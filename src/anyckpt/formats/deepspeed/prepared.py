"""What a writer needs of a checkpoint of any format: parameters by group, masters, slots, and DeepSpeed's own state.

The order of parameters is that of the optimizer's groups, which is the order in which DeepSpeed lays its buffers out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from anyckpt.core import ops
from anyckpt.core.checkpoint import Checkpoint, Optimizer
from anyckpt.core.dtypes import DTYPES
from anyckpt.core.tensor import Tensor, filled
from anyckpt.core.topology import Topology
from anyckpt.errors import Refused, UsageError
from anyckpt.finding import Finding
from anyckpt.formats.deepspeed.around import is_rng, is_scheduler
from anyckpt.formats.deepspeed.experts import EXPERT
from anyckpt.formats.deepspeed.load import mapping
from anyckpt.formats.deepspeed.tensor_parallel import Rules
from anyckpt.formats.table import WriteOptions
from anyckpt.formats.torch.assign import BUFFER
from anyckpt.formats.torch.optimizer import SLOTS

LAYOUT_VERSION = "0.19.8"
"""The release whose layout is written; loaders ask for 0.3.17 or later."""

@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """One parameter group: hyperparameters, names in order, numbers that stand for all (step), slots and masters."""

    options: Mapping[str, Any]
    names: tuple[str, ...]
    scalars: Mapping[str, Tensor]
    tensors: Mapping[str, Mapping[str, Tensor]]  # slot -> name -> tensor of the parameter's shape; "master" among them

    @property
    def is_expert(self) -> bool:
        """Whether its parameters are experts', which not every rank has."""
        return bool(self.names) and all(EXPERT.fullmatch(name) for name in self.names)

    @property
    def is_muon(self) -> bool:
        """Whether DeepSpeed's Muon updates it, which keeps its momentum parameter by parameter."""
        return bool(self.options.get("use_muon"))


@dataclass(frozen=True, slots=True)
class Prepared:
    """A checkpoint made ready. `own`: DeepSpeed's state, from the source where it has one; `client`: all the rest."""

    weights: Mapping[str, Tensor]
    aliases: Mapping[str, str]
    groups: tuple[ParameterGroup, ...]
    buffers: tuple[str, ...]
    frozen: tuple[str, ...]
    own: Mapping[str, Any]
    client: Mapping[str, Any]
    scheduler: Any
    step: int
    config: Mapping[str, Any]
    topology: Topology
    rules: Rules
    stages: tuple[tuple[str, ...], ...]  # parameters of each pipeline stage; one stage: all of them
    layers: Mapping[int, str]  # pipeline layer -> what its names begin with; empty where there is no pipeline

    @property
    def is_bf16(self) -> bool:
        """Whether the run computes in bfloat16, which the names of the optimizer's files tell."""
        saved = mapping(self.config.get("bf16", self.config.get("bfloat16")))
        if "enabled" in saved:
            return bool(saved["enabled"])
        return any(self.weights[name].dtype.name == "bfloat16" for group in self.groups for name in group.names)


def prepare(checkpoint: Checkpoint, options: WriteOptions) -> Prepared:
    """Make a checkpoint ready for a writer. Raises UsageError where it has no optimizer, Refused where it can't be told
    which state belongs to which parameter, or where DeepSpeed has no place for it."""
    optimizer = checkpoint.optimizer
    if optimizer is None or not options.extra.get("training", True):
        raise UsageError(
            "DeepSpeed's folders hold training state, and this checkpoint has no optimizer",
            hint="for weights alone write --to hf or safetensors, which deepspeed.initialize takes as any model",
        )
    notes = options.extra.get("findings")
    topology = target(checkpoint, options.topology)
    own = dict(mapping(checkpoint.state.get("deepspeed")))
    config = dict(mapping(own.get("ds_config")))
    zero = dict(mapping(config.get("zero_optimization")))
    config["zero_optimization"] = {**zero, "stage": topology.zero}
    uncast: Mapping[str, Tensor] = options.extra.get("uncast") or checkpoint.weights
    groups = tuple(_group(group, checkpoint, optimizer, uncast, notes) for group in optimizer.groups)
    _check_unmatched(optimizer)
    if notes is not None and checkpoint.step and not any(len(group.tensors) > 1 for group in groups):
        notes.append(Finding("inferred", "note", "the optimizer has no moments: DeepSpeed will begin with zeros"))
    trained = {name for group in groups for name in group.names}
    rest = [n for n in checkpoint.weights if n not in trained and n not in checkpoint.aliases]
    buffers = _buffers({name: checkpoint.weights[name] for name in rest}, own, options, notes)
    beside = {asset.name for asset in checkpoint.facts.get("beside", ())}
    client = {key: value for key, value in checkpoint.state.items() if key not in {"deepspeed", *beside}}
    if checkpoint.rng is not None and not any(map(is_rng, beside)):
        client.setdefault("rng", checkpoint.rng)
    if checkpoint.epoch is not None:
        client.setdefault("epoch", checkpoint.epoch)
    rules = Rules.of(own.get("universal_checkpoint_info"))
    if topology.tp > 1 and not rules.known:
        raise UsageError(
            f"nothing says how weights are cut over {topology.tp} tensor-parallel ranks (no universal_checkpoint_info)"
        )
    stages = tuple(tuple(names) for names in checkpoint.facts.get("stages") or ())
    return Prepared(
        weights=checkpoint.weights, aliases=checkpoint.aliases, groups=groups, buffers=buffers,
        frozen=tuple(n for n in rest if n not in buffers), own=own, client=client,
        scheduler=None if any(map(is_scheduler, beside)) else checkpoint.scheduler,
        step=checkpoint.step or 0, config=config, topology=topology, rules=rules, stages=stages,
        layers=checkpoint.facts.get("layers") or {},
    )


def target(checkpoint: Checkpoint, asked: Topology | None) -> Topology:
    """The layout to be: what was asked for, and the source's where nothing was. Raises UsageError for what can't be."""
    was = checkpoint.topology or Topology()
    if asked is None:
        asked = was
    pipeline = bool(checkpoint.facts.get("layers"))
    zero = asked.zero or was.zero or (1 if pipeline else 2)
    dp = asked.world // (asked.tp * asked.pp) if asked.world and asked.dp == 1 else asked.dp
    made = Topology(tp=asked.tp, pp=asked.pp, dp=max(dp, 1), ep=asked.ep, zero=zero)
    if zero not in (1, 2, 3):
        raise UsageError(f"there is no ZeRO stage {zero}; 1, 2 and 3 are written")
    if made.pp != (was.pp if pipeline else 1):
        raise UsageError(
            f"a pipeline of {was.pp} stages can't become one of {made.pp}: the model chooses which layers a stage gets",
            hint="leave --pp out",
        )
    if pipeline and zero > 1:
        raise UsageError("DeepSpeed's pipelines take ZeRO stage 1 only", hint="--zero 1")
    if zero == 3 and made.ep > 1:
        raise UsageError("experts are not cut by ZeRO stage 3", hint="--zero 1 or --zero 2")
    if made.dp % made.ep:
        raise UsageError(f"{made.dp} data-parallel ranks can't share {made.ep} sets of experts")
    return made


def _group(
    saved: Mapping[str, Any], checkpoint: Checkpoint, optimizer: Optimizer, uncast: Mapping[str, Tensor],
    notes: list[Finding] | None,
) -> ParameterGroup:
    names = tuple(str(name) for name in saved.get("params", ()))
    unknown = [name for name in names if name not in checkpoint.weights]
    if unknown:
        raise Refused(
            f"the optimizer's parameter {unknown[0]!r} is none of the weights, so its state can't be placed",
            hint="numbers for names mean that the order of the parameters could not be told; see: anyckpt verify",
        )
    masters = optimizer.slots.get("master", {})
    tensors = {"master": {n: ops.cast(masters.get(n) or uncast.get(n) or checkpoint.weights[n], DTYPES["float32"])
                          for n in names}}
    scalars: dict[str, Tensor] = {}
    for slot, by_name in optimizer.slots.items():
        held = {name: by_name[name] for name in names if name in by_name}
        if slot == "master" or not held:
            continue
        like = all(tensor.shape == checkpoint.weights[name].shape for name, tensor in held.items())
        kind = SLOTS.get(slot, "like-weight" if any(t.ndim for t in held.values()) else "scalar")
        if kind == "like-weight" and like:
            tensors[slot] = _filled_up(slot, names, held, checkpoint, notes)
        elif all(tensor.size == 1 for tensor in held.values()):
            scalars[slot] = _one(slot, held)
        else:
            raise Refused(f"the optimizer state {slot!r} has not the shape of its parameter: ZeRO can't cut it")
    options = {key: value for key, value in saved.items() if key not in ("params", "param_names")}
    return ParameterGroup(options, names, scalars, tensors)


def _filled_up(
    slot: str, names: Sequence[str], held: Mapping[str, Tensor], checkpoint: Checkpoint, notes: list[Finding] | None
) -> dict[str, Tensor]:
    """A slot of every parameter: zeros for those that never had a gradient, for buffers have no gaps."""
    first = next(iter(held.values()))
    lacking = [name for name in names if name not in held]
    if lacking and notes is not None:
        message = f"{len(lacking)} parameters have no {slot}, {lacking[0]} first: zeros are written"
        notes.append(Finding("inferred", "note", message))
    return {
        name: held.get(name) or filled(first.dtype, checkpoint.weights[name].shape, bytes(first.dtype.itemsize))
        for name in names
    }


def _one(slot: str, held: Mapping[str, Tensor]) -> Tensor:
    """The one number of a group. Raises Refused where its parameters have different ones."""
    distinct = {id(tensor): tensor for tensor in held.values()}
    values = {tensor.tobytes() for tensor in distinct.values()}
    if len(values) > 1:
        raise Refused(
            f"the parameters of one group have {len(values)} different values of {slot!r}; ZeRO keeps one for all",
            hint="parameters that join the training later need a group of their own",
        )
    return next(iter(distinct.values()))


def _buffers(
    rest: Mapping[str, Tensor], own: Mapping[str, Any], options: WriteOptions, notes: list[Finding] | None
) -> tuple[str, ...]:
    """Which of the weights that no optimizer updates are buffers, and not frozen parameters.

    DeepSpeed's own files list them, and `options.extra["buffers"]` may, as globs. Else names and forms tell: buffers
    that are known, integers, and vectors that are no `weight` or `bias`. DeepSpeed's strict load refuses a wrong guess.
    """
    known = own.get("buffer_names")
    if isinstance(known, list):
        return tuple(name for name in rest if name in set(known))
    globs = options.extra.get("buffers") or ()
    sure = {n for n, t in rest.items() if not t.dtype.is_floating or BUFFER.search(n) or _matches(n, globs)}
    guessed = {
        name for name, tensor in rest.items()
        if name not in sure and not globs and tensor.ndim < 2 and name.rpartition(".")[2] not in ("weight", "bias")
    }
    if notes is not None and (guessed or len(sure) < len(rest)):
        frozen = [name for name in rest if name not in sure | guessed]
        shown = ", ".join([*sorted(guessed)[:2], *frozen[:2]])
        message = f"of the weights that are not trained, {len(guessed)} are taken for buffers, {len(frozen)} for frozen"
        notes.append(Finding("inferred", "note", f"{message}: {shown}", hint="name buffers with --buffer GLOB"))
    return tuple(name for name in rest if name in sure | guessed)


def _matches(name: str, globs: Sequence[str]) -> bool:
    return any(fnmatchcase(name, glob) for glob in globs)


def _check_unmatched(optimizer: Optimizer) -> None:
    """State that could not be given to a parameter must not be lost in silence."""
    if optimizer.unmatched:
        first = next(iter(optimizer.unmatched))
        raise Refused(f"optimizer state of {first!r} belongs to no parameter that is known: it would be lost")
