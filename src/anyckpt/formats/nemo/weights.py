"""The weights in a NeMo 1 archive or its unpacked folder: one state dict, ranks of one, or a distributed checkpoint."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from anyckpt.core.checkpoint import Checkpoint
from anyckpt.core.topology import Topology
from anyckpt.errors import CheckpointError
from anyckpt.finding import Report, fail
from anyckpt.formats.megatron import dist, folders
from anyckpt.formats.megatron.join import join_all, place_all, weights_lookup
from anyckpt.formats.megatron.ranks import on_grid, topology_of
from anyckpt.formats.torch.saved import saved_object
from anyckpt.io.place import Place

CONFIG = "model_config.yaml"
_WEIGHTS = re.compile(
    r"(?:(?:mp_rank_(?P<tp>\d{2,})|tp_rank_(?P<tp2>\d{2,})_pp_rank_(?P<pp>\d{3,}))/)?model_weights\.ckpt"
)
_DIST = "model_weights"
_PREFIX = re.compile(r"(model\.|module\.)+")


def is_weights(name: str) -> bool:
    """Whether a member's name is that of weights."""
    return _WEIGHTS.fullmatch(name) is not None or name.startswith(f"{_DIST}/")


def read_weights(place: Place, config: Mapping[str, Any] | None, report: Report) -> Checkpoint:
    """The weights with their topology. Raises [missing-record] where there are none."""
    if f"{_DIST}/.metadata" in place.names:
        return _read_dist(place, config, report)
    read, damaged = [], []
    for name in place.names:
        match = _WEIGHTS.fullmatch(name)
        if match is None:
            continue
        rank = folders.RankName(name, int(match["tp"] or match["tp2"] or 0), (), int(match["pp"] or 0))
        try:
            saved = saved_object(place.open(name), report)
            if not isinstance(saved.value, dict):
                raise fail("malformed-item", "is no state dict", where=name)
            tree = saved.value.get("state_dict", saved.value)
            root = {"model": _plain(tree), "args": dict(config or {}), "checkpoint_version": 3.0}
            read.append((rank, root, saved.imports))
        except CheckpointError as error:
            report.extend([error.finding])
            damaged.append(rank)
    if not read:
        if report.errors:
            raise CheckpointError(report.errors[0])
        raise fail("missing-record", "there are no weights in it", where=str(place.path))
    sizes = topology_of(config) if config and len(read) + len(damaged) > 1 else None
    grid = on_grid(read, replace(sizes, vpp=1) if sizes else None, report, damaged)
    weights = join_all(place_all(grid, report), weights_lookup(grid), report)
    imports = tuple(dict.fromkeys(i for _, _, own in read for i in own))
    extra = {k: v for state in grid.states.values() for part in state.extra for k, v in part.items()}
    return Checkpoint(
        "nemo", str(place.path), weights, topology=grid.topology if len(grid.states) > 1 else Topology(),
        state={"extra_state": extra} if extra else {},
        facts={"files": tuple(s.file for s in grid.states.values()), "imports": imports},
    )


def _plain(tree: Any) -> Any:
    """A state dict without the attributes of NeMo's classes before its names: `model.`, and `module.` under O2."""
    if not isinstance(tree, dict):
        return tree
    names = [k for k in tree if isinstance(k, str)]
    if not names or not all(_PREFIX.match(n) for n in names):
        return tree
    return {_PREFIX.sub("", str(k), count=1): v for k, v in tree.items()}


def _read_dist(place: Place, config: Mapping[str, Any] | None, report: Report) -> Checkpoint:
    inner = place.subplace(_DIST)
    checkpoint = dist.read(inner, report)
    return replace(checkpoint, weights=plain_names(checkpoint.weights))


def plain_names(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Names without `model.` and `module.` before them, where all have one of these."""
    if not tensors or not all(_PREFIX.match(n) for n in tensors):
        return dict(tensors)
    return {_PREFIX.sub("", n, count=1): t for n, t in tensors.items()}
