"""Models whose weights are empty: what ZeRO stage 3 leaves in a module, saved as if it were the model.

`model.state_dict()` of a partitioned module gives tensors of shape (0,), and `save_pretrained` and torch.save take them
(the most-met mistake with stage 3). Such a file loads nowhere, or, worse, loads with `strict=False`.
"""

from __future__ import annotations

from itertools import islice

from anyckpt.core.checkpoint import Checkpoint
from anyckpt.finding import Report
from anyckpt.io.paths import printable

FIRST = 64


def check(checkpoint: Checkpoint, report: Report) -> None:
    """Report a model most of whose floating-point weights are of shape (0,): then some of the first are.

    A weight whose master is stored, and as empty, really has no elements.
    """
    weights = checkpoint.weights
    if all(tensor.shape != (0,) for tensor in islice(weights.values(), FIRST)):
        return  # a large checkpoint's tensors are made when they are asked for
    floating = {name: tensor for name, tensor in weights.items() if tensor.dtype.is_floating}
    masters = checkpoint.optimizer.slots.get("master", {}) if checkpoint.optimizer else {}
    empty = [name for name, tensor in floating.items() if tensor.shape == (0,) and name not in masters]
    if len(empty) > 1 and 2 * len(empty) >= len(floating):
        report.add(
            "incomplete",
            f"{len(empty)} of {len(floating)} weights are empty ({printable(empty[0])} first): placeholders that ZeRO "
            "stage 3 leaves in a module, saved as if they were the model",
            where=printable(checkpoint.path),
            hint="the values are in the run's *_optim_states.pt: anyckpt convert RUN OUT --to hf, or train with "
            "stage3_gather_16bit_weights_on_model_save",
        )
