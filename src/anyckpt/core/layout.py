"""Files to be: what a writer hands to the planner. Every size and offset is known before a byte is written.

A format's `write` returns `FileLayout`s, `plan` turns them into copies and computes, `run` moves the bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from anyckpt.core.source import Span
from anyckpt.core.tensor import Tensor


@dataclass(frozen=True, slots=True)
class Part:
    """What stands at [offset, offset + length) of the file: literal bytes, a tensor in C order, or an asset's bytes."""

    offset: int
    length: int
    content: bytes | Tensor | Span


@dataclass(frozen=True, slots=True)
class Checksum:
    """At `offset`, the CRC-32 of the bytes [start, stop) of the same file, u32 little-endian (zip members)."""

    offset: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class FileLayout:
    """One file to be: `name` relative to the destination ("" where the destination is the file itself).

    Parts are in order of offset and do not overlap; gaps between them are zeros.
    """

    name: str
    size: int
    parts: tuple[Part, ...]
    checksums: tuple[Checksum, ...] = ()
