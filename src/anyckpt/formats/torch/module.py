"""Whole pickled modules: the weights out of the inert tree, without the classes, as `state_dict()` would give them.

    NEWOBJ(class) BUILD {"_parameters": {name: Parameter | None}, "_buffers": {…}, "_modules": {name: module | None},
                         "_non_persistent_buffers_set": {names}, …}

torch/nn/modules/module.py: parameters, then buffers, then children, None left out, non-persistent buffers left out
(a set since 1.6; before that all buffers were saved). TorchScript modules have their own layout: see `script`.
"""

from __future__ import annotations

from typing import Any

from anyckpt.core.inert import Opaque
from anyckpt.finding import fail

MAX_DEPTH = 200  # torch itself recurses, so deeper modules can't have been saved
MAX_COPIES = 16  # shared modules are named once for each way to them, as state_dict() does, and in reason


def is_module(value: Any) -> bool:
    """Whether an inert object is a pickled nn.Module."""
    return isinstance(value, Opaque) and isinstance(value.state, dict) and (
        isinstance(value.state.get("_modules"), dict) and isinstance(value.state.get("_parameters"), dict)
    )


def module_entries(module: Opaque) -> dict[str, Any]:
    """Name -> what `state_dict()` would give for it, in its order.

    Raises CheckpointError [limit-exceeded] where modules that share modules multiply.
    """
    entries: dict[str, Any] = {}
    todo = [("", module, 0)]
    for _ in range(1000 + MAX_COPIES * _n_modules(module)):
        if not todo:
            return entries
        prefix, module, depth = todo.pop()
        entries.update((f"{prefix}{name}", value) for name, value in _own(module).items())
        if depth < MAX_DEPTH:
            children = [(f"{prefix}{name}.", child) for name, child in module.state["_modules"].items()]
            todo.extend((name, child, depth + 1) for name, child in reversed(children) if is_module(child))
    raise fail("limit-exceeded", "modules in it that are shared multiply beyond what a model has")


def _n_modules(module: Opaque) -> int:
    """How many modules there are, shared ones counted once."""
    seen = {id(module)}
    todo = [module]
    while todo:
        for child in todo.pop().state["_modules"].values():
            if is_module(child) and id(child) not in seen:
                seen.add(id(child))
                todo.append(child)
    return len(seen)


def _own(module: Opaque) -> dict[Any, Any]:
    """The parameters and persistent buffers of one module."""
    buffers = module.state.get("_buffers")
    skipped = module.state.get("_non_persistent_buffers_set")
    skipped = skipped if isinstance(skipped, set | frozenset) else frozenset()
    own = {name: value for name, value in module.state["_parameters"].items() if value is not None}
    if isinstance(buffers, dict):
        own.update((name, value) for name, value in buffers.items() if value is not None and name not in skipped)
    return own
