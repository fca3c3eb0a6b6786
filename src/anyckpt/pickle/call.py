"""A call that a stream asks for, as a handler of the allowlist sees it, and the rows of that list."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from anyckpt.core.inert import Global, Opaque
from anyckpt.finding import Verdict, fail

if TYPE_CHECKING:
    from anyckpt.pickle.stamps import Stamp

How = Literal["REDUCE", "NEWOBJ", "NEWOBJ_EX", "OBJ", "INST"]

UNREADABLE = Global("", "unreadable")
"""Stands where a value could not be made; a finding says why, so nothing that contains it complains again."""


class Context(Protocol):
    """What a handler may ask of the machine."""

    key_nodes: int

    def spend(self, n: int) -> None:
        """Account for copying `n` items or bytes. Raises CheckpointError [limit-exceeded] when a stream copies more
        than its size explains."""

    def suspect(self, verdict: Verdict, reason: str) -> None:
        """Worsen the verdict because of how something harmless is used."""

    def report(self, code: str, message: str) -> None:
        """Note a fault that does not stop the reading."""

    def invoke(self, function: Any, args: Any, how: How = "REDUCE") -> Any:
        """What calling `function` would give, by the same rules."""


@dataclass(slots=True)
class Call:
    """One use of an allow-listed global. Not frozen only because that would cost a microsecond for each tensor."""

    function: Global
    args: tuple[Any, ...]
    kwargs: dict[str, Any] | None
    how: How
    context: Context

    def opaque(self) -> Opaque:
        """The call kept as it is, uninterpreted."""
        return Opaque(self.function, self.args, self.kwargs)

    def expect(self, *counts: int) -> None:
        """Check the number of arguments. Raises CheckpointError [malformed-pickle]."""
        if len(self.args) not in counts or self.kwargs:
            raise fail("malformed-pickle", f"{self.function} is called with {len(self.args)} arguments")


Handler = Callable[[Call], Any]
Builder = Callable[[Opaque, Any, Context], Any]


@dataclass(frozen=True, slots=True)
class Row:
    """How one allow-listed global is interpreted.

    `call` None: it may be named, not called. `build` makes the final value when BUILD gives a state to what `call`
    returned; without it the state is kept on the Opaque. `value` is what naming it gives, None for a plain Global.
    `rebuilds` marks the functions that `_rebuild_from_type_v2` may be told to call. `guarded`: only the calls that its
    handler accepts are harmless; naming it without such a call is dangerous. `stamp` reads an instance in one step.
    """

    call: Handler | None = None
    build: Builder | None = None
    value: Any = None
    rebuilds: bool = False
    guarded: bool = False
    stamp: Stamp | None = None


def record(call: Call) -> Any:
    """Keep an instance of a class known to be harmless with what it is made of."""
    return call.opaque()


def unreadable(value: Any) -> bool:
    """Whether `value` is the remainder of a fault that was reported already."""
    return type(value) is Opaque and value.cls is UNREADABLE
