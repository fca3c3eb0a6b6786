"""Several arrays by name: a zip of .npy files. `np.savez` stores them, `savez_compressed` deflates them."""

from __future__ import annotations

from typing import Any

from anyckpt.core.checkpoint import Checkpoint
from anyckpt.core.source import File
from anyckpt.core.tensor import Tensor
from anyckpt.errors import CheckpointError
from anyckpt.finding import Report
from anyckpt.formats.numpy import npy
from anyckpt.formats.torch.archive import members_of, open_archive
from anyckpt.io.paths import printable


def matches(file: File, head: bytes) -> bool:
    """A zip that holds arrays and is no other known archive: .npy members beside at most a few others."""
    archive = members_of(file)
    return archive is not None and any(name.endswith(".npy") for name in archive.members)


def read(file: File, report: Report) -> Checkpoint:
    """The arrays by name, `.npy` taken off as numpy does; a broken one is reported, and the others still read."""
    archive = open_archive(file, report)
    weights: dict[str, Tensor] = {}
    state: dict[str, Any] = {}
    for name in archive.members:
        if not name.endswith(".npy"):
            report.add("unexpected-member", "is no array", where=f"{file.name}!{printable(name)}")
            continue
        try:
            value = npy.read_array(archive.open(name), report)
        except CheckpointError as error:
            report.extend([error.finding])
            continue
        target: dict[str, Any] = weights if isinstance(value, Tensor) else state
        target[name.removesuffix(".npy")] = value
    return Checkpoint("npz", file.name, weights, state=state, facts={"container": "zip"})


def verify(file: File, checkpoint: Checkpoint, report: Report) -> None:
    """Check every member's CRC, and the bytes between them."""
    archive = open_archive(file, report)
    archive.check_all()
    for member in archive.members.values():
        if member.crc and not archive.crc_matches(member):
            where = f"{file.name}!{printable(member.name)}"
            report.add("crc-mismatch", "its bytes are not those that were saved", where=where)
