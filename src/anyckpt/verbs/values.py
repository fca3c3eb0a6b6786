"""One bounded pass over every stored value: NaN and infinity, tensors of zeros, files whose tail was never written.

Values are read in slabs of a few MiB by several threads; nothing is kept of them but counts. Rules: a file "ends in
zeros" where at least 4096 zero bytes before its end cover more than one tensor's end or the trailing half of one, or
where its whole payload is zero (what a writer that preallocates leaves behind when it is killed).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from anyckpt.core.box import Box, slabs, whole
from anyckpt.core.read import as_bytes, read_box
from anyckpt.core.source import File, Fill, Inline, Span
from anyckpt.core.tensor import Tensor, from_source
from anyckpt.errors import CheckpointError
from anyckpt.finding import Report, Severity, located
from anyckpt.verbs.reading import SLAB_BYTES, Events, each
from anyckpt.verbs.tensors import all_tensors

if TYPE_CHECKING:
    from anyckpt.core.checkpoint import Checkpoint

MIN_TAIL = 4096  # zero bytes at a file's end that mean something
MAX_EXPANSION = 4  # a view that shows more than so many times its bytes is read as the bytes
MIN_PAYLOAD = 64  # a payload of fewer bytes may well be zero

# How a value that is not finite looks in the bits of each float type: (unsigned type, mask, value under the mask).
# Types without infinity have NaN there alone. Source: ml_dtypes 0.5, OCP 8-bit floating point specification.
NOT_FINITE: Mapping[str, tuple[str, int, int]] = {
    "float64": ("u8", 0x7FF0000000000000, 0x7FF0000000000000),
    "float32": ("u4", 0x7F800000, 0x7F800000),
    "float16": ("u2", 0x7C00, 0x7C00),
    "bfloat16": ("u2", 0x7F80, 0x7F80),
    "float8_e4m3fn": ("u1", 0x7F, 0x7F),
    "float8_e5m2": ("u1", 0x7C, 0x7C),
    "float8_e4m3fnuz": ("u1", 0xFF, 0x80),
    "float8_e5m2fnuz": ("u1", 0xFF, 0x80),
    "float8_e8m0fnu": ("u1", 0xFF, 0xFF),
    "complex128": ("u8", 0x7FF0000000000000, 0x7FF0000000000000),
    "complex64": ("u4", 0x7F800000, 0x7F800000),
}


@dataclass(slots=True)
class Part:
    """What the pass found in one stored part of a tensor: a piece, or all of a computed one."""

    name: str
    tensor: Tensor
    box: Box
    span: Span | None
    is_weight: bool
    n_bytes: int
    n_nan: int = 0
    n_infinite: int = 0
    zero_tail: int = 0  # zero bytes at its end


def check_values(
    checkpoint: Checkpoint, report: Report, *, jobs: int | None = None, events: Events | None = None
) -> int:
    """Read every value of `checkpoint`, report what is wrong with them, and return the bytes read.

    `events(done, total)` is called as bytes are read, from any thread. A part that cannot be read is reported and
    stepped over.
    """
    parts = list(_parts(checkpoint))

    def scan(part: Part, advance: Callable[[int], None]) -> CheckpointError | None:
        try:
            _scan(part, advance)
        except CheckpointError as error:
            return located(error, part.name)
        return None

    total = sum(part.n_bytes for part in parts)
    faults = [fault for fault in each(scan, parts, total_bytes=total, jobs=jobs, events=events) if fault is not None]
    report.extend(fault.finding for fault in faults)
    _report_not_finite(parts, report)
    in_tail = _report_tails(parts, report)
    _report_zeros(parts, in_tail, report)
    return total


def _parts(checkpoint: Checkpoint) -> Iterator[Part]:
    """Every tensor once, by the pieces that are stored; those whose values were never saved are left out."""
    seen: set[int] = set()
    for name, tensor in all_tensors(checkpoint):
        if id(tensor) not in seen and tensor.is_stored:
            seen.add(id(tensor))
            yield from _parts_of(name, tensor, name in checkpoint.weights)


def _parts_of(name: str, tensor: Tensor, is_weight: bool) -> Iterator[Part]:
    """What to read of one tensor. Of views that show the same bytes again and again, the bytes themselves."""
    box = whole(tensor.shape)
    if tensor.dtype.block > 1:
        tensor, box = as_bytes(tensor, box)
    if tensor.op is not None:
        if tensor.nbytes <= MAX_EXPANSION * _stored_bytes(tensor):
            yield Part(name, tensor, box, None, is_weight, tensor.nbytes)
        else:
            for below in tensor.op.inputs:
                yield from _parts_of(name, below, is_weight)
        return
    for piece in tensor.pieces:
        held, source = piece.box or box, piece.source
        n_bytes = held.volume * tensor.dtype.itemsize
        if isinstance(source, Span | Inline) and n_bytes > MAX_EXPANSION * max(source.length, 1):
            n_elements = source.length // tensor.dtype.itemsize
            stored = from_source(tensor.dtype, (n_elements,), source)
            yield Part(name, stored, whole(stored.shape), None, is_weight, stored.nbytes)
        elif not isinstance(source, Fill):
            span = source if isinstance(source, Span) and piece.strides is None else None
            yield Part(name, tensor, held, span, is_weight, n_bytes)


def _stored_bytes(tensor: Tensor) -> int:
    """Bytes that a tensor is made from, before views and operations."""
    if tensor.op is not None:
        return sum(map(_stored_bytes, tensor.op.inputs))
    return sum(len(p.source.element) if isinstance(p.source, Fill) else p.source.length for p in tensor.pieces)


def _scan(part: Part, advance: Callable[[int], None]) -> None:
    itemsize = part.tensor.dtype.itemsize
    for slab in slabs(part.box.shape, max(1, SLAB_BYTES // itemsize)):
        array = np.ascontiguousarray(read_box(part.tensor, slab.shifted(part.box.start)))
        raw = array.reshape(-1).view(np.uint8)
        _count_not_finite(part, raw)
        zeros = _zero_tail(raw)
        part.zero_tail = zeros if zeros < raw.size else part.zero_tail + zeros
        advance(raw.size)


def _count_not_finite(part: Part, raw: np.ndarray[Any, Any]) -> None:
    row = NOT_FINITE.get(part.tensor.dtype.name)
    if row is None:
        return
    unsigned, mask, value = row
    bits = raw.view(unsigned)
    scratch = bits & bits.dtype.type(mask)
    odd = scratch == value
    if not odd.any():
        return
    floats = raw.view(part.tensor.dtype.numpy_dtype()).reshape(-1)
    if floats.dtype.kind == "c":
        floats = floats.view(floats.real.dtype)
    n_nan = int(np.isnan(floats).sum())
    part.n_nan += n_nan
    part.n_infinite += int(odd.sum()) - n_nan


def _zero_tail(raw: np.ndarray[Any, Any]) -> int:
    """How many zero bytes `raw` ends in; looks at no more of it than it has to."""
    step = 4096
    end = raw.size
    while end > 0:
        start = max(0, end - step)
        (used,) = np.nonzero(raw[start:end])
        if used.size:
            return int(raw.size - (start + used[-1] + 1))
        end, step = start, min(step * 4, SLAB_BYTES)
    return int(raw.size)


def _report_not_finite(parts: Iterable[Part], report: Report) -> None:
    found: dict[str, list[int]] = {}
    for part in parts:
        if part.n_nan or part.n_infinite:
            counts = found.setdefault(part.name, [0, 0])
            counts[0] += part.n_nan
            counts[1] += part.n_infinite
    for name, (n_nan, n_infinite) in found.items():
        counted = " and ".join(f"{n:,} {what}" for n, what in ((n_nan, "NaN"), (n_infinite, "infinite")) if n)
        report.add(
            "non-finite",
            f"holds {counted} value{'' if n_nan + n_infinite == 1 else 's'}",
            where=name,
            hint="training had probably diverged: take an earlier step",
        )


def _report_tails(parts: Iterable[Part], report: Report) -> set[str]:
    """Report files that end in zeros; returns the names of the tensors whose ends are in such a tail."""
    by_file: dict[tuple[str, int], list[tuple[int, int, Part]]] = {}
    files: dict[tuple[str, int], File] = {}
    for part in parts:
        if part.span is not None and (placed := part.span.file.on_disk()) is not None and part.n_bytes:
            file, offset = placed
            key = (file.name, file.size)
            files[key] = file
            start = offset + part.span.offset
            by_file.setdefault(key, []).append((start, start + part.n_bytes, part))
    in_tail: set[str] = set()
    for key, held in by_file.items():
        held.sort(key=lambda row: row[1], reverse=True)
        in_tail |= _report_tail(files[key], held, report)
    return in_tail


def _report_tail(file: File, held: list[tuple[int, int, Part]], report: Report) -> set[str]:
    """`held`: (start, end, part) of what one file holds, the last first."""
    if held[0][1] != file.size:
        return set()
    covered: list[Part] = []
    cut_inside = False
    for _, _, part in held:
        if part.zero_tail == part.n_bytes:
            covered.append(part)
            continue
        if part.zero_tail * 2 >= part.n_bytes and part.zero_tail >= MIN_TAIL:
            covered.append(part)
            cut_inside = True
        break
    n_zero = sum(part.zero_tail for part in covered)
    payload = sum(part.n_bytes for _, _, part in held)
    everything = n_zero == payload and payload >= MIN_PAYLOAD
    if not everything and (n_zero < MIN_TAIL or not (cut_inside or len(covered) > 1)):
        return set()
    severity: Severity = "error" if cut_inside else "warning"
    what = "holds nothing but zeros" if everything else f"ends in {n_zero:,} zero bytes"
    names = f"all of {len(covered):,} tensors" if everything else f"{len(covered):,} of {len(held):,} tensors"
    report.add(
        "zero-tail",
        f"{what}, over {names}: as if the writer had died after making room",
        where=file.name,
        hint="download or save this file again, or compare its digest with the source",
        severity=severity,
    )
    return {part.name for part in covered}


def _report_zeros(parts: Iterable[Part], in_tail: set[str], report: Report) -> None:
    """Weights that are all zero. One-dimensional ones and a LoRA's B begin so, hence are only worth a note."""
    sizes: dict[str, tuple[int, bool]] = {}
    ndim: dict[str, int] = {}
    for part in parts:
        if part.is_weight and part.n_bytes:
            n_bytes, zero = sizes.get(part.name, (0, True))
            sizes[part.name] = (n_bytes + part.n_bytes, zero and part.zero_tail == part.n_bytes)
            ndim[part.name] = part.tensor.ndim
    zeros = [name for name, (_, zero) in sizes.items() if zero and name not in in_tail]
    everything = len(zeros) == len(sizes)
    for name in zeros:
        usual = not everything and (ndim[name] < 2 or "lora_B" in name)
        report.add("all-zero", "every value is zero", where=name, severity="note" if usual else "warning")
