"""Optimizers that no rank shares: stage 0, in the model file's `optimizer`.

    fp32                      {"state": {k: {"step", "exp_avg", …}}, "param_groups": […]}           torch's own
    FP16_UnfusedOptimizer     {"optimizer_state_dict": …, "fp32_groups": [[master, …], …]}          in real shapes
    FP16_Optimizer            {"optimizer_state_dict": …, "fp32_groups_flat": [master], …}          one buffer a group

None has names: numbers run through the groups in the client's order and are matched with the weights by order and
shape, which is reported as inferred. Facts: DeepSpeed 0.19.8 `fp16/fused_optimizer.py`, `fp16/unfused_optimizer.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from math import prod
from typing import Any

from anyckpt.core.checkpoint import Optimizer
from anyckpt.core.tensor import Tensor
from anyckpt.finding import Report
from anyckpt.formats.deepspeed.joined import Joined, add_groups, joined_optimizer
from anyckpt.formats.deepspeed.load import mapping, sequence, tensor_of
from anyckpt.formats.deepspeed.partitions import packed_group
from anyckpt.formats.torch.optimizer import is_optimizer, read_optimizer

_KEPT = (
    "dynamic_loss_scale", "cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window", "clip_grad",
)


def read_unpartitioned(
    saved: Sequence[Mapping[Any, Any]], model: Joined, buffers: Set[str], report: Report, where: str
) -> tuple[Optimizer | None, dict[str, Any]]:
    """The optimizer of all pipeline stages, and the loss scaler's state.

    Stages number their parameters each for itself; laid end to end they run through the layers.
    """
    weights = {name: tensor for name, tensor in model.weights.items() if name not in buffers}
    kept = {key: saved[0][key] for key in _KEPT if key in saved[0]} if saved else {}
    if all("fp32_groups_flat" in one for one in saved):
        if len(saved) == 1:
            return _flat(saved[0], weights, model.aliases, report, where), kept
        message = "the fp16 optimizer's state of a pipeline without ZeRO"
        report.add("unsupported", message, where=where, severity="warning")
        return None, kept
    dicts = [_with_masters(one) for one in saved]
    if not all(is_optimizer(one) for one in dicts):
        return None, kept
    optimizer = read_optimizer(dicts, weights, report, aliases=model.aliases, where=where)
    return (_by_stage(optimizer, len(dicts), model) if len(dicts) > 1 else optimizer), kept


def _with_masters(saved: Mapping[Any, Any]) -> dict[Any, Any]:
    """torch's form, with the masters of FP16_UnfusedOptimizer as one more slot."""
    inner = mapping(saved.get("optimizer_state_dict", saved))
    masters = [tensor_of(t) for group in sequence(saved.get("fp32_groups")) for t in sequence(group)]
    if not masters:
        return inner
    state = mapping(inner.get("state"))
    with_masters = {k: {**mapping(state.get(k)), "master": t} for k, t in enumerate(masters) if t is not None}
    return {**inner, "state": with_masters}


def _by_stage(optimizer: Optimizer, n_stages: int, model: Joined) -> Optimizer:
    """Groups of one number in every stage are one group."""
    each, rest = divmod(len(optimizer.groups), n_stages)
    if rest or not each:
        return optimizer
    starts = range(0, len(optimizer.groups), each)
    model.stages = [[n for group in optimizer.groups[i : i + each] for n in group["params"]] for i in starts]
    groups = []
    for index in range(each):
        same = optimizer.groups[index::each]
        groups.append({**same[0], "params": [name for group in same for name in group["params"]]})
    return replace(optimizer, groups=tuple(groups))


def _flat(
    saved: Mapping[Any, Any], weights: Mapping[str, Tensor], aliases: Mapping[str, str], report: Report, where: str
) -> Optimizer | None:
    """FP16_Optimizer: one buffer a group, unpadded. Which parameters a group has, only its length tells."""
    inner = mapping(saved.get("optimizer_state_dict"))
    buffers = [tensor_of(value) for value in sequence(saved.get("fp32_groups_flat"))]
    lengths = [buffer.size for buffer in buffers if buffer is not None]
    own = {name: t.shape for name, t in weights.items() if name not in aliases}
    matrices = {n: s for n, s in own.items() if len(s) > 1}
    vectors = {n: s for n, s in own.items() if len(s) <= 1}
    ways = ([own], [matrices, vectors], [vectors, matrices])
    fits = next((way for way in ways if [sum(map(prod, g.values())) for g in way] == lengths), None)
    if fits is None:
        report.add(
            "ambiguous", f"the optimizer has {len(lengths)} buffers and no names: its parameters can't be told apart",
            where=where, hint="save once more with ZeRO stage 1, whose files have names",
        )
        return None
    message = "the optimizer's buffers have no names: cut by the order and sizes of the weights"
    report.add("inferred", message, where=where)
    state = {
        "base_optimizer_state": inner, "single_partition_of_fp32_groups": buffers, "group_paddings": [0] * len(lengths),
    }
    model = Joined()
    for index, named in enumerate(fits):
        add_groups(model, [packed_group(index, [0], {0: state}, named, report, where)])
    return joined_optimizer(model)
