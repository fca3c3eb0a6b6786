"""Folders in which every rank saved its own file: DTensor and ShardedTensor pickles, flat parameters, or replicas.

    rank0.pt rank1.pt …                                                torch.save on every rank
    model_world_size_4_rank_0.pt …  optim_…  extra_state_…             verl (fsdp_config.json, huggingface/ beside)
    pytorch_model_fsdp_0_rank0.bin …  optimizer_0_rank0.bin …          Accelerate, use_dcp=False
    model_0000999.rank_0.pth …                                         dinov2 (flat parameters)

    located   what one rank holds of a tensor      join   the ranks' objects as one      flat   FSDP1's flat parameters

Nothing but the files themselves is needed: a DTensor says its mesh and place, a ShardedTensor its offsets. Flat
parameters name neither parameters nor shapes; those are read with a reference (`like`) only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from anyckpt.core.checkpoint import Checkpoint
from anyckpt.core.inert import walk
from anyckpt.core.topology import Topology
from anyckpt.errors import CheckpointError
from anyckpt.finding import Report, fail
from anyckpt.formats import of_file
from anyckpt.formats.hf.beside import look_beside, with_companions
from anyckpt.formats.ranks import flat
from anyckpt.formats.ranks.join import differing_plain_tensors, joined
from anyckpt.formats.ranks.located import is_sharded
from anyckpt.formats.torch import archive
from anyckpt.formats.torch import zip as torch_zip
from anyckpt.formats.torch.state import read_state
from anyckpt.io.paths import printable
from anyckpt.io.place import Place

_NAME = re.compile(
    r"(?P<stem>.*?)(?P<mark>[._-]?rank[._-]?)(?P<rank>\d{1,6})(?P<tail>[^/\d][^/]*)?\.(?P<ending>pt|pth|bin|ckpt)"
)
_NOT_OURS = re.compile(r"mp_rank|zero_pp|rng|random_state|tp_rank|pp_rank|optim_states|model_states")
_WORLD = re.compile(r"world_size_(\d{1,6})")
_OPTIMIZER = re.compile(r"^optim", re.IGNORECASE)
_EXTRA = re.compile(r"^(extra|rng|random|trainer|scheduler|sched)", re.IGNORECASE)
_COUNT = re.compile(r"\d+(?!.*\d)")


@dataclass(frozen=True, slots=True)
class RankSet:
    """Files of one kind by rank. `stem` is the name before the rank, `world` the size that the name tells, or 0."""

    stem: str
    files: Mapping[int, str]
    world: int

    @property
    def is_model(self) -> bool:
        """Whether it should hold the weights, by its name."""
        return not _OPTIMIZER.search(self.stem) and not _EXTRA.search(self.stem)


def rank_sets(place: Place) -> list[RankSet]:
    """The sets among the folder's own files, those of weights first, of several steps the latest."""
    found: dict[tuple[str, str], dict[int, str]] = {}
    for name in place.names:
        match = _NAME.fullmatch(name)
        if match and "/" not in name and not _NOT_OURS.search(name):
            key = (match["stem"], f"{match['tail'] or ''}.{match['ending']}")
            found.setdefault(key, {})[int(match["rank"])] = name
    sets = [RankSet(stem, dict(sorted(files.items())), _world(stem)) for (stem, _), files in found.items()]
    return sorted(sets, key=lambda s: (not s.is_model, -_step(s.stem), -len(s.files)))


def _world(stem: str) -> int:
    match = _WORLD.search(stem)
    return int(match[1]) if match else 0


def _step(stem: str) -> int:
    match = _COUNT.search(_WORLD.sub("", stem))
    return int(match[0]) if match else -1


def matches(place: Place) -> bool:
    """A set of weights of several ranks, or of one that says so in its name or holds a part of a tensor."""
    sets = [s for s in rank_sets(place) if s.is_model]
    if not sets:
        return False
    if len(sets[0].files) > 1 or sets[0].world:
        return True
    row = of_file(place.open(next(iter(sets[0].files.values()))))
    return row is not None and row.name == "torch"


def read(place: Place, report: Report) -> Checkpoint:
    """Read and join the ranks' files. Raises CheckpointError [missing-config] for flat parameters: they need `like`."""
    return _read(place, report, None)


def read_like(place: Place, report: Report, like: Checkpoint) -> Checkpoint:
    """As `read`, the names, order and shapes of flat parameters taken from another checkpoint of the same model."""
    return _read(place, report, like)


def _read(place: Place, report: Report, like: Checkpoint | None) -> Checkpoint:
    sets = rank_sets(place)
    chosen = sets[0]
    same_step = [s for s in sets[1:] if not s.is_model and s.world == chosen.world]
    if others := [s.stem for s in sets[1:] if s.is_model]:
        message = f"{len(others)} other sets of ranks' files are in this folder; {printable(chosen.stem)!r} is read"
        report.add("ambiguous", message, where=printable(str(place.path)))
    imports: tuple[Any, ...] = ()
    objects, found = _load(place, chosen, report)
    imports += found
    by_role: dict[str, Any] = {}
    for one in same_step:
        ranks, found = _load(place, one, report)
        imports += found
        by_role[one.stem] = joined(ranks, report, one.stem) if ranks else None
    _check_ranks(chosen, objects, report)
    if flat.is_flat(objects):
        if like is None:
            raise fail(
                "missing-config", "FSDP saved flat parameters, which carry neither names nor shapes",
                where=printable(str(place.path)),
                hint="name a checkpoint of the same model: anyckpt convert PATH OUT --like MODEL; open(path, like=…)",
            )
        root: Any = flat.unflattened(objects, like, report, chosen.stem or str(place.path))
    else:
        _check_replicas(chosen, objects, report)
        root = joined(objects, report, chosen.stem or "ranks")
    root = _with_roles(root, by_role)
    facts = {"container": "torch zip", "imports": tuple(dict.fromkeys(imports)), "ranks": len(objects)}
    checkpoint = read_state(root, format="ranks", path=str(place.path), report=report, facts=facts)
    look_beside(place, {name for s in sets for name in s.files.values()}, report)
    world = chosen.world or max(objects, default=0) + 1
    checkpoint = replace(checkpoint, topology=Topology(world=world) if world > 1 else None)
    folder = place.subplace("huggingface") if place.kinds.get("huggingface") == "folder" else place
    return with_companions(folder, checkpoint, report)


def _load(place: Place, one: RankSet, report: Report) -> tuple[dict[int, Any], tuple[Any, ...]]:
    """The object of each rank, and what their pickles import."""
    objects: dict[int, Any] = {}
    imports: list[Any] = []
    for rank, name in one.files.items():
        file = place.open(name)
        try:
            row = of_file(file)
            if row is None or row.name != "torch":
                raise fail("not-a-checkpoint", "is no torch.save file", where=file.name)
            result, _ = torch_zip.load(archive.open_archive(file, report), report)
        except CheckpointError as error:
            report.extend([error.finding])
            report.worsen("unknown")
            continue
        objects[rank] = result.value
        imports += result.imports
    if not objects and one.is_model:
        raise CheckpointError(report.errors[0])
    return objects, tuple(imports)


def _check_ranks(chosen: RankSet, objects: Mapping[int, Any], report: Report) -> None:
    """Ranks that are missing by their numbers or by the world size in the names; `join` sees parts that are missing."""
    world = chosen.world or max(chosen.files) + 1
    lacking = [rank for rank in range(min(world, 100_000)) if rank not in chosen.files]
    if lacking:
        some = ", ".join(map(str, lacking[:8]))
        report.add(
            "missing-shard",
            f"the file of rank {some}{' and more' if len(lacking) > 8 else ''} of {world} is not there",
            where=printable(chosen.stem or next(iter(chosen.files.values()))),
            hint="copy the files of every rank into one folder",
        )


def _check_replicas(chosen: RankSet, objects: Mapping[int, Any], report: Report) -> None:
    """Files of several ranks without a sharded tensor are replicas, or parts that nothing tells how to join."""
    if len(objects) < 2 or any(is_sharded(v) for value in objects.values() for _, v in walk(value)):
        return
    if name := differing_plain_tensors(list(objects.values())):
        report.add(
            "inconsistent", f"every rank holds plain tensors, and they differ ({printable(name)}): whether they are "
            "parts of one, and how these join, is not in the files", where=printable(chosen.stem),
            hint="open one rank's file by itself, or save with torch.distributed.checkpoint",
        )


def _with_roles(root: Any, by_role: Mapping[str, Any]) -> Any:
    """The model's object with what other sets of the same save hold."""
    if not by_role:
        return root
    wrapped = root if isinstance(root, dict) and any(k in root for k in ("model", "state_dict")) else {"model": root}
    out = dict(wrapped)
    for stem, value in by_role.items():
        if _OPTIMIZER.search(stem):
            nested = isinstance(value, dict) and "param_groups" not in value
            out.update(value if nested else {"optimizer": value})
        elif isinstance(value, dict):
            out.update({k: v for k, v in value.items() if k not in out})
        else:
            out[stem] = value
    return out


def verify(place: Place, checkpoint: Checkpoint, report: Report) -> None:
    """Deep: the checksums of every rank's file."""
    for one in rank_sets(place):
        for name in one.files.values():
            torch_zip.verify(place.open(name), checkpoint, report)
