"""The allowlist: exact `module.name` -> how we interpret it. What is not here is never safe.

A prefix is never trusted: `torch._utils` + `_rebuild_tensor_v2.__globals__.get` is not in this table.
"""

from __future__ import annotations

from types import MappingProxyType

from anyckpt.finding import Verdict
from anyckpt.pickle import arrays, plain, records, subclasses, tensors
from anyckpt.pickle.call import Row
from anyckpt.pickle.danger import why_dangerous

ALLOW: MappingProxyType[str, Row] = MappingProxyType(
    {**plain.ROWS, **arrays.ROWS, **tensors.ROWS, **subclasses.ROWS, **records.ROWS}
)

_DOTTED = frozenset(("ShardedTensor.ProcessGroupState",))
"""Nested classes: the only names with a dot that stand for themselves and not for a walk through a module."""


def classify(module: str, name: str) -> tuple[Verdict, str]:
    """The verdict on naming a global, and a reason that follows its name in a sentence."""
    row = ALLOW.get(f"{module}.{name}")
    if row is not None and ("." not in name or name in _DOTTED):
        return ("dangerous", "reaches any attribute by name") if row.guarded else ("safe", "")
    reason = why_dangerous(module, name)
    if reason:
        return "dangerous", reason
    return "unknown", "is not known to be harmless"
