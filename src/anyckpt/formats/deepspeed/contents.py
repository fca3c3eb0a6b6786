"""The contents of a step: every file loaded, and what the run was: stage, ranks, degrees. Whether files are missing.

The stage is told by what the files hold, never by their names; BF16_Optimizer's say none (-1 here).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from anyckpt.core.box import Shape
from anyckpt.core.dtypes import DTYPES, DType
from anyckpt.finding import Report
from anyckpt.formats.deepspeed.files import Part
from anyckpt.formats.deepspeed.load import Loader, count, mapping, sequence, shapes_of
from anyckpt.formats.torch.state import as_count
from anyckpt.io.paths import printable


@dataclass(slots=True)
class Step:
    """What the files of a step hold, by the numbers in their names."""

    models: dict[int, dict[int, dict[str, Any]]] = field(default_factory=dict)  # mp -> dp (0 where not a rank's)
    optims: dict[int, dict[int, dict[str, Any]]] = field(default_factory=dict)  # mp -> dp -> optimizer_state_dict
    layers: dict[int, dict[int, dict[str, Any]]] = field(default_factory=dict)  # layer -> tp
    experts: list[tuple[Part, dict[str, Any]]] = field(default_factory=list)
    expert_optims: dict[int, dict[str, Any]] = field(default_factory=dict)
    by_rank: bool = False  # model files are one a data-parallel rank: stage 3
    bf16: bool = False
    names: dict[tuple[str, int, int], str] = field(default_factory=dict)

    def model(self, mp: int) -> dict[str, Any]:
        """The first model file of a model-parallel rank."""
        files = self.models.get(mp, {})
        return files[min(files)] if files else {}

    @property
    def first(self) -> dict[str, Any]:
        """The model file that speaks for the run."""
        return self.model(min(self.models)) if self.models else {}


def load(loader: Loader, parts: Iterable[Part], report: Report, *, universal: bool = False) -> Step:
    """Load every file of the step. Of files with and without `bf16_`, those of the run's own mode are read.

    A `universal` folder may have model files for engines of both kinds; those with the module in them are read.
    """
    parts = list(parts)
    step = Step()
    if universal and any(part.kind == "model" and part.dp < 0 for part in parts):
        for part in [p for p in parts if p.kind == "model" and p.dp >= 0]:
            loader.dict(part)  # judged all the same
            parts.remove(part)
    for part in parts:
        if part.kind != "optim":
            value = loader.dict(part)
            if part.kind == "model":
                step.by_rank |= part.dp >= 0
                step.models.setdefault(part.mp, {})[max(part.dp, 0)] = value
            elif part.kind == "layer":
                step.layers.setdefault(part.layer, {})[part.mp] = value
            elif part.kind == "expert":
                step.experts.append((part, value))
            else:
                step.expert_optims[part.expert] = value
        step.names[part.kind, part.mp, max(part.dp, 0)] = part.name
    optims = [p for p in parts if p.kind == "optim"]
    step.bf16 = _mode(step, optims, report)
    for part in optims:
        if part.bf16 == step.bf16:
            value = mapping(loader.dict(part).get("optimizer_state_dict"))
            step.optims.setdefault(part.mp, {})[part.dp] = value
            step.names[part.kind, part.mp, part.dp] = part.name
    return step


def _mode(step: Step, optims: list[Part], report: Report) -> bool:
    """Whether the files with the bf16_ prefix are the run's."""
    modes = {part.bf16 for part in optims}
    if len(modes) < 2:
        return True in modes
    config = mapping(step.first.get("ds_config"))
    mine = bool(mapping(config.get("bf16", config.get("bfloat16"))).get("enabled"))
    left = next(p for p in optims if p.bf16 != mine)
    report.add(
        "mixed-steps", f"is of another run, saved over this one: files with and without bf16_ are here, and bf16 is "
        f"{'on' if mine else 'off'} in the run's config", where=printable(left.name),
        hint="delete the files of the other run, after making sure which they are", severity="warning",
    )
    return mine


def stage_of(step: Step) -> int:
    """The ZeRO stage, from what is inside: 0 where the optimizer is whole, -1 for BF16_Optimizer, which says none."""
    for by_rank in step.optims.values():
        for state in by_rank.values():
            if "fp32_flat_groups" in state:
                return 3
            if "zero_stage" in state:
                return count(state["zero_stage"])
            if "base_optimizer_state" in state:
                return -1
    if step.by_rank:
        return 3
    config = mapping(step.first.get("ds_config"))
    stage = count(mapping(config.get("zero_optimization")).get("stage"))
    if step.optims:
        return stage or 1
    return stage if step.first.get("param_shapes") is not None else 0


def n_ranks_of(step: Step, stage: int) -> int:
    """Over how many ranks the optimizer is cut."""
    saved = count(step.first.get("dp_world_size"))
    if stage == 3:
        for by_rank in step.optims.values():
            for state in by_rank.values():
                saved = count(state.get("partition_count"), saved)  # MiCS: the ranks of one shard group
    seen = 1 + max((rank for by_rank in step.optims.values() for rank in by_rank), default=0)
    return max(1, saved or seen)


def check_ranks(step: Step, stage: int, n_ranks: int, report: Report) -> None:
    """Report files of ranks that are missing, and of ranks that there are too many of."""
    if not step.models and not step.layers:
        report.add(
            "missing-shard", "there is no *_model_states.pt: names and shapes are in it, so nothing can be read",
            where="mp_rank_00_model_states.pt", hint="copy the file from the machine of the first rank",
        )
    n_mp = max(count(step.first.get("mp_world_size"), 1), 1 + max([*step.models, *step.optims], default=0))
    partitioned = stage != 0
    for mp in range(n_mp):
        wanted: list[tuple[str, int, str]] = []
        if partitioned:
            prefix = "bf16_" if step.bf16 else ""
            ending = f"mp_rank_{mp:02d}_optim_states.pt"
            wanted += [("optim", rank, f"{prefix}zero_pp_rank_{rank}_{ending}") for rank in range(n_ranks)]
        if step.by_rank:
            ending = f"mp_rank_{mp:02d}_model_states.pt"
            wanted += [("model", rank, f"zero_pp_rank_{rank}_{ending}") for rank in range(n_ranks)]
        elif step.models:
            wanted += [("model", 0, f"mp_rank_{mp:02d}_model_states.pt")]
        lacking = [name for kind, rank, name in wanted if (kind, mp, rank) not in step.names]
        if lacking:
            more = f", and {len(lacking) - 1} more" if len(lacking) > 1 else ""
            what = "the weights are in the optimizer's files, the model's hold placeholders; " if stage == 3 else ""
            report.add(
                "missing-shard", f"is not there{more}: {what}the run had {n_ranks} data-parallel ranks",
                where=lacking[0], hint="copy it from the node of that rank: each node wrote its own ranks' files",
            )
        extra = [step.names["optim", mp, rank] for rank in step.optims.get(mp, {}) if rank >= n_ranks]
        if extra:
            report.add(
                "extra-shard", f"is of a run with more than {n_ranks} ranks that was saved here before",
                where=printable(extra[0]), hint="delete it: DeepSpeed's own zero_to_fp32.py stops at it",
            )
        for rank in [r for r in step.optims.get(mp, {}) if r >= n_ranks]:
            del step.optims[mp][rank]
    _check_steps(step, report)


def _check_steps(step: Step, report: Report) -> None:
    """All files must be of one step: the counts in the model files, and the optimizer's own, which ranks hold each."""
    told = {
        name: steps for (kind, mp, rank), name in step.names.items()
        if kind == "model" and (steps := step.models.get(mp, {}).get(rank, {}).get("global_steps")) is not None
    }
    for mp, by_rank in step.optims.items():
        for rank, state in by_rank.items():
            base = state.get("base_optimizer_state", state.get("optimizer_state_dict"))
            first = next(iter(mapping(mapping(base).get("state")).values()), None)
            taken = as_count(mapping(first).get("step"))
            if taken is not None and (name := step.names.get(("optim", mp, rank))):
                told[f"{name} "] = taken
    for kind in ("model_states.pt", "optim_states.pt "):
        mine = {name: n for name, n in told.items() if name.endswith(kind)}
        if len(set(mine.values())) > 1:
            usual = max(set(mine.values()), key=list(mine.values()).count)
            odd = next(name for name, n in mine.items() if n != usual)
            report.add(
                "mixed-steps", f"is of step {mine[odd]}, the other ranks' files are of step {usual}",
                where=odd.strip(), hint="copy that rank's file of the same step, or use an earlier step",
            )


def degrees(step: Step) -> tuple[int, int]:
    """Tensor and pipeline parallel sizes; ranks count pipeline stages slowest."""
    first = step.first
    n_mp = max(1, count(first.get("mp_world_size"), 1), 1 + max([*step.models, *step.optims], default=0))
    saved = mapping(first.get("checkpoint_parallel_dimensions"))
    tp, pp = count(saved.get("tp_degree")), count(saved.get("pp_degree"))
    if tp * pp == n_mp:
        return tp, pp
    if step.layers:
        tp = max(1, max(1 + max(by_tp) for by_tp in step.layers.values()))
        return (tp, n_mp // tp) if n_mp % tp == 0 else (1, n_mp)
    return n_mp, 1


def patterns_of(step: Step) -> Any:
    """AutoTP's patterns, which stand in the optimizer's files as well."""
    states = (state for by_rank in step.optims.values() for state in by_rank.values())
    return next((s["universal_checkpoint_info"] for s in states if s.get("universal_checkpoint_info")), None)


def named_of(model: Mapping[str, Any]) -> list[dict[str, Shape]]:
    """`param_shapes`: one dict a flat group; very old files have one for all."""
    saved = model.get("param_shapes")
    return [shapes_of(saved)] if isinstance(saved, dict) else [shapes_of(one) for one in sequence(saved)]


def compute_dtype(step: Step) -> DType:
    """The element type that the run computes with."""
    config = mapping(step.first.get("ds_config"))
    if step.bf16 or mapping(config.get("bf16", config.get("bfloat16"))).get("enabled"):
        return DTYPES["bfloat16"]
    return DTYPES["float16" if mapping(config.get("fp16")).get("enabled") else "float32"]
