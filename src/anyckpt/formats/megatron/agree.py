"""What the parts of a Megatron checkpoint must have in common: copies that are equal, masters that round to weights."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from anyckpt.core import ops
from anyckpt.core.box import slabs
from anyckpt.core.checkpoint import Checkpoint
from anyckpt.core.tensor import Tensor
from anyckpt.errors import CheckpointError
from anyckpt.finding import Report
from anyckpt.io.paths import printable

SLAB_ELEMENTS = 1 << 20


def differing(a: Tensor, b: Tensor) -> int:
    """How many elements of two tensors differ in their bits; all of them where types or shapes do."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return max(a.size, 1)
    n = 0
    for box in slabs(a.shape, SLAB_ELEMENTS):
        one, other = (np.ascontiguousarray(t.numpy(box)) for t in (a, b))
        bits = np.dtype(f"u{one.itemsize}") if one.itemsize <= 8 else np.uint8
        n += int(np.count_nonzero(one.view(bits) != other.view(bits)))
    return n


def check_replicas(pairs: Iterable[tuple[str, Tensor, Tensor]], report: Report) -> None:
    """Compare what several ranks hold copies of; each parameter that differs is told once."""
    told: set[str] = set()
    for name, one, other in pairs:
        try:
            n = 0 if name in told else differing(one, other)
        except CheckpointError:
            continue  # told where the tensor is read
        if n:
            told.add(name)
            report.add(
                "replica-mismatch", f"ranks hold different copies of it: {n:,} of {one.size:,} elements differ",
                where=f"tensor {printable(name)}", hint="the ranks' files may be of different saves",
            )


def check_masters(checkpoint: Checkpoint, report: Report) -> None:
    """Round every master to its weight's type and compare: the best check of this family."""
    masters = checkpoint.optimizer.slots.get("master", {}) if checkpoint.optimizer else {}
    bad: list[str] = []
    for name, master in masters.items():
        weight = checkpoint.weights.get(name)
        if weight is None or not weight.dtype.is_floating or weight.shape != master.shape:
            continue
        try:
            if differing(weight, ops.cast(master, weight.dtype)):
                bad.append(name)
        except CheckpointError:
            continue
    if bad:
        report.add(
            "master-mismatch", f"the masters of {len(bad)} of {len(masters)} weights don't round to them: "
            f"{', '.join(printable(n) for n in bad[:3])}", where=f"tensor {printable(bad[0])}",
            hint="the optimizer's state may be shifted or of another save; convert with --only weights to leave it out",
        )  # fmt: skip
