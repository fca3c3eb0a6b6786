"""One GGUF file as a checkpoint, and sets of files as one.

Facts: llama-gguf-split and gguf-py number files from 1 in the name and from 0 in `split.no` (u16); `split.count` is 0
or 1 in a file that was merged; `split.tensors.count` (i32) counts over all files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from anyckpt.core.checkpoint import Checkpoint
from anyckpt.core.source import File, Span
from anyckpt.core.tensor import Tensor, from_source
from anyckpt.errors import CheckpointError
from anyckpt.finding import Report, fail
from anyckpt.formats.gguf import template
from anyckpt.formats.gguf.header import Header, read_header
from anyckpt.formats.gguf.kv import Metadata
from anyckpt.formats.gguf.order import big_endian, forgotten
from anyckpt.io.paths import printable
from anyckpt.io.place import Place

NAME = re.compile(r"(?P<prefix>.+)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf")
MAX_FILES = 10_000


def read_one(file: File, report: Report) -> Checkpoint:
    """A file by itself; reports the others of its set as missing."""
    return _alone(file, read_header(file, report), report)


def _alone(file: File, header: Header, report: Report) -> Checkpoint:
    count = header.metadata.number("split.count")
    if count > 1:
        no = header.metadata.number("split.no") + 1
        report.add(
            "missing-shard",
            f"is file {no} of {count} of a set; the others are not here",
            where=file.name,
            hint="put all files of the set into one folder, with the names they came with",
        )
    return checkpoint_of([(file, header)], report)


def read_set(place: Place, report: Report) -> Checkpoint:
    """The file a place is, with its siblings where it is one of a set."""
    file = place.open()
    match = NAME.fullmatch(place.path.name)
    header = read_header(file, report)
    count = header.metadata.number("split.count")
    if match is None or not 2 <= count <= MAX_FILES:
        return _alone(file, header, report)
    return _join(place, match["prefix"], count, {int(match["no"]): (file, header)}, report)


def read_folder(place: Place, prefix: str, count: int, report: Report) -> Checkpoint:
    """A set in a folder, by its names."""
    return _join(place, prefix, count, {}, report)


def _join(place: Place, prefix: str, count: int, read: dict[int, tuple[File, Header]], report: Report) -> Checkpoint:
    missing: list[str] = []
    for no in range(1, count + 1):
        name = f"{prefix}-{no:05d}-of-{count:05d}.gguf"
        if no in read:
            continue
        if not place.exists(name):
            missing.append(name)
            continue
        try:
            file = place.open(name)
            read[no] = (file, read_header(file, report))
        except CheckpointError as error:
            report.extend([error.finding])
    if missing:
        shown = ", ".join(printable(n) for n in missing[:3]) + (" …" if len(missing) > 3 else "")
        report.add(
            "missing-shard",
            f"{len(missing)} of {count} files of the set are missing",
            where=shown,
            hint="download them into the same folder",
        )
    if not read:
        raise report_first(report)
    for no, (file, header) in sorted(read.items()):
        found = header.metadata.number("split.no", -1) + 1
        if found != no or header.metadata.number("split.count") != count:
            report.add("wrong-shard", f"says it is file {found}, its name says {no} of {count}", where=file.name)
    parts = [read[no] for no in sorted(read)]
    total = max(h.metadata.number("split.tensors.count", -1) for _, h in parts)
    held = sum(len(h.infos) for _, h in parts)
    if not missing and total >= 0 and total != held and not report.errors:
        report.add("inconsistent", f"the set holds {held:,} tensors, its files say {total:,}", where=parts[0][0].name)
    return checkpoint_of(parts, report)


def report_first(report: Report) -> CheckpointError:
    """The first error as an exception."""
    return CheckpointError(report.errors[0]) if report.errors else fail("missing-shard", "no file of the set is there")


def checkpoint_of(parts: list[tuple[File, Header]], report: Report) -> Checkpoint:
    """The weights of all parts, and the metadata of the first."""
    file, header = parts[0]
    metadata = header.metadata
    weights: dict[str, Tensor] = {}
    n_forgotten = 0
    for part, described in parts:
        for info in described.infos:
            if info.name in weights:
                report.add("duplicate-tensor", f"{printable(info.name)} is in two files of the set", where=part.name)
                continue
            if described.big:
                is_forgotten = forgotten(info, part)
                n_forgotten += is_forgotten
                weights[info.name] = big_endian(info, part, is_forgotten)
            else:
                weights[info.name] = from_source(info.dtype, info.shape, Span(part, info.offset, info.n_bytes))
    if n_forgotten:
        report.add(
            "unknown-byteorder",
            f"says it is big-endian, but {n_forgotten:,} tensors are little-endian, and are read so",
            where=file.name,
            hint="convert it to GGUF again: the result is little-endian throughout",
        )
    if header.version == 1:
        report.add(
            "older-spelling",
            "is of GGUF version 1, which llama.cpp no longer reads",
            where=file.name,
            hint="write it anew: anyckpt convert FILE NEW.gguf",
        )
    _check_templates(metadata, file.name, report)
    facts: dict[str, Any] = {
        "container": f"GGUF v{header.version}" + (", big-endian" if header.big else ""),
        "gguf": metadata,
        "files": tuple(f.name for f, _ in parts),
        "alignment": header.alignment,
    }
    return Checkpoint("gguf", file.name, weights, facts=facts)


def _check_templates(metadata: Mapping[str, Any], where: str, report: Report) -> None:
    fields = metadata.fields if isinstance(metadata, Metadata) else {}
    for key in fields:
        if key.startswith("tokenizer.chat_template") and fields[key].kind == 8:
            template.check(fields[key].value(), printable(key), where, report)
