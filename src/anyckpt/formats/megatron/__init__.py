"""Megatron-LM's legacy `torch` checkpoints: one folder of files a rank, read as one whole model under global names.

    folders   which iteration, and in which form      ranks      the rank files on their grid
    parts     what names say of splits                join       shards to whole parameters, by placements
    optimizer moments by number                       distrib    flat buffers of the distributed optimizer
    write     folders for any layout                  dist       the other form, `torch_dist` (a row of its own)

Covers Megatron-LM 2.x to core 0.16 (files of 0.8.0, 0.10.0 and 0.16.1 compared bit for bit with the live model).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anyckpt.core.checkpoint import Checkpoint, Optimizer
from anyckpt.errors import CheckpointError
from anyckpt.finding import Report
from anyckpt.formats import of_file
from anyckpt.formats.megatron import distrib, folders, optimizer
from anyckpt.formats.megatron.join import Placements, join_all, place_all, replicas_of, weights_lookup
from anyckpt.formats.megatron.ranks import MANY_RANKS, Grid, Rank, read_grid
from anyckpt.formats.megatron.write import fit, write
from anyckpt.formats.torch.saved import saved_object
from anyckpt.io.paths import printable
from anyckpt.io.place import Place

__all__ = ["fit", "matches", "read", "verify", "write"]

KINDS = {"adam": "AdamW", "sgd": "SGD"}
"""What `args.optimizer` means: Megatron's adam decouples weight decay."""
_TAKEN = ("model", "optimizer", "opt_param_scheduler", "lr_scheduler", "rng_state", "args", "iteration")


def matches(place: Place) -> bool:
    """Whether rank folders of the legacy form lie here, one iteration down, or around this folder."""
    return folders.is_megatron(place, ("torch",))


def read(place: Place, report: Report) -> Checkpoint:
    """Read all ranks of one iteration. Raises the first error where no rank can be read."""
    found = folders.locate(place, report)
    report.extend(found.place.unreadable((".pt",)))
    grid = read_grid(found.place, report)
    placements = place_all(grid, report)
    lookup = weights_lookup(grid)
    weights = join_all(placements, lookup, report)
    state = grid.first
    if found.iteration is not None and state.iteration not in (None, found.iteration, 0):
        report.add(
            "inconsistent", f"the folder is called {found.name or found.place.path.name}, "
            f"and its files are of iteration {state.iteration}", where=state.file,
        )  # fmt: skip
    saved, imports = _optimizer(found.place, grid, placements, report)
    beside = _beside(found.place, grid, report)
    if placements.copies:
        copy, original = next(iter(placements.copies.items()))
        report.add("tied", f"{printable(copy)} on the last stage is a copy of {printable(original)}", where=state.file)
    facts = {
        "container": "torch zip", "branch": "Megatron-LM", "folder": found.name, "form": "torch",
        "ranks": len(grid.states), "files": tuple(s.file for s in grid.states.values()),
        "imports": tuple(dict.fromkeys(i for part in (*(s.imports for s in grid.states.values()), imports, beside)
                                       for i in part)),
        "replicas": tuple(replicas_of(placements, lookup)), "copies": dict(placements.copies),
        "checkpoint_version": state.root.get("checkpoint_version"),
    }  # fmt: skip
    return Checkpoint(
        "megatron", str(place.path), weights, optimizer=saved, step=state.iteration,
        scheduler=state.root.get("opt_param_scheduler", state.root.get("lr_scheduler")), rng=_rng(grid),
        state=_state(grid), config=dict(state.args) or None, topology=grid.topology, facts=facts,
    )  # fmt: skip


def _optimizer(
    place: Place, grid: Grid, placements: Placements, report: Report
) -> tuple[Optimizer | None, tuple[Any, ...]]:
    """The optimizer of all ranks, from their own files or the distributed one's beside them."""
    by_rank: dict[Rank, optimizer.RankSlots] = {}
    known = frozenset(place.names)
    imports: list[Any] = []
    for rank, state in grid.states.items():
        name = f"{state.file.rpartition('/')[0]}/{distrib.FILE}"
        if name in known:
            try:
                saved = saved_object(place.open(name), report, lazy=len(grid.states) > MANY_RANKS)
            except CheckpointError as error:
                report.extend([error.finding])
                continue
            imports.extend(saved.imports)
            by_rank[rank] = distrib.read_flat(state, saved.value, report, name, grid.topology.pp)
        elif state.root.get("optimizer") is not None:
            by_rank[rank] = optimizer.read_rank(state, grid.topology.tp)
            if state.args.get("use_distributed_optimizer") and not by_rank[rank].slots:
                report.add(
                    "missing-shard", "is not there: the distributed optimizer's moments and masters are in it",
                    where=name, hint="copy the file; or convert with --only weights",
                )
    kind = KINDS.get(str(grid.first.args.get("optimizer", "adam")), "")
    return optimizer.merge(by_rank, grid, placements, report, kind), tuple(imports)


def _rng(grid: Grid) -> Any:
    found = {s.file.rpartition("/")[0]: s.root["rng_state"] for s in grid.states.values() if "rng_state" in s.root}
    return found or None


def _state(grid: Grid) -> dict[str, Any]:
    """What else the first rank's file holds, and the extra state of every rank's modules."""
    first = grid.first
    state = {k: v for k, v in first.root.items() if k not in _TAKEN and not (k.startswith("model") and k[5:].isdigit())}
    if first.args:
        state["args"] = first.root["args"]
    extra: dict[str, Mapping[str, Any]] = {
        s.file.rpartition("/")[0]: {f"model{v}.{k}": x for v, part in enumerate(s.extra) for k, x in part.items()}
        for s in grid.states.values() if any(s.extra)
    }
    if extra:
        state["extra_state"] = extra
    return state


def _beside(place: Place, grid: Grid, report: Report) -> list[Any]:
    """Judge what else lies in the folder: a loader may find it."""
    known = {s.file for s in grid.states.values()}
    imports: list[Any] = []
    for name in place.names:
        if name in known or name.rpartition("/")[2] in (distrib.FILE, "model_optim_rng.pt", folders.TRACKER):
            continue
        if not name.endswith((".pt", ".pth", ".bin", ".pkl", ".ckpt")):
            continue
        try:
            imports.extend(saved_object(place.open(name), report).imports)
        except CheckpointError as error:
            if error.finding.code != "not-a-checkpoint":
                report.extend([error.finding])
    return imports


def verify(place: Place, checkpoint: Checkpoint, report: Report) -> None:
    """Deep: every rank file's checksums, equal replicas, masters that round to their weights."""
    found = folders.locate(place, Report())
    for name in found.place.names:
        if name.endswith(".pt"):
            file = found.place.open(name)
            row = of_file(file) if file.size else None
            hook = getattr(row.load(), "verify", None) if row is not None else None
            if hook is not None:
                hook(file, checkpoint, report)
    from anyckpt.formats.megatron.agree import check_masters, check_replicas

    check_replicas(checkpoint.facts.get("replicas", ()), report)
    check_masters(checkpoint, report)


