"""Which part of a saved object is the model: the root unwrapped, tensors told from the rest.

People save a state dict, a dict with one under `model` or `state_dict` beside optimizer and counters, a whole module,
several state dicts, or one tensor. DESIGN: the weights are the file's own names after this unwrapping and nothing else.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from anyckpt.core.inert import Mapping, NumpyArray, Opaque, TensorSubclass
from anyckpt.core.tensor import Tensor
from anyckpt.finding import fail
from anyckpt.formats.torch.module import is_module, module_entries
from anyckpt.formats.torch.optimizer import is_optimizer

WEIGHT_KEYS = (
    "model", "state_dict", "module", "model_state_dict", "model_state", "modelState", "params", "net", "network",
    "net_state_dict", "weights", "model_weights", "params_ema", "generator", "policy_model_state_dict",
)
"""Where trainers put the model, the most telling first (tutorials, Lightning, fairseq, mmcv, DeepSpeed, BasicSR)."""

_AVERAGED = re.compile(r"(^|_)(ema|swa|averaged?|shadow)(_|$)|model_ema|ema_model", re.IGNORECASE)
_NOT_WEIGHTS = re.compile(
    r"optim|sched|rng|random_state|scaler|loss|metric|callback|loops?$|hyper_parameters|hparams|^args$|^config$|^cfg$|"
    r"sampler|dataloader|history",
    re.IGNORECASE,
)
MAX_DEPTH = 64
MAX_COPIES = 16  # how often, on average, what is shared may be named before it is an attack

_RNG_BYTES = (5056, 16)  # of torch's generators on the CPU (c10 mt19937 with its caches) and on CUDA (seed, offset)
_RNG = re.compile(r"rng|random|seed", re.IGNORECASE)

Entry = Tensor | TensorSubclass


@dataclass(frozen=True, slots=True)
class Holding:
    """The ids of the containers that hold tensors, and how many names may come out of all of them."""

    ids: frozenset[int]
    max_names: int

    def __contains__(self, container: int) -> bool:
        return container in self.ids


@dataclass(slots=True)
class Unwrapped:
    """`entries`: the model's tensors by name; `others`: what stood among them that is none (`_extra_state`).

    `path`: the keys from the root to them. `rest`: the root without them. `module_class`: they were pickled as a whole
    module, of that class. `attributes`: what was set on the state dict itself, `_metadata` for one.
    """

    entries: dict[str, Entry]
    others: dict[str, Any] = field(default_factory=dict)
    path: tuple[str, ...] = ()
    rest: dict[str, Any] = field(default_factory=dict)
    module_class: str = ""
    attributes: dict[str, Any] = field(default_factory=dict)


def unwrap(root: Any) -> Unwrapped:
    """Find the model in what was saved. Without entries: nothing in it can be one.

    Raises CheckpointError [limit-exceeded] where shared containers multiply into millions of names.
    """
    if (entry := as_entry(root)) is not None:
        return Unwrapped({"tensor": entry})
    if isinstance(root, Opaque) and not is_module(root) and root.attributes():
        root = root.attributes()
    holding = _holding(root)
    if is_module(root):
        return _of_module(root, (), holding)
    if isinstance(root, list | tuple):
        return _of_list(root, holding)
    if not isinstance(root, dict):
        return Unwrapped({}, rest={"value": root})
    return Unwrapped({}, rest=_named(root)) if is_optimizer(root) else _of_dict(root, (), holding)


def as_entry(value: Any) -> Entry | None:
    """A value as a weight, if it is one; numpy arrays count, numpy scalars do not."""
    if isinstance(value, Tensor | TensorSubclass):
        return value
    return value.tensor if isinstance(value, NumpyArray) and not value.is_scalar else None


def _holding(root: Any) -> Holding:
    """The containers in `root` that hold tensors at any depth, optimizers left out; each is looked at once."""
    n_items = 0
    parents: dict[int, list[int]] = {}
    todo: list[Any] = [root]
    held: list[int] = []
    while todo:
        container = todo.pop()
        if is_module(container):
            held.append(id(container))
            n_items += len(module_entries(container))
            continue
        children = container.values() if isinstance(container, dict) else container
        for child in children if isinstance(container, dict | list | tuple) else ():
            n_items += 1
            if as_entry(child) is not None:
                held.append(id(container))
            elif isinstance(child, dict | list | tuple | Opaque) and not is_optimizer(child):
                above = parents.setdefault(id(child), [])
                if not above:
                    todo.append(child)
                above.append(id(container))
    found: set[int] = set()
    while held:
        one = held.pop()
        if one not in found:
            found.add(one)
            held.extend(parents.get(one, ()))
    return Holding(frozenset(found), 1000 + MAX_COPIES * n_items)


def _of_dict(root: dict[Any, Any], path: tuple[str, ...], holding: Holding) -> Unwrapped:
    """A dict: a wrapper around a state dict, a state dict, or several state dicts."""
    named = _named(root)
    for key in WEIGHT_KEYS:
        if id(named.get(key)) in holding:
            return _of_wrapper(named, key, path, holding)
    if any(as_entry(v) is not None and not _is_rng(k, v) for k, v in named.items()):
        return _of_state_dict(root, path, holding, mixed=True)
    parts = [k for k, v in named.items() if id(v) in holding and not _NOT_WEIGHTS.search(k)]
    models = [k for k in parts if not _AVERAGED.search(k)] or parts
    if len(models) == 1:
        value = named[models[0]]
        if is_module(value) or (isinstance(value, dict) and len(path) < 3 and set(_named(value)) & set(WEIGHT_KEYS)):
            return _of_wrapper(named, models[0], path, holding)
    found = Unwrapped({}, path=path, rest={k: v for k, v in named.items() if k not in models})
    for key in models:
        value = module_entries(named[key]) if is_module(named[key]) else named[key]
        _flatten(value, f"{key}.", holding, found)
    return found


def _of_wrapper(named: dict[str, Any], key: str, path: tuple[str, ...], holding: Holding) -> Unwrapped:
    """What stands under one key, the other keys being the rest."""
    value = named[key]
    path = (*path, key)
    if is_module(value):
        found = _of_module(value, path, holding)
    elif isinstance(value, dict):
        inner = _named(value)
        with_tensors = [k for k in inner if id(inner[k]) in holding or as_entry(inner[k]) is not None]
        # One more wrapper only where nothing else inside could be a part of the same model.
        nested = any(k in WEIGHT_KEYS and id(inner[k]) in holding for k in with_tensors) and all(
            k in WEIGHT_KEYS or _NOT_WEIGHTS.search(k) for k in with_tensors
        )
        deeper = nested and len(path) < 4
        found = _of_dict(value, path, holding) if deeper else _of_state_dict(value, path, holding, mixed=False)
    else:
        found = Unwrapped({}, path=path)
        _flatten(value, "", holding, found)
    rest = {k: v for k, v in named.items() if k != key}
    found.rest = rest | {f"{key}.{k}" if k in rest else k: v for k, v in found.rest.items()}
    return found


def _of_state_dict(root: dict[Any, Any], path: tuple[str, ...], holding: Holding, *, mixed: bool) -> Unwrapped:
    """A state dict. `mixed`: it is the root, where counters and optimizers may stand among its tensors."""
    found = Unwrapped({}, path=path, attributes=dict(root.attributes) if isinstance(root, Mapping) else {})
    for key, value in _named(root).items():
        own = as_entry(value) is not None or id(value) in holding
        if mixed and (not own or _is_rng(key, value) or (id(value) in holding and _aside(key))):
            found.rest[key] = value
        else:
            _flatten({key: value}, "", holding, found)
    return found


def _of_list(root: list[Any] | tuple[Any, ...], holding: Holding) -> Unwrapped:
    """A list of tensors is numbered; of a list of state dicts the first one is the model."""
    if not any(as_entry(value) is not None for value in root):
        for i, value in enumerate(root):
            if id(value) in holding and isinstance(value, dict | Opaque):
                found = unwrap(value)
                found.path = (str(i), *found.path)
                found.rest |= {str(k): v for k, v in enumerate(root) if k != i}
                return found
        if id(root) not in holding:
            return Unwrapped({}, rest={str(i): v for i, v in enumerate(root)})
    found = Unwrapped({})
    _flatten(root, "", holding, found)
    return found


def _of_module(module: Opaque, path: tuple[str, ...], holding: Holding) -> Unwrapped:
    found = Unwrapped({}, path=path, module_class=str(module.cls))
    for name, value in module_entries(module).items():
        _put(name, value, found)
    return found


def _flatten(tree: Any, prefix: str, holding: Holding, into: Unwrapped) -> None:
    """Add the tensors in nested dicts and lists, names joined with '.'; what holds none is one of the others."""
    todo: list[tuple[str, Any, tuple[int, ...]]] = [(prefix, tree, ())]
    while todo:
        name, value, above = todo.pop()
        enter = not above or (id(value) in holding and id(value) not in above and len(above) < MAX_DEPTH)
        if is_module(value):
            todo.extend((f"{name}.{k}", v, ()) for k, v in reversed(module_entries(value).items()))
        elif enter and isinstance(value, dict | list | tuple) and as_entry(value) is None:
            items = value.items() if isinstance(value, dict) else enumerate(value)
            lead = f"{name}." if above else name
            todo.extend((f"{lead}{text_key(k)}", v, (*above, id(value))) for k, v in reversed(list(items)))
        else:
            _put(name, value, into)
            if len(into.entries) + len(into.others) > holding.max_names:
                raise fail("limit-exceeded", "shared dicts and lists in it multiply into more names than it has items")


def _put(name: str, value: Any, into: Unwrapped) -> None:
    entry = as_entry(value)
    if entry is None:
        into.others[name] = value
        return
    into.entries[name] = entry


def _aside(key: str) -> bool:
    return bool(_NOT_WEIGHTS.search(key) or _AVERAGED.search(key))


def _named(value: dict[Any, Any]) -> dict[str, Any]:
    return {text_key(k): v for k, v in value.items()}


def text_key(key: Any) -> str:
    """A dict's key as a part of a name."""
    return key if isinstance(key, str) else key.decode("utf-8", "replace") if isinstance(key, bytes) else str(key)


def _is_rng(key: str, value: Any) -> bool:
    """A generator's state beside the weights: bytes, under a name that says so."""
    if not isinstance(value, Tensor) or value.dtype.name != "uint8" or value.ndim != 1:
        return False
    return value.size in _RNG_BYTES or bool(_RNG.search(key))
