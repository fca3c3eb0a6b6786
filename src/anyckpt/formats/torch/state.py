"""From a saved object to a Checkpoint: shared by every container that holds one (zip, legacy, tar, DCP items, …).

The weights are found by `unwrap`; what stands beside them is sorted by what it is, told by its key and its form, into
optimizer, step, epoch, scheduler and RNG, and stays in `state` where it is none of these. Nothing is dropped.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from anyckpt.core.checkpoint import Checkpoint, Optimizer
from anyckpt.core.inert import NumpyArray, Opaque, TensorSubclass, is_deeper, walk
from anyckpt.core.tensor import Tensor
from anyckpt.finding import Report
from anyckpt.formats.torch.optimizer import is_optimizer, last_step, optimizers_in, read_optimizer
from anyckpt.formats.torch.sharing import dead_bytes, devices, ties, torch_min, weights_only_obstacles
from anyckpt.formats.torch.unwrap import Entry, Unwrapped, unwrap
from anyckpt.io.bounds import byte_count
from anyckpt.pickle.result import Result
from anyckpt.pickle.storage import Storage

STEP_KEYS = (
    "global_step", "step", "iteration", "iter", "global_steps", "current_step", "cur_step", "train_step", "iter_num",
    "num_iterations", "n_iter", "num_updates", "steps", "it", "total_steps", "completed_steps", "batch_idx",
)
EPOCH_KEYS = ("epoch", "current_epoch", "cur_epoch", "epochs", "epoch_num", "last_epoch", "n_epoch")
CONFIG_KEYS = (
    "hyper_parameters", "config", "args", "cfg", "hparams", "model_args", "model_config", "opt", "options", "params",
)
NESTED_KEYS = ("meta", "trainer_state", "train_state", "training_state", "trainer", "info", "extra_state", "state")
"""Where counters stand when not at the root (mmcv, fairseq, torchtitan and others)."""

_SCHEDULER = re.compile(r"sched|^lr_", re.IGNORECASE)
_RNG = re.compile(r"rng|random_state|numpy_random_seed|torch_manual_seed", re.IGNORECASE)


def read_state(root: Any, *, format: str, path: str, report: Report, facts: Mapping[str, Any]) -> Checkpoint:
    """Make a Checkpoint of a saved object.

    `root` is inert data. `facts` is what the container knows and is passed on; of its entries, `storages` (a sequence
    of Storage), `results` (of the pickle machine), and `since` ((release, why): the first torch that knows the
    container) are made use of here, if there, and not passed on. Raises CheckpointError [limit-exceeded] only.
    """
    if is_deeper(root):
        report.add("limit-exceeded", "objects are nested so deep that not all of them were looked at", where=path)
    found = unwrap(root)
    weights, subclasses = spread(found.entries)
    aliases = ties(weights)
    rest = dict(found.rest)
    optimizer_keys = [key for key in rest if optimizers_in(rest[key])]
    saved = [one for key in optimizer_keys for one in optimizers_in(rest[key])]
    keys: dict[str, Any] = {}
    optimizer = read_optimizer(saved, weights, report, aliases=aliases, where=path) if saved else None
    if optimizer is not None:
        keys["optimizers"] = tuple(place for key in optimizer_keys for place in _places(key, rest.pop(key)))
    elif is_bare_optimizer(rest):
        optimizer, rest = read_optimizer([rest], weights, report, where=path), {}
    step = _take_count(rest, STEP_KEYS, "step", keys)
    epoch = _take_count(rest, EPOCH_KEYS, "epoch", keys)
    if step is None and optimizer is not None and (step := last_step(optimizer)) is not None:
        report.add("inferred", f"step {step:,} is the optimizer's count; the file names none", where=path)
    state = {**{".".join((*found.path, name)): value for name, value in found.others.items()}, **rest}
    scheduler = _take(state, _SCHEDULER, "scheduler", keys)
    rng = _take(state, _RNG, "rng", keys)
    _note(weights, aliases, state, path, report)
    return Checkpoint(
        format=format, path=path, weights=weights, aliases=aliases, optimizer=optimizer, step=step, epoch=epoch,
        scheduler=scheduler, rng=rng, state=state, config=_config(state), findings=tuple(report.findings),
        verdict=report.verdict,
        facts=_facts(root, found, weights, subclasses, optimizer, keys, report, path, facts),
    )


def _places(key: str, value: Any) -> list[tuple[str, Any, int]]:
    """Where optimizers stood: the key, the index or name inside it if any, the number of groups."""
    if is_optimizer(value):
        return [(key, None, len(value["param_groups"]))]
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return [(key, inner, len(one["param_groups"])) for inner, one in items if is_optimizer(one)]


def spread(entries: Mapping[str, Entry]) -> tuple[dict[str, Tensor], dict[str, TensorSubclass]]:
    """The plain tensors by name, and the subclasses among the entries.

    A subclass with a base (quantized, or with attributes) gives its base under its own name; one without gives the
    tensors inside it as `name/attribute` (sparse, nested, DTensor, torchao). Its meaning is left to `view("dense")`.
    """
    weights: dict[str, Tensor] = {}
    subclasses: dict[str, TensorSubclass] = {}
    for name, entry in entries.items():
        if isinstance(entry, Tensor):
            weights[name] = entry
            continue
        subclasses[name] = entry
        if entry.base is not None:
            weights[name] = entry.base
            continue
        for inner, value in walk(entry.attributes()):
            tensor = value if isinstance(value, Tensor) else value.base if isinstance(value, TensorSubclass) else None
            if tensor is not None:
                weights["/".join((name, *map(str, inner)))] = tensor
    return weights, subclasses


def is_bare_optimizer(rest: Mapping[str, Any]) -> bool:
    """Whether the root itself is an optimizer's state dict (optimizer.pt)."""
    return is_optimizer(dict(rest))


def as_count(value: Any) -> int | None:
    """A step or epoch: an integer, or a whole number in a float, 0-dim tensor or numpy scalar; None for the rest."""
    if isinstance(value, NumpyArray):
        value = value.tensor
    if isinstance(value, Tensor):
        if value.size != 1 or not value.is_stored or value.dtype.kind not in ("int", "uint", "float"):
            return None
        value = value.numpy().reshape(-1)[0].item()
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63 else None


def _take_count(rest: dict[str, Any], names: Iterable[str], field: str, keys: dict[str, Any]) -> int | None:
    """The first of `names` that holds a count, at the root (taken out of `rest`) or one level down (left there)."""
    for name in names:
        count = as_count(rest.get(name))
        if count is not None:
            keys[field] = name
            del rest[name]
            return count
    for outer in NESTED_KEYS:
        inside = rest.get(outer)
        inside = inside.attributes() if isinstance(inside, Opaque) else inside
        if not isinstance(inside, dict):
            continue
        for name in names:
            if (count := as_count(inside.get(name))) is not None:
                return count
    return None


def _take(state: dict[str, Any], pattern: re.Pattern[str], field: str, keys: dict[str, Any]) -> Any:
    """What stands under the keys that match, out of `state`: one value as it is, several as a dict."""
    found = {key: state.pop(key) for key in [k for k in state if pattern.search(k) and state[k] is not None]}
    if found:
        keys[field] = tuple(found)
    return next(iter(found.values())) if len(found) == 1 else found or None


def _config(state: Mapping[str, Any]) -> dict[str, Any] | None:
    """The run's options, as plain text keys; the same object stays in `state`."""
    for key in CONFIG_KEYS:
        value = state.get(key)
        if isinstance(value, Opaque):
            value = value.attributes()
        if isinstance(value, dict) and value and all(isinstance(k, str) for k in value):
            return dict(value)
    return None


def _note(
    weights: Mapping[str, Tensor], aliases: Mapping[str, str], state: Mapping[str, Any], path: str, report: Report
) -> None:
    """Report ties, and tensors that are neither weights nor optimizer state, unless they hardly weigh anything."""
    own_bytes = sum(t.nbytes for t in weights.values())
    if aliases:
        tied, kept = next(iter(aliases.items()))
        more = f", and {len(aliases) - 1} more" if len(aliases) > 1 else ""
        report.add("tied", f"{tied} is {kept}: one storage under two names{more}", where=path)
    for key, value in state.items() if own_bytes else ():
        n_tensors = n_bytes = 0
        for _, inner in walk(value):
            if isinstance(inner, Tensor):
                n_tensors += 1
                n_bytes += inner.nbytes
        if n_tensors and 100 * n_bytes >= own_bytes and isinstance(value, dict | list | tuple | Opaque):
            tensors = f"{n_tensors:,} tensor{'' if n_tensors == 1 else 's'} ({byte_count(n_bytes)})"
            message = f"{key!r} holds {tensors} beside the weights: kept as state"
            report.add("other-state", message, where=path)


def _facts(
    root: Any,
    found: Unwrapped,
    weights: Mapping[str, Tensor],
    subclasses: Mapping[str, TensorSubclass],
    optimizer: Optimizer | None,
    keys: Mapping[str, Any],
    report: Report,
    path: str,
    given: Mapping[str, Any],
) -> dict[str, Any]:
    facts = {k: v for k, v in given.items() if k not in ("storages", "results", "since")}
    storages: list[Storage] = list(given.get("storages", ()))
    results: list[Result] = list(given.get("results", ()))
    imports = [i for result in results for i in result.imports]
    facts["root"] = ".".join(found.path)
    facts["keys"] = dict(keys)
    if found.module_class:
        facts["module_class"] = found.module_class
    if "_metadata" in found.attributes:
        facts["metadata"] = found.attributes["_metadata"]
    if subclasses:
        facts["subclasses"] = dict(subclasses)
    if storages:
        n_dead, n_storages = dead_bytes(root, storages)
        facts["devices"] = devices(storages)
        facts["storages"] = len(storages)
        facts["dead_bytes"] = n_dead
        if n_dead:
            message = f"{byte_count(n_dead)} in {n_storages} storages belong to no tensor: views were saved whole"
            hint = "anyckpt convert or prune writes the file without them"
            report.add("dead-storage", message, where=path, hint=hint)
    if results:
        facts["imports"] = tuple(imports)
        facts["weights_only"] = weights_only_obstacles(imports, (r.protocol for r in results))
    if "since" in given:
        moments = (t for slot in optimizer.slots.values() for t in slot.values()) if optimizer else ()
        since, why = given["since"]
        facts["torch_min"] = torch_min(since, why, [*weights.values(), *moments], imports)
    version = found.rest.get("pytorch-lightning_version")
    if isinstance(version, str):
        facts["framework"] = f"Lightning {version}"
    return facts
