"""The rank files of a legacy `torch` checkpoint, read and put on the grid of tensor, pipeline and expert ranks.

model_optim_rng.pt, a torch file of one dict:

    args                 argparse.Namespace of 300 to 660 options: the sizes of the grid, and the model's config
    checkpoint_version   3.0; below 2.0 the rows of query_key_value are in another order
    iteration
    model | model0 … model{V-1}     the state dict of each virtual chunk; layers and experts count from 0
    optimizer  opt_param_scheduler  rng_state  num_floating_point_operations_so_far  rerun_state_machine

A rank writes where its expert-data-parallel rank is 0. With expert-tensor size ETP, the x-th rank of that grid is
expert rank x // ETP and tensor rank x % TP, so with ETP != TP the files are no full grid, and where EP · ETP < TP
some tensor shards were never written (Megatron-LM issue 4200).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from anyckpt.core.inert import Opaque
from anyckpt.core.tensor import Tensor
from anyckpt.core.topology import Topology
from anyckpt.errors import CheckpointError
from anyckpt.finding import Report, fail
from anyckpt.formats.megatron.folders import RankName, rank_names
from anyckpt.formats.megatron.parts import EXTRA_STATE
from anyckpt.formats.torch.saved import saved_object
from anyckpt.formats.torch.unwrap import as_entry
from anyckpt.io.place import Place
from anyckpt.pickle.result import Import

MANY_RANKS = 64
"""Above so many files, zip headers are checked when tensors are read (and by `verify --deep`), not before."""
Rank = tuple[int, int, int]
"""(tensor, pipeline, expert)."""


@dataclass(frozen=True, slots=True)
class RankState:
    """One rank's file. `chunks[v]`: its tensors by local name; `extra[v]`: what else stood among them."""

    file: str
    rank: Rank
    root: Mapping[str, Any]
    args: Mapping[str, Any]
    chunks: tuple[Mapping[str, Tensor], ...]
    extra: tuple[Mapping[str, Any], ...]
    imports: tuple[Import, ...]

    @property
    def iteration(self) -> int | None:
        value = self.root.get("iteration")
        return value if isinstance(value, int) and not isinstance(value, bool) else None


@dataclass(frozen=True, slots=True)
class Grid:
    """All ranks that could be read, and the sizes they were saved by."""

    states: Mapping[Rank, RankState]
    topology: Topology

    @property
    def first(self) -> RankState:
        return self.states[min(self.states)]

    def dense(self, p: int) -> list[RankState | None]:
        """Of stage p, the file of each tensor rank to take unsplit and tensor-parallel weights from."""
        return [self._any_expert(t, p) for t in range(self.topology.tp)]

    def _any_expert(self, t: int, p: int) -> RankState | None:
        """The file of the rank that is first of its data-parallel group, else any: it has the dense optimizer."""
        for e in (home_expert(t, self.topology), *range(self.topology.ep)):
            if (state := self.states.get((t, p, e))) is not None:
                return state
        return None

    def expert(self, p: int, e: int) -> list[RankState | None]:
        """Of stage p and expert rank e, the file of each expert-tensor rank."""
        tp, etp = self.topology.tp, self.topology.etp
        return [self.states.get(((et + etp * e) % tp, p, e)) for et in range(etp)]

    def replicas(self, p: int) -> Iterable[RankState]:
        """Every file of a stage, in order."""
        return (self.states[rank] for rank in sorted(self.states) if rank[1] == p)


def written_ranks(topology: Topology) -> list[tuple[int, int]]:
    """The (tensor, expert) ranks of which a stage has files.

    >>> written_ranks(Topology(tp=2, ep=2, etp=1))
    [(0, 0), (1, 1)]
    """
    tp, ep, etp = topology.tp, topology.ep, topology.etp
    if etp == tp:
        return [(t, e) for e in range(ep) for t in range(tp)]
    return sorted({(x % tp, x // etp) for x in range(ep * etp)}, key=lambda rank: rank[::-1])


def loading_ranks(topology: Topology) -> list[tuple[int, int]]:
    """The (tensor, expert) ranks of a stage: the files that its ranks look for when they load.

    >>> loading_ranks(Topology(tp=2, ep=1, etp=1, dp=2))
    [(0, 0), (1, 0)]
    """
    tp, ep, etp = topology.tp, topology.ep, topology.etp
    n_ranks = max(tp * topology.cp * topology.dp, tp, ep * etp)
    return sorted({(x % tp, x // etp % ep) for x in range(n_ranks)}, key=lambda rank: rank[::-1])


def home_expert(t: int, topology: Topology) -> int:
    """The expert rank of the first rank of a tensor rank's data-parallel group: the dense optimizer is in its file."""
    return t // topology.etp % topology.ep


def arguments(value: Any) -> dict[str, Any]:
    """Options as a dict, from a Namespace or a dict; empty for anything else."""
    if isinstance(value, Opaque):
        value = value.attributes()
    return {str(k): v for k, v in value.items()} if isinstance(value, dict) else {}


def topology_of(args: Mapping[str, Any]) -> Topology:
    """The parallel sizes that a run's options (or a NeMo config) name; 1 for those they don't."""

    def size(*names: str, default: int = 1) -> int:
        value = next((args[n] for n in names if args.get(n) is not None), default)
        return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 20 else default

    tp = size("tensor_model_parallel_size", "model_parallel_size")
    ep = size("expert_model_parallel_size")
    # Releases before 0.10 have no expert-tensor size: experts are split as everything else.
    etp = size("expert_tensor_parallel_size", "expert_tensor_model_parallel_size", default=tp)
    has_experts = args.get("num_experts", args.get("num_moe_experts")) is not None
    return Topology(
        tp=tp, pp=size("pipeline_model_parallel_size"), vpp=size("virtual_pipeline_model_parallel_size"), ep=ep,
        etp=etp if has_experts else tp, cp=size("context_parallel_size"), dp=size("data_parallel_size"),
        world=size("world_size", default=0),
    )  # fmt: skip


def read_grid(place: Place, report: Report) -> Grid:
    """Read every rank's file. Raises the first error where none can be read."""
    read: list[tuple[RankName, Mapping[str, Any], tuple[Import, ...]]] = []
    damaged: list[RankName] = []
    names = rank_names(place)
    for name in names:
        try:
            file = place.open(name.file)
            saved = saved_object(file, report, lazy=len(names) > MANY_RANKS)
            if not isinstance(saved.value, dict):
                raise fail("malformed-item", "is no dict of a training state", where=file.name)
            read.append((name, {str(k): v for k, v in saved.value.items()}, saved.imports))
        except CheckpointError as error:
            report.extend([error.finding])
            damaged.append(name)
    if not read:
        raise CheckpointError(report.errors[0])
    args = arguments(read[0][1].get("args"))
    return on_grid(read, topology_of(args) if args else None, report, damaged)


def on_grid(
    read: Sequence[tuple[RankName, Mapping[str, Any], tuple[Import, ...]]],
    sizes: Topology | None,
    report: Report,
    damaged: Sequence[RankName] = (),
) -> Grid:
    """Put ranks, as (name, contents, imports), at their places.

    `sizes`: those of the run; without them what the names show. `damaged`: files that are there, but can't be read.
    """
    topology = sizes or _by_names([*(name for name, _, _ in read), *damaged])
    states: dict[Rank, RankState] = {}
    for name, root, imports in read:
        rank = _rank(name, topology)
        if rank in states:
            report.add(
                "duplicate-shard", f"is of the same rank as {states[rank].file}, which is read", where=name.file
            )
            continue
        states[rank] = _state(name.file, rank, root, imports)
    grid = Grid(states, topology)
    _check(grid, {_rank(name, topology) for name in damaged}, report)
    return grid


def _by_names(names: Sequence[RankName]) -> Topology:
    """The sizes as far as the files' names show them."""
    tp = max(name.tp for name in names) + 1
    pp = max((name.pp if name.pp is not None else name.rest[0] if name.rest else 0) for name in names) + 1
    ep = max((name.rest[1] if len(name.rest) > 1 else 0) for name in names) + 1
    return Topology(tp=tp, pp=pp, ep=ep, etp=tp)


def _rank(name: RankName, topology: Topology) -> Rank:
    """Which rank a file's name means under these sizes."""
    if name.pp is not None:
        return name.tp, name.pp, name.rest[0] if name.rest else 0
    if len(name.rest) == 2:
        return name.tp, name.rest[0], name.rest[1]
    if len(name.rest) == 1:
        return (name.tp, name.rest[0], 0) if topology.pp > 1 or topology.ep == 1 else (name.tp, 0, name.rest[0])
    return name.tp, 0, 0


def _state(file: str, rank: Rank, root: Mapping[str, Any], imports: tuple[Import, ...]) -> RankState:
    keys = ["model"] if "model" in root else sorted(
        (k for k in root if k.startswith("model") and k[5:].isdigit()), key=lambda k: int(k[5:])
    )
    chunks, extra = [], []
    for key in keys:
        tensors, others = flatten(root[key])
        chunks.append(tensors)
        extra.append(others)
    return RankState(file, rank, root, arguments(root.get("args")), tuple(chunks), tuple(extra), imports)


def flatten(tree: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A state dict, nested (before core) or flat, as tensors by dotted name, and what is none of them.

    `_extra_state` is none, tensor or not: it is Transformer Engine's own.
    """
    tensors: dict[str, Tensor] = {}
    others: dict[str, Any] = {}
    todo: list[tuple[str, Any, int]] = [("", tree, 0)]
    while todo:
        name, value, depth = todo.pop()
        entry = as_entry(value)
        if name.endswith(EXTRA_STATE):
            if value is not None:
                others[name] = value
        elif isinstance(entry, Tensor):
            tensors[name] = entry
        elif entry is not None and entry.base is not None:
            tensors[name] = entry.base
        elif isinstance(value, dict) and depth < 16:
            lead = f"{name}." if name else ""
            todo.extend((f"{lead}{key}", inner, depth + 1) for key, inner in reversed(list(value.items())))
        else:
            others[name] = value
    return tensors, others


def _check(grid: Grid, damaged: set[Rank], report: Report) -> None:
    """Is every rank there, of one iteration, one run?"""
    topology = grid.topology
    written = written_ranks(topology)
    shards = {t for t, _ in written} | {t for t, _, _ in grid.states}
    lost = [t for t in range(topology.tp) if t not in shards]
    if lost:
        report.add(
            "missing-shard",
            f"tensor shards {', '.join(map(str, lost))} of {topology.tp} were never saved: with EP {topology.ep} and "
            f"expert-tensor size {topology.etp} this release writes no file for them", where=grid.first.file,
            hint="save again with EP · ETP >= TP; see Megatron-LM issue 4200",
        )  # fmt: skip
    missing = [
        (t, p, e) for p in range(topology.pp) for t, e in written
        if (t, p, e) not in grid.states and (t, p, e) not in damaged
    ]
    if missing:
        listed = ", ".join(_title(rank, topology) for rank in missing[:4])
        more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
        report.add(
            "missing-shard", f"{len(missing)} of {len(written) * topology.pp} rank files are not there: {listed}{more}",
            where=_title(missing[0], topology), hint="copy the missing folders, then run: anyckpt verify PATH",
        )
    iterations = {state.iteration for state in grid.states.values()}
    if len(iterations) > 1:
        shown = {state.iteration: state.file for state in grid.states.values()}
        listed = ", ".join(f"{file}: iteration {iteration}" for iteration, file in list(shown.items())[:4])
        report.add(
            "mixed-steps", f"the ranks are of different saves: {listed}", where=grid.first.file,
            hint="take all ranks from one save",
        )
    for state in grid.states.values():
        if state.args and (other := topology_of(state.args)) != topology:
            report.add(
                "inconsistent", f"was saved by a run of {other}, {grid.first.file} by one of {topology}",
                where=state.file,
            )
            break
        if not state.chunks:
            report.add("missing-tensor", "holds no model", where=state.file)


def _title(rank: Rank, topology: Topology) -> str:
    return folder_name(rank, topology.pp, topology.ep)


def folder_name(rank: Rank, pp: int, ep: int) -> str:
    """The folder that Megatron gives a rank: the pipeline rank only where PP > 1, the expert rank where EP > 1."""
    name = f"mp_rank_{rank[0]:02d}"
    if pp > 1:
        name += f"_{rank[1]:03d}"
    return f"{name}_{rank[2]:03d}" if ep > 1 else name
