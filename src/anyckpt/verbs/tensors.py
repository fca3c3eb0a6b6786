"""Every tensor that a checkpoint holds, by name. Descriptions only: numpy is not needed."""

from __future__ import annotations

from collections.abc import Iterator

from anyckpt.core.checkpoint import Checkpoint
from anyckpt.core.inert import NumpyArray, TensorSubclass, walk
from anyckpt.core.tensor import Tensor


def all_tensors(checkpoint: Checkpoint) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of everything saved: weights, optimizer slots (`parameter/slot`), then those in the rest."""
    yield from ((name, t) for name, t in checkpoint.weights.items() if name not in checkpoint.aliases)
    yield from optimizer_tensors(checkpoint).items()
    yield from other_tensors(checkpoint).items()


def optimizer_tensors(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """`parameter/slot` -> tensor of the optimizer's state."""
    if checkpoint.optimizer is None:
        return {}
    return {
        f"{parameter}/{slot}": tensor
        for slot, by_parameter in checkpoint.optimizer.slots.items()
        for parameter, tensor in by_parameter.items()
    }


def other_tensors(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Tensors in the rest of what was saved (EMA, scheduler, RNG …), by path: `ema/fc.weight`."""
    rest = {"scheduler": checkpoint.scheduler, "rng": checkpoint.rng, **checkpoint.state}
    known = {id(t) for t in checkpoint.weights.values()} | {id(t) for t in optimizer_tensors(checkpoint).values()}
    found: dict[str, Tensor] = {}
    for path, value in walk({key: part for key, part in rest.items() if part is not None}):
        if isinstance(value, NumpyArray):
            value = value.tensor
        elif isinstance(value, TensorSubclass):
            value = value.base
        if isinstance(value, Tensor) and id(value) not in known:
            known.add(id(value))
            found["/".join(map(str, path))] = value
    return found
