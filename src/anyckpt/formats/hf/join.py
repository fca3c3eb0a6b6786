"""Read a set of weights: its shards, put together and held against the index.

The index of a sharded set is {"metadata": {"total_size": bytes}, "weight_map": {tensor: file}}. A loader takes all that
is in the files which the map names, so a tensor that it places elsewhere, or not at all, still ends up in the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from anyckpt.core.tensor import Tensor
from anyckpt.errors import CheckpointError
from anyckpt.finding import Report
from anyckpt.formats import of_file, read_file, safetensors
from anyckpt.formats.hf.sets import WeightSet
from anyckpt.formats.safetensors import Row, Stored
from anyckpt.io.bounds import byte_count
from anyckpt.io.paths import name_fault, printable
from anyckpt.io.place import Place

SHOWN = 3  # names listed in one message


@dataclass(slots=True)
class Joined:
    """What the shards hold together. `read` are the files that could be read, `facts` what those of pickles say."""

    rows: dict[str, Row | Tensor] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    source: dict[str, str] = field(default_factory=dict)
    metadata: dict[str, dict[str, str]] = field(default_factory=dict)
    dtypes: dict[str, set[str]] = field(default_factory=dict)
    read: list[str] = field(default_factory=list)
    steps: dict[str, int] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    n_bytes: int = 0

    @property
    def weights(self) -> Stored:
        """All tensors by name."""
        return Stored(self.rows)


def join(place: Place, found: WeightSet, report: Report) -> Joined:
    """Read the shards of a set. What is missing or does not fit goes to `report`."""
    index = _read_index(place, found.index, report) if found.index else None
    weight_map, total_size = index if index else ({}, None)
    files = _files(place, found, weight_map, index is not None, report)
    joined = Joined()
    for name in files:
        try:
            _read_shard(place, name, weight_map, joined, report)
        except CheckpointError as error:
            report.extend([error.finding])
    if weight_map:
        _compare(weight_map, joined, found, report)
    if len(joined.read) == len(files) and not report.errors:
        _check_total(total_size, joined, found.index, report)
    _check_dtypes(joined, report)
    _check_steps(joined, report)
    return joined


def _read_index(place: Place, name: str, report: Report) -> tuple[dict[str, str], float | None] | None:
    """weight_map and total_size; None where the index is of no use."""
    try:
        document = place.read_json(name, report)
    except CheckpointError as error:
        report.extend([error.finding])
        return None
    weight_map = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        report.add(
            "bad-index", "has no weight_map of tensor names to file names", where=printable(name),
            hint="delete it: shards are found by their names; or download it again",
        )
        return None
    metadata = document.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    return weight_map, total if isinstance(total, int | float) and not isinstance(total, bool) else None


def _files(place: Place, found: WeightSet, weight_map: Mapping[str, str], indexed: bool, report: Report) -> list[str]:
    """The files to read, in order: those the index names, or those that the numbering does."""
    if not indexed:
        _check_numbers(place, found, report)
        return [found.shards[i] for i in sorted(found.shards)]
    wanted = list(dict.fromkeys(weight_map.values()))
    fits = [name for name in wanted if not (fault := name_fault(name)) or _escape(name, fault, found.index, report)]
    absent = [name for name in fits if not place.exists(name)]
    if absent:
        n = sum(file in absent for file in weight_map.values())
        report.add(
            "missing-shard", f"{_listed(absent)} of {len(wanted)} shards, with {n:,} tensors, are not there"
            if len(absent) > 1 else f"{printable(absent[0])}, with {n:,} tensors, is not there",
            where=found.index, hint="download the missing files, then run: anyckpt verify PATH",
        )  # fmt: skip
    extra = [name for name in found.shards.values() if name not in weight_map.values()]
    if extra:
        message = f"{_listed(extra)}: named like a shard, but the index does not know it; it is not read"
        report.add("extra-shard", message, where=printable(extra[0]))
    return sorted(name for name in fits if name not in absent)


def _escape(name: str, fault: str, index: str, report: Report) -> bool:
    report.add("path-escape", f"the name '{printable(name)}' {fault}", where=printable(index))
    return False


def _check_numbers(place: Place, found: WeightSet, report: Report) -> None:
    """Without an index the numbers in the shards' names are all that says whether the set is whole."""
    if not found.total:
        return
    missing = found.missing
    unfinished = [name for name in missing if any(other.startswith(name + ".") for other in place.names)]
    if unfinished:
        report.add(
            "incomplete", f"{_listed(unfinished)} was not finished: only a temporary file is there",
            where=printable(unfinished[0]), hint="save or download the checkpoint again",
        )
    elif missing:
        what = f"{len(missing):,} of {found.total:,} shards are not there: {_listed(missing)}"
        report.add("missing-shard", what, where=missing[0], hint="download the missing files")
    elif not found.index:
        report.add(
            "missing-index", f"{found.title} have no index: whether a tensor is missing can't be told",
            where=f"{found.stem}.{found.ending}.index.json", hint="convert the folder to write one: --to hf",
        )


def _read_shard(place: Place, name: str, weight_map: Mapping[str, str], joined: Joined, report: Report) -> None:
    """Read one file into `joined`. Raises CheckpointError where it can't be read at all."""
    file = place.open(name)
    row = of_file(file) if file.size else None
    new: Mapping[str, Row | Tensor]
    if row is not None and row.name == "safetensors":
        header = safetensors.read_header(file, report)
        joined.metadata[name] = header.metadata
        joined.aliases.update(safetensors.removed_names(header))
        step, new = header.step, header.rows
        dtypes = {tensor[0] for tensor in header.rows.values()}
        joined.n_bytes += header.data_bytes
    else:
        checkpoint = read_file(file, report)
        joined.aliases.update(checkpoint.aliases)
        for key, value in checkpoint.facts.items():
            if isinstance(value, tuple | list) and isinstance(joined.facts.get(key), tuple | list):
                value = tuple(dict.fromkeys((*joined.facts[key], *value)))
            joined.facts[key] = value
        step, new = checkpoint.step, checkpoint.weights
        dtypes = {tensor.dtype for tensor in checkpoint.weights.values()}
        joined.n_bytes += sum(tensor.nbytes for tensor in checkpoint.weights.values())
    if step is not None:
        joined.steps[name] = step
    joined.read.append(name)
    joined.dtypes[name] = {dtype.name for dtype in dtypes if dtype.kind == "float"}
    others = {}
    for tensor_name in sorted(joined.rows.keys() & new.keys()):
        report.add(
            "duplicate-tensor", f"also stands in {printable(joined.source[tensor_name])}",
            where=f"{file.name}, tensor {printable(tensor_name)}", hint="which one is loaded depends on the loader",
        )
        if weight_map.get(tensor_name) != name:
            others[tensor_name] = joined.rows[tensor_name], joined.source[tensor_name]
    joined.rows.update(new)
    joined.source.update(dict.fromkeys(new, name))
    for tensor_name, (kept, source) in others.items():
        joined.rows[tensor_name], joined.source[tensor_name] = kept, source


def _compare(weight_map: Mapping[str, str], joined: Joined, found: WeightSet, report: Report) -> None:
    """Hold what the shards that could be read contain against what the index promises."""
    read = set(joined.read)
    lacking = [(n, file) for n, file in weight_map.items() if file in read and joined.source.get(n) != file]
    misplaced = [(n, file) for n, file in lacking if n in joined.source]
    missing = [(n, file) for n, file in lacking if n not in joined.source]
    for code, pairs, what in (
        ("missing-tensor", missing, "the index promises it, and no shard has it"),
        ("wrong-shard", misplaced, "the index says it is in this file, but another one has it"),
    ):
        for name, file in pairs[: report.limit]:
            report.add(code, what, where=f"{printable(file)}, tensor {printable(name)}")
        if len(pairs) > report.limit:
            report.suppressed[code] = report.suppressed.get(code, 0) + len(pairs) - report.limit
    unlisted = [name for name in joined.rows if name not in weight_map]
    if unlisted:
        what = f"{len(unlisted):,} tensors are not in the index, yet loaders take them: {_listed(unlisted)}"
        report.add("unlisted-tensor", what, where=printable(found.index))


def _check_total(total: float | None, joined: Joined, index: str, report: Report) -> None:
    """`total_size` counts what is stored; writers count shared storage once or twice."""
    if total is None:
        return
    weights = joined.weights
    shared = sum(weights[name].nbytes for name in joined.aliases if name in weights)
    if total not in (joined.n_bytes, joined.n_bytes - shared):
        report.add(
            "total-size-mismatch",
            f"total_size is {byte_count(int(total))}, the shards hold {byte_count(joined.n_bytes)}",
            where=printable(index), hint="the index and the shards may be of two saves",
        )


def _check_dtypes(joined: Joined, report: Report) -> None:
    """Shards of one save have a float type in common; quantized models and norms in float32 still do."""
    kinds = {name: floats for name, floats in joined.dtypes.items() if floats}
    for name, floats in kinds.items():
        first = next(iter(kinds))
        if not floats & kinds[first]:
            here, there = "/".join(sorted(floats)), "/".join(sorted(kinds[first]))
            message = f"holds {here}, {printable(first)} holds {there}: the shards may be of two saves"
            report.add("mixed-dtype", message, where=printable(name))
            return


def _check_steps(joined: Joined, report: Report) -> None:
    if len(set(joined.steps.values())) > 1:
        listed = ", ".join(f"{printable(name)}: step {step:,}" for name, step in list(joined.steps.items())[:4])
        report.add(
            "mixed-steps", f"the shards are of different saves: {listed}", where=printable(next(iter(joined.steps))),
            hint="take all shards from one save",
        )


def _listed(names: Iterable[str]) -> str:
    """A few names for a message."""
    found = list(names)
    shown = ", ".join(printable(name, limit=80) for name in found[:SHOWN])
    return shown if len(found) <= SHOWN else f"{shown} and {len(found) - SHOWN:,} more"
