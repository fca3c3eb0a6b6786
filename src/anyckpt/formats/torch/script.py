"""TorchScript archives (torch.jit.save): weights, and code that is never run.

    <top>/data.pkl       the module: NEWOBJ(__torch__.Class) BUILD {attribute: value}, submodules inside; storages data/
    <top>/constants.pkl  a tuple of tensors that the code refers to; storages constants/
    <top>/code/…         the program, in TorchScript; beside each file a .debug_pkl with the paths of its source
    <top>/traced_inputs.pkl, extra/…

Facts from torch 2.13 `torch/csrc/jit/serialization/{export_module,pickler}.cpp`. Parameters and buffers are both plain
attributes there, so a non-persistent buffer can't be told from the others.
"""

from __future__ import annotations

from typing import Any

from anyckpt.core.checkpoint import Checkpoint
from anyckpt.core.inert import Opaque, TensorSubclass
from anyckpt.core.source import File
from anyckpt.core.tensor import Tensor
from anyckpt.errors import CheckpointError
from anyckpt.finding import Report, fail
from anyckpt.formats.torch.archive import (
    STANDARD,
    Records,
    is_big_endian,
    judge_strays,
    members_of,
    open_archive,
    run_member,
)
from anyckpt.formats.torch.module import MAX_DEPTH
from anyckpt.formats.torch.state import read_state
from anyckpt.formats.torch.zip import verify as verify
from anyckpt.io.zip import ZipArchive
from anyckpt.pickle.result import Result
from anyckpt.pickle.storage import Storage

MAX_MODULES = 100_000
SINCE = ("1.4", "a TorchScript archive (read by torch.jit.load, not by torch.load)")
PICKLES = {"data.pkl": "data", "constants.pkl": "constants", "traced_inputs.pkl": "traced_inputs"}


def matches(file: File, head: bytes) -> bool:
    """A zip with `<top>/constants.pkl` or a `<top>/code/` folder."""
    archive = members_of(file)
    if archive is None:
        return False
    top = archive.top
    return f"{top}/data.pkl" in archive.members and (
        f"{top}/constants.pkl" in archive.members or any(name.startswith(f"{top}/code/") for name in archive.members)
    )


def read(file: File, report: Report) -> Checkpoint:
    """Describe the module's tensors by walking its attributes. Raises CheckpointError where data.pkl can't be had."""
    archive = open_archive(file, report)
    top = archive.top
    code = sorted(name.partition("/")[2] for name in archive.members if name.startswith(f"{top}/code/"))
    program = [name for name in code if name.endswith(".py")]
    report.worsen("unknown")
    report.add(
        "contains-code",
        f"is a TorchScript program ({len(program)} files of code): torch.jit.load runs it, here only weights are read",
        where=file.name,
    )
    swapped = is_big_endian(archive, report)
    results: dict[str, Result] = {}
    storages: list[Storage] = []
    known = {f"{top}/{name}" for name in STANDARD}
    known |= {name for name in archive.members if name.startswith((f"{top}/code/", f"{top}/extra/"))}
    for name, folder in PICKLES.items():
        member = f"{top}/{name}"
        if member not in archive.members:
            continue
        records = Records(archive, top, folder, swapped, may_be_empty=name == "traced_inputs.pkl")
        try:
            results[name] = _run(archive, member, report, records)
        except CheckpointError:
            if name == "data.pkl":
                raise
        storages += records.storages.values()
        known |= {member} | records.used
    if "data.pkl" not in results:
        raise fail("missing-record", "there is no data.pkl in the archive", where=file.name)
    judge_strays(archive, known, report)
    _note_paths(archive, code, report)
    entries, others = _attributes(results["data.pkl"].value)
    facts = {
        "container": "TorchScript", "since": SINCE, "results": tuple(results.values()), "storages": tuple(storages),
        "code": tuple(code), "container_bytes": file.size,
    }
    root = {"state_dict": entries, "attributes": others}
    for name in ("constants.pkl", "traced_inputs.pkl"):
        if name in results:
            root[name.removesuffix(".pkl")] = results[name].value
    checkpoint = read_state(root, format="torchscript", path=file.name, report=report, facts=facts)
    return checkpoint


def _run(archive: ZipArchive, member: str, report: Report, records: Records) -> Result:
    """Read a pickle of the archive. Its `__torch__` classes are those of the program, which is told as a whole."""
    found = Report()
    result = run_member(archive, member, found, records.persistent)
    strange = [i for i in result.imports if i.verdict == "unknown" and not i.path.startswith("__torch__.")]
    report.worsen(found.verdict)
    report.extend(f for f in found.findings if f.code != "unknown-code" or strange)
    return result


def _attributes(module: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tensors of a module and its submodules by attribute path, and all other attributes likewise."""
    entries: dict[str, Any] = {}
    others: dict[str, Any] = {}
    todo: list[tuple[str, Any, int]] = [("", module, 0)]
    for _ in range(MAX_MODULES):
        if not todo:
            return entries, others
        prefix, value, depth = todo.pop()
        below = []
        for name, attribute in value.attributes().items() if isinstance(value, Opaque) else ():
            if isinstance(attribute, Tensor | TensorSubclass):
                entries[f"{prefix}{name}"] = attribute
            elif not isinstance(attribute, Opaque):
                others[f"{prefix}{name}"] = attribute
            elif attribute.class_name.startswith("__torch__.") and depth < MAX_DEPTH:
                below.append((f"{prefix}{name}.", attribute, depth + 1))
        todo.extend(reversed(below))
    raise fail("limit-exceeded", f"it is a module of over {MAX_MODULES:,} modules")


def _note_paths(archive: ZipArchive, code: list[str], report: Report) -> None:
    if any(name.endswith(".debug_pkl") for name in code):
        report.add("privacy", "carries the paths of its source files (code/*.debug_pkl)", where=archive.file.name)
