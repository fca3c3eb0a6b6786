"""Write a checkpoint as torch.save would: a plan of the file, from descriptions alone.

Weights become an OrderedDict with the `_metadata` of its modules, where that is known; tied names share a storage.
With `options.extra`:

    "training": True    the whole of a training checkpoint: {"model": …, "optimizer": …, "global_step": …, …}
    "object": True      the object that the source holds, every part in its place, made plain; "replaced", a list, is
                        given what that changed
    "alignment": n      where storages begin
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping as ReadOnly
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from anyckpt.core.box import c_strides
from anyckpt.core.checkpoint import Checkpoint, Optimizer
from anyckpt.core.inert import Mapping, TensorSubclass
from anyckpt.core.layout import FileLayout
from anyckpt.core.source import Inline
from anyckpt.core.tensor import Piece, Tensor
from anyckpt.errors import Refused, UsageError
from anyckpt.formats.table import WriteOptions
from anyckpt.formats.torch.plain import WRITABLE_SUBCLASSES, Replacements
from anyckpt.formats.torch.sharing import identity
from anyckpt.formats.torch.ziplayout import ALIGNMENT, Record, lay_out
from anyckpt.pickle.emit import StorageRef, emit


def write(checkpoint: Checkpoint, options: WriteOptions) -> list[FileLayout]:
    """The one file to be. Raises Refused for what torch has no form for, UsageError for options that don't apply."""
    replaced = options.extra.get("replaced")
    replacements = Replacements(replaced if isinstance(replaced, list) else [])
    share = options.tied != "clone"
    if options.extra.get("object"):
        if "object" not in checkpoint.facts:
            raise UsageError(f"a {checkpoint.format} checkpoint is no single object that torch saved")
        root = replacements.plain(checkpoint.facts["object"])
    elif options.extra.get("training"):
        root = replacements.plain(training_dict(checkpoint, state_dict(checkpoint, options)))
    else:
        root = state_dict(checkpoint, options)
    alignment = options.extra.get("alignment", ALIGNMENT)
    return [archive(root, top_folder(options.destination), share=share, alignment=alignment)]


def archive(root: Any, top: str, *, share: bool = True, alignment: int = ALIGNMENT) -> FileLayout:
    """The archive of one plain object. `share`: tensors of the same stored elements become one storage."""
    stored: dict[Any, tuple[StorageRef, Tensor]] = {}

    def storage(tensor: Tensor) -> StorageRef:
        key = (identity(tensor) if share else None) or id(tensor)
        if key not in stored:
            ref = StorageRef(str(len(stored)), tensor.nbytes, 0, c_strides(tensor.shape))
            stored[key] = (ref, tensor)
        return stored[key][0]

    data = emit(root, storage=storage)
    records = [
        Record("data.pkl", data),
        Record(".format_version", b"1"),
        Record(".storage_alignment", str(alignment).encode()),
        Record("byteorder", b"little"),
        *(Record(f"data/{ref.key}", tensor) for ref, tensor in stored.values()),
        Record("version", b"3\n"),
    ]
    records.append(Record(".data/serialization_id", _serialization_id(records)))
    return lay_out(top, records, alignment=alignment)


def state_dict(checkpoint: Checkpoint, options: WriteOptions) -> Mapping:
    """The weights as a Module's state_dict() gives them."""
    out = Mapping()
    for name, value in _values(checkpoint).items():
        kept = checkpoint.aliases.get(name)
        if kept is None or kept not in checkpoint.weights:
            out[name] = value
        elif options.tied == "clone":
            out[name] = replace(value)  # another object, and so a storage of its own
        elif options.tied == "keep":
            out[name] = out.get(kept, value)
    metadata = checkpoint.facts.get("metadata")
    if isinstance(metadata, dict) and _describes(metadata, out):
        out.attributes = {"_metadata": metadata}
    return out


def training_dict(checkpoint: Checkpoint, weights: Mapping, *, by_name: bool = False) -> dict[str, Any]:
    """Everything that training goes on from, under the source's own keys where those are known.

    `by_name`: the optimizer's state is keyed by parameter names, as FSDP and DCP have it, not by numbers.
    """
    keys = checkpoint.facts.get("keys", {})
    root = str(checkpoint.facts.get("root") or "model")
    out: dict[str, Any] = {"model" if "." in root else root: weights}
    if checkpoint.optimizer is not None:
        out.update(optimizer_entries(checkpoint.optimizer, keys.get("optimizers", ()), by_name=by_name))
    for field, usual, value in (
        ("scheduler", "lr_scheduler", checkpoint.scheduler), ("rng", "rng", checkpoint.rng),
        ("epoch", "epoch", checkpoint.epoch), ("step", "global_step", checkpoint.step),
    ):
        names = keys.get(field, usual)
        if value is None:
            continue
        if isinstance(names, tuple) and len(names) > 1 and isinstance(value, dict):
            out.update(value)
        else:
            out[names if isinstance(names, str) else names[0]] = value
    out.update((key, value) for key, value in checkpoint.state.items() if key not in out)
    return out


def optimizer_entries(
    optimizer: Optimizer, places: Sequence[tuple[str, Any, int]], *, by_name: bool = False
) -> dict[str, Any]:
    """The optimizer under its keys. Several that were read as one are told apart again by their numbers of groups.

    `places`: for each, its key, its index or name in the list or dict there (None: none), how many groups it has.
    """
    if sum(n for _, _, n in places) != len(optimizer.groups):
        return {"optimizer": optimizer_dict(optimizer, by_name=by_name)}
    out: dict[str, Any] = {}
    first = 0
    for key, inner, n_groups in places:
        own = optimizer_dict(replace(optimizer, groups=optimizer.groups[first : first + n_groups]), by_name=by_name)
        first += n_groups
        if inner is None:
            out[key] = own
        elif isinstance(inner, int):
            out.setdefault(key, []).append(own)
        else:
            out.setdefault(key, {})[inner] = own
    return out


def optimizer_dict(optimizer: Optimizer, *, by_name: bool = False) -> dict[str, Any]:
    """The state dict of a torch optimizer: numbers through the groups, and the names beside them; or names alone."""
    numbers: dict[str, int] = {}
    groups = []
    for group in optimizer.groups:
        names = [str(name) for name in group["params"]]
        ids = [numbers.setdefault(name, len(numbers)) for name in names]
        named = {} if all(name.isdecimal() for name in names) else {"param_names": names}
        groups.append({**{k: v for k, v in group.items() if k != "params"}, "params": ids, **named})
    state: dict[int, dict[str, Any]] = {}
    seen: set[Any] = set()
    for slot, tensors in optimizer.slots.items():
        if "/" in slot:
            raise Refused(f"the optimizer keeps {slot.partition('/')[0]} in a class that torch can't load plainly")
        for name, tensor in tensors.items():
            if name in numbers:
                state.setdefault(numbers[name], {})[slot] = _own(_as_saved(tensor), seen)
    for name, lost in optimizer.unmatched.items():
        if name in numbers and isinstance(lost, dict):
            state.setdefault(numbers[name], {}).update(lost)
    if by_name:
        name_of = {number: name for name, number in numbers.items()}
        for group in groups:
            group.pop("param_names", None)
            group["params"] = [name_of[i] for i in group["params"]]
        return {"state": {name_of[i]: own for i, own in sorted(state.items())}, "param_groups": groups}
    return {"state": dict(sorted(state.items())), "param_groups": groups}


def top_folder(destination: str) -> str:
    """The folder in the archive: the file's name up to its last dot, as torch.save names it."""
    name = destination.rpartition("/")[2]
    return (name.rpartition(".")[0] or name or "archive").replace("\\", "_")


def _as_saved(tensor: Tensor) -> Any:
    """Numbers that the optimizer kept as such were made 0-dim tensors in memory; they become numbers again."""
    in_memory = tensor.op is None and all(isinstance(p.source, Inline) for p in tensor.pieces)
    if tensor.shape == () and in_memory and tensor.dtype.name in ("int64", "float64"):
        return tensor.numpy().item()
    return tensor


def _own(value: Any, seen: set[Any]) -> Any:
    """A number of the parameter's own: optimizers count in place, so a step for a whole group must not be shared."""
    if not isinstance(value, Tensor) or value.size != 1:
        return value
    key = identity(value) or id(value)
    if key in seen:
        return Tensor(value.dtype, value.shape, (Piece(Inline(value.tobytes())),))
    seen.add(key)
    return value


def _values(checkpoint: Checkpoint) -> dict[str, Tensor | TensorSubclass]:
    """The weights; what torch has a class of its own for is put together again, where it is still as read."""
    values: dict[str, Tensor | TensorSubclass] = dict(checkpoint.weights)
    for name, subclass in checkpoint.facts.get("subclasses", {}).items():
        if str(subclass.cls) not in WRITABLE_SUBCLASSES:
            continue
        if subclass.base is not None:
            if values.get(name) is subclass.base:
                values[name] = subclass
            continue
        parts = {f"{name}/{key}": t for key, t in subclass.attributes().items() if isinstance(t, Tensor)}
        if all(values.get(part) is t for part, t in parts.items()):
            values = {k: v for k, v in values.items() if k not in parts} | {name: subclass}
    return values


def _describes(metadata: ReadOnly[Any, Any], names: ReadOnly[str, Any]) -> bool:
    """Whether module versions belong to these names: every module that has a tensor must be listed."""
    return all(name.rpartition(".")[0] in metadata for name in names)


def _serialization_id(records: list[Record]) -> bytes:
    """40 digits from the records' names and sizes; torch also mixes their checksums, which are not known yet."""
    digest = hashlib.sha256("\n".join(f"{r.name} {r.n_bytes}" for r in records).encode()).digest()
    digest += hashlib.sha256(digest + (records[0].content if isinstance(records[0].content, bytes) else b"")).digest()
    halves = (int.from_bytes(digest[i : i + 8], "little") % 10**20 for i in (0, 32))
    return "".join(f"{half:020d}" for half in halves).encode()
