"""anyckpt: identify, inspect, verify, diff, convert and safely load model checkpoints of any format.

The public names, loaded on first use so that `import anyckpt` stays cheap. Nothing from a checkpoint is ever executed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from anyckpt.core.checkpoint import Checkpoint as Checkpoint
    from anyckpt.core.tensor import Tensor as Tensor
    from anyckpt.errors import AnyckptError as AnyckptError
    from anyckpt.errors import CheckpointError as CheckpointError
    from anyckpt.errors import MissingDependency as MissingDependency
    from anyckpt.errors import NotACheckpoint as NotACheckpoint
    from anyckpt.errors import OutOfSpace as OutOfSpace
    from anyckpt.errors import Refused as Refused
    from anyckpt.errors import UsageError as UsageError
    from anyckpt.finding import Finding as Finding
    from anyckpt.verbs.convert import convert as convert
    from anyckpt.verbs.diff import diff as diff
    from anyckpt.verbs.identify import identify as identify
    from anyckpt.verbs.inspect import inspect as inspect
    from anyckpt.verbs.load import load as load
    from anyckpt.verbs.load import load_into as load_into
    from anyckpt.verbs.open import open as open
    from anyckpt.verbs.save import save as save
    from anyckpt.verbs.scan import scan as scan
    from anyckpt.verbs.verify import verify as verify

_WHERE = {
    "Checkpoint": "core.checkpoint",
    "Tensor": "core.tensor",
    "Finding": "finding",
    **dict.fromkeys(
        "AnyckptError CheckpointError MissingDependency NotACheckpoint OutOfSpace Refused UsageError".split(), "errors"
    ),
    **{verb: f"verbs.{verb}" for verb in "convert diff identify inspect load open save scan verify".split()},
    "load_into": "verbs.load",
}
__all__ = ["__version__", *sorted(_WHERE)]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'anyckpt' has no attribute {name!r}")
    value = getattr(import_module(f"anyckpt.{_WHERE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
