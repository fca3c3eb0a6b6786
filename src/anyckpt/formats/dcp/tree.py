"""The object that was saved, rebuilt from flat names.

torch flattens dicts, and lists that hold a tensor or a dict, and notes in `planner_data` the path of keys and indices
that each name stands for: names contain dots of their own, so that they could not be split again. All keys are text
(integer ids of an optimizer too). Files of torch 2.3 and before leave dicts without tensors whole.

`get_state_dict` with flatten_optimizer_state_dict flattens the optimizer once more, without a note of it:

    "state.<parameter>.<slot>"    "param_groups.<parameter>.<option>"
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anyckpt.core.tensor import Tensor
from anyckpt.finding import Report
from anyckpt.formats.dcp.records import Path
from anyckpt.io.paths import printable

_STATE, _GROUPS = "state.", "param_groups."


class _List(dict[int, Any]):
    """A list in the making, by index."""


def unflatten(values: Mapping[str, Any], paths: Mapping[str, Path], report: Report, where: str = "") -> dict[str, Any]:
    """Nested dicts and lists from flat names; a name without a path stands at the root."""
    root: dict[Any, Any] = {}
    for name, value in values.items():
        path = paths.get(name, (name,))
        if isinstance(path[0], int):
            path = (str(path[0]), *path[1:])
        if not _put(root, tuple(path), value):
            root[name] = value
            report.add("inconsistent", f"{printable(name)!r} has the place of another entry", where=where)
    return {str(key): _plain(value) for key, value in root.items()}


def _put(root: dict[Any, Any], path: Path, value: Any) -> bool:
    at = root
    for part, following in zip(path, path[1:], strict=False):
        inner = at.get(part)
        if inner is None:
            inner = at[part] = _List() if isinstance(following, int) else {}
        if type(inner) is not (_List if isinstance(following, int) else dict):
            return False
        at = inner
    if path[-1] in at:
        return False
    at[path[-1]] = value
    return True


def _plain(value: Any) -> Any:
    """Lists from their indices, and optimizers from their second flattening. Depth is bounded by that of paths."""
    if type(value) is _List:
        return [_plain(value[i]) for i in sorted(value)]
    if type(value) is not dict:
        return value
    if value and all(isinstance(key, str) and key.startswith((_STATE, _GROUPS)) for key in value):
        return optimizer(value)
    return {key: _plain(inner) for key, inner in value.items()}


def optimizer(flat: Mapping[str, Any]) -> dict[str, Any]:
    """A flattened optimizer as a state dict by names; parameters of equal options make a group, as they were built."""
    state: dict[str, dict[str, Any]] = {}
    options: dict[str, dict[str, Any]] = {}
    for key, value in flat.items():
        into = state if key.startswith(_STATE) else options
        parameter, _, slot = key.removeprefix(_STATE if into is state else _GROUPS).rpartition(".")
        into.setdefault(parameter, {})[slot] = value
    groups: dict[str, dict[str, Any]] = {}
    for parameter, own in options.items():
        plain = {k: v for k, v in own.items() if not isinstance(v, Tensor)}
        group = groups.setdefault(repr(sorted(plain.items(), key=lambda item: item[0])), {**own, "params": []})
        group["params"].append(parameter)
    return {"state": state, "param_groups": list(groups.values())}
