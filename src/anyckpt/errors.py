"""What can go wrong, as one tree.

    AnyckptError
    ├── CheckpointError      the checkpoint is damaged, hostile or not one; carries a Finding   (also ValueError)
    │   └── NotACheckpoint   nothing here that any format recognises
    ├── UsageError           the request makes no sense for this checkpoint                     (also ValueError)
    ├── Refused              a rule stops the job: lossy step, existing destination, dangerous  (also RuntimeError)
    ├── OutOfSpace           the destination has not the room                                   (also OSError)
    └── MissingDependency    an extra is needed; the message is the install sentence            (also ImportError)

Every message is one sentence for a user; `hint` is the next command or step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from anyckpt.finding import Finding


class AnyckptError(Exception):
    """The root. `hint` says what to do next and may be empty."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class CheckpointError(AnyckptError, ValueError):
    """A fault in the checkpoint that stops the reader; `finding` says which, where, and what next."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.message, hint=finding.hint)
        self.finding = finding


class NotACheckpoint(CheckpointError):
    """No format recognises the path."""


class UsageError(AnyckptError, ValueError):
    """The request makes no sense here: no such tensor, no such format, options that exclude each other."""


class Refused(AnyckptError, RuntimeError):
    """A rule stops the job before anything is written."""


class OutOfSpace(AnyckptError, OSError):
    """The destination lacks the room for the result."""


class MissingDependency(AnyckptError, ImportError):
    """An optional package is needed; the message says how to install it."""
