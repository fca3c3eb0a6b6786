"""Tensor-parallel ranks merged by the patterns that a run saves: `universal_checkpoint_info`.

Regular expressions matched at the beginning of a name say how its slices make the whole
(DeepSpeed 0.19.8 `checkpoint/ds_to_universal.py`, `merge_tp_slices`); a name that none matches is cut along axis 0:

    tp_replicated_parameter_patterns              equal on all ranks
    parameter_to_average_patterns                 equal, but for rounding: DeepSpeed averages them, we take the first
    parameter_with_row_parallelism_patterns       cut along axis 1
    vocabulary_parameter_patterns                 cut along axis 0, the last rank's rows padded (kept as they are)
    parameter_with_2_sub_params_cat_dim_0         each rank holds its half of two parameters, one after the other
    parameter_with_sub_params                     the same for sub parameters of any sizes along any axis
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from anyckpt.core import ops
from anyckpt.core.box import whole
from anyckpt.core.tensor import Tensor
from anyckpt.finding import Report
from anyckpt.formats.deepspeed.joined import Joined
from anyckpt.formats.deepspeed.load import count, mapping, sequence

How = Literal["same", "cut", "vocabulary", "parts", "unknown"]

_SAME = ("tp_replicated_parameter_patterns", "parameter_to_average_patterns")
_ROW = "parameter_with_row_parallelism_patterns"
_VOCABULARY = "vocabulary_parameter_patterns"
_TWO = "parameter_with_2_sub_params_cat_dim_0"
_PARTS = "parameter_with_sub_params"


@dataclass(frozen=True, slots=True)
class Rule:
    """How a parameter is spread: `parts` are the sizes along `axis` of the sub parameters that are cut one by one."""

    how: How
    axis: int = 0
    parts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Rules:
    """The patterns of one run, in the order in which DeepSpeed asks them. `known`: whether there were any."""

    rows: tuple[tuple[re.Pattern[str], Rule], ...] = ()
    vocabulary: int = 0
    known: bool = False

    @staticmethod
    def of(info: Any) -> Rules:
        """Read `universal_checkpoint_info`; patterns that are no regular expressions match nothing."""
        saved = mapping(info)
        rows: list[tuple[re.Pattern[str], Rule]] = []
        for key in _SAME:
            rows += _compiled(saved.get(key), Rule("same"))
        for one in sequence(saved.get(_PARTS)):
            shape = sequence(mapping(one).get("shape"))
            axis = count(mapping(one).get("partition_dim"))
            sizes = shape[axis] if 0 <= axis < len(shape) else ()
            parts = tuple(count(n) for n in sequence(sizes)) or (count(sizes),)
            rows += _compiled(mapping(one).get("patterns"), Rule("parts", axis, parts))
        rows += _compiled(saved.get(_TWO), Rule("parts", 0))
        rows += _compiled(saved.get(_ROW), Rule("cut", 1))
        rows += _compiled(saved.get(_VOCABULARY), Rule("vocabulary", 0))
        return Rules(tuple(rows), count(saved.get("original_vocab_size")), bool(saved))

    def rule(self, name: str) -> Rule:
        """How a parameter is spread over the tensor-parallel ranks."""
        for pattern, rule in self.rows:
            if pattern.match(name):
                return rule
        return Rule("cut", 0) if self.known else Rule("unknown")


def _compiled(patterns: Any, rule: Rule) -> Iterable[tuple[re.Pattern[str], Rule]]:
    for text in sequence(patterns):
        if isinstance(text, str) and len(text) < 1000:
            try:
                yield re.compile(text), rule
            except re.error:
                continue


def merged(ranks: Sequence[Joined], rules: Rules, report: Report) -> Joined:
    """A pipeline stage from its tensor-parallel ranks; moments merge as their weight does."""
    first = ranks[0]
    if len(ranks) == 1:
        return first

    def joined(tables: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        out: dict[str, Tensor] = {}
        for name in tables[0]:
            parts = [table[name] for table in tables if name in table]
            if len(parts) == len(tables):
                out[name] = merged_tensors(name, parts, rules, report)
        return out

    slots = {
        slot: joined([rank.slots.get(slot, {}) for rank in ranks])
        if any(t.ndim for t in tensors.values())
        else tensors
        for slot, tensors in first.slots.items()
    }
    return Joined(
        joined([rank.weights for rank in ranks]), first.aliases, slots, first.groups, first.strange, first.kept
    )


def merged_tensors(name: str, parts: Sequence[Tensor], rules: Rules, report: Report) -> Tensor:
    """The whole tensor. Slices of one axis (norms) that no pattern names are equal on all ranks."""
    if len(parts) == 1:
        return parts[0]
    rule = rules.rule(name)
    if rule.how == "same":
        return parts[0]
    if rule.how == "unknown":
        report.add(
            "unmapped-tensor",
            f"{name} is in {len(parts)} tensor-parallel ranks, and nothing saved says how it was cut (no "
            "universal_checkpoint_info)",
            hint="the run's framework must say how: Megatron-DeepSpeed saves it, and so does AutoTP",
        )
        return parts[0]
    axis = min(rule.axis, parts[0].ndim - 1)
    if rule.how == "parts":
        sizes = rule.parts or (sum(p.shape[axis] for p in parts) // 2,) * 2
        pieces: list[Tensor] = []
        at = 0
        for size in sizes:
            each = size // len(parts)
            pieces += [_slab(part, axis, at, at + each) for part in parts]
            at += each
        return ops.concat(pieces, axis)
    return ops.concat(parts, axis)


def without_padding(tensor: Tensor, rules: Rules) -> Tensor:
    """A vocabulary's rows without those that pad it for the tensor-parallel ranks."""
    return _slab(tensor, 0, 0, rules.vocabulary) if 0 < rules.vocabulary < tensor.shape[0] else tensor


def split(name: str, tensor: Tensor, tp: int, rules: Rules) -> list[Tensor]:
    """A whole tensor cut for `tp` ranks, which `merged_tensors` undoes. Raises ValueError where it can't be cut."""
    if tp == 1:
        return [tensor]
    rule = rules.rule(name)
    if rule.how == "unknown":
        raise ValueError(f"nothing says how {name} is cut over tensor-parallel ranks")
    if rule.how == "same":
        return [tensor] * tp
    axis = min(rule.axis, tensor.ndim - 1)
    n = tensor.shape[axis]
    sizes = (rule.parts or (n // 2, n - n // 2)) if rule.how == "parts" else (n,)
    if sum(sizes) != n or any(size % tp for size in sizes):
        raise ValueError(f"{name} has {n} rows along axis {axis}, which {tp} ranks can't share evenly")
    out = []
    for rank in range(tp):
        pieces, at = [], 0
        for size in sizes:
            each = size // tp
            pieces.append(_slab(tensor, axis, at + rank * each, at + (rank + 1) * each))
            at += size
        out.append(ops.concat(pieces, axis))
    return out


def _slab(tensor: Tensor, axis: int, start: int, stop: int) -> Tensor:
    box = whole(tensor.shape)
    low = tuple(start if a == axis else x for a, x in enumerate(box.start))
    high = tuple(stop if a == axis else x for a, x in enumerate(box.stop))
    return ops.slice_tensor(tensor, type(box)(low, high))
