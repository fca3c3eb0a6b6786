"""What opcodes mean: importing, calling, building and filling, on inert values.

The machine's state lives here; `opcodes` moves values on its stack and `machine` drives it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from anyckpt.core.inert import Global, Opaque
from anyckpt.core.inert import Mapping as SavedMapping
from anyckpt.errors import CheckpointError
from anyckpt.finding import DEFAULT_SEVERITY, VERDICTS, Finding, Report, Severity, Verdict, fail
from anyckpt.pickle.allow import ALLOW, classify
from anyckpt.pickle.call import UNREADABLE, Call, How, Row, unreadable
from anyckpt.pickle.keys import add_pairs, key_fault
from anyckpt.pickle.renames import to_python3
from anyckpt.pickle.result import Import, Limits
from anyckpt.pickle.stamps import Stream
from anyckpt.pickle.storage import sketch

CALL_RESULT = Global("", "call result")
"""Stands for the class of what calling a call's result would give."""

_MAX_UNREADABLE_PARTS = 8


@dataclass(slots=True)
class _Seen:
    """An import while the stream is read. `n_fits` counts the calls of it that its handler made a value of."""

    value: Any
    module: str
    name: str
    resolved: Global
    position: int
    verdict: Verdict
    reason: str
    row: Row | None
    n_calls: int = 0
    n_fits: int = 0


class Machine:
    """The state of one stream: stack, marks, memo, imports, findings. `position` is that of the current opcode."""

    def __init__(
        self,
        data: bytes | memoryview,
        persistent: Callable[[Any], Any] | None,
        where: str,
        limits: Limits,
        start: int,
        rows: Mapping[str, Row] | None = None,
    ) -> None:
        self.data = data.cast("B") if isinstance(data, memoryview) else data
        self.persistent = persistent
        self.where = where
        self.limits = limits
        self.key_nodes = limits.key_nodes
        # Only names that the allowlist has may be handled otherwise: what is safe is decided there alone.
        self.rows = {**ALLOW, **{name: row for name, row in rows.items() if name in ALLOW}} if rows else ALLOW
        self.position = start
        self.protocol = 0
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self.stream: Stream | None = None  # set where instances may be read in one step
        # id of a placeholder that BUILD turned into something else -> (placeholder, kept alive; its final value).
        self.replaced: dict[int, tuple[Any, Any]] = {}
        self.report_ = Report()
        self._imports: dict[tuple[str, str, bool], _Seen] = {}
        self._by_global: dict[Global, _Seen] = {}
        self._budget = limits.spend_per_byte * (len(data) - start) + (64 << 10)

    # -- findings ----------------------------------------------------------------------------------------------------

    def place(self) -> str:
        """Where the current opcode is, for a finding."""
        at = f"byte {self.position}"
        return f"{self.where}, {at}" if self.where else at

    def report(self, code: str, message: str, severity: Severity | None = None) -> None:
        """Note a fault here and go on."""
        self.report_.extend([Finding(code, severity or DEFAULT_SEVERITY[code], message, self.place())])

    def suspect(self, verdict: Verdict, reason: str) -> None:
        """Worsen the verdict because of what is done here."""
        self.report_.worsen(verdict)
        if verdict != "safe":
            self.report("dangerous-code" if verdict == "dangerous" else "unknown-code", reason)

    def spend(self, n: int) -> None:
        """Account for a copy of `n` items; what a small file may make large is bounded by its own size."""
        self._budget -= n
        if self._budget < 0:
            raise fail("limit-exceeded", "the objects of this pickle copy one another beyond what its size explains")

    # -- importing ---------------------------------------------------------------------------------------------------

    def import_(self, module: str, name: str) -> Any:
        """What naming a global gives: a constant of ours, or the name itself."""
        old = self.protocol < 3
        seen = self._imports.get((module, name, old))
        if seen is None:
            seen = self._imports[module, name, old] = self._look_up(module, name, old)
        return seen.value

    def _look_up(self, module: str, name: str, old: bool) -> _Seen:
        """Classify a name as written and as a loader would look it up; the worse of both counts."""
        resolved = Global(*(to_python3(module, name) if old or module == "__builtin__" else (module, name)))
        verdict, reason = classify(resolved.module, resolved.name)
        if verdict != "dangerous" and (resolved.module, resolved.name) != (module, name):
            written, why = classify(module, name)
            if written == "dangerous" and module != "__builtin__" and module != "copy_reg":
                verdict, reason = written, why
        row = self.rows.get(str(resolved))
        if row is not None and verdict != "safe" and not row.guarded:
            row = None
        value = resolved if row is None or row.value is None else row.value
        seen = _Seen(value, module, name, resolved, self.position, verdict, reason, row)
        known = self._by_global.setdefault(resolved, seen)
        if VERDICTS.index(verdict) > VERDICTS.index(known.verdict):
            known.verdict, known.reason, known.row = verdict, reason, row
        return known

    def imports(self) -> tuple[Import, ...]:
        """All imports so far, the verdicts of guarded ones settled by how they were used."""
        out = []
        for seen in self._by_global.values():
            verdict, reason = seen.verdict, seen.reason
            if seen.row is not None and seen.row.guarded and 0 < seen.n_calls == seen.n_fits:
                verdict, reason = "safe", ""
            out.append(
                Import(
                    seen.module, seen.name, seen.resolved.module, seen.resolved.name,
                    seen.position, verdict, reason, seen.n_calls > 0,
                )
            )
        return tuple(out)

    # -- calling -----------------------------------------------------------------------------------------------------

    def stamped(self, cls: Any, pos: int) -> int | None:
        """Read instances in one step onto the stack; the offset behind them, None where that can't be done here."""
        seen = self._by_global.get(cls) if type(cls) is Global else None
        if seen is None or seen.row is None or seen.row.stamp is None or self.stream is None:
            return None
        seen.n_calls += 1
        return seen.row.stamp(self.stream, pos, self.stack)

    def invoke(self, function: Any, args: Any, how: How = "REDUCE") -> Any:
        """What a call gives, for handlers that call on behalf of another."""
        return self.call(function, args, None, how)

    def call(self, function: Any, args: Any, kwargs: Any, how: How) -> Any:
        """What calling `function` gives: a value where a handler makes one, otherwise the call itself."""
        if not isinstance(function, Global):
            return self._call_of_a_value(function, args)
        seen = self._by_global.get(function)
        if seen is None:
            row = self.rows.get(str(function))  # made by a handler, not by an import
        else:
            row = seen.row
            seen.n_calls += 1
        if not isinstance(args, tuple) or not (kwargs is None or isinstance(kwargs, dict)):
            self.report("malformed-pickle", f"{str(function)[:100]} is called with {sketch(args)}, not a tuple")
            return Opaque(UNREADABLE, (function, args))
        if row is None:
            return Opaque(function, args, kwargs)
        if row.call is None:
            self.suspect("unknown", f"{function} is called, which no saved object does")
            return Opaque(function, args, kwargs)
        if _has_unreadable(args):
            return Opaque(UNREADABLE, (function, args))
        return self._handle(row.call, Call(function, args, kwargs, how, self), seen)

    def _handle(self, handler: Callable[[Call], Any], call: Call, seen: _Seen | None) -> Any:
        try:
            value = handler(call)
            if seen is not None and not isinstance(value, Opaque):
                seen.n_fits += 1
        except CheckpointError as error:
            self.report(error.finding.code, error.finding.message, error.finding.severity)
            value = Opaque(UNREADABLE, (call.function, call.args))
        except (TypeError, ValueError, OverflowError) as error:
            self.report("malformed-pickle", f"{call.function} is called with arguments it can't take: {error}")
            value = Opaque(UNREADABLE, (call.function, call.args))
        return value

    def _call_of_a_value(self, function: Any, args: Any) -> Any:
        if isinstance(function, Opaque) and not unreadable(function):
            self.suspect("dangerous", "the result of a call is called in turn")
            return Opaque(CALL_RESULT, (function, args))
        if not isinstance(function, Opaque):
            self.report("malformed-pickle", f"{sketch(function)} is called as if it were a function")
        return Opaque(UNREADABLE, (function, args))

    def persistent_load(self, pid: Any) -> Any:
        """What a persistent id stands for, from the container's reader."""
        if self.persistent is None:
            return Opaque(UNREADABLE, (pid,))
        try:
            return self.persistent(pid)
        except CheckpointError as error:
            self.report(error.finding.code, error.finding.message, error.finding.severity)
            return Opaque(UNREADABLE, (pid,))

    # -- building and filling ----------------------------------------------------------------------------------------

    def build(self, target: Any, state: Any) -> Any:
        """The object after BUILD: the same one, or what its row makes of it."""
        if isinstance(target, Opaque):
            return self._build_opaque(target, state)
        if isinstance(target, SavedMapping):
            if target.attributes:
                self.report("ambiguous", f"a {target.kind} is given its attributes twice; the last are kept")
            self.spend(sum(len(part) for part in (state, *_parts(state)) if isinstance(part, dict)))
            target.attributes = Opaque(None, state=state).attributes()
        elif isinstance(target, Global):
            is_class = target.name.rpartition(".")[2].lstrip("_")[:1].isupper()
            verdict: Verdict = "unknown" if is_class else "dangerous"
            self.suspect(verdict, f"attributes are set on {str(target)[:100]} itself")
        else:
            self.report("malformed-pickle", f"attributes are set on {sketch(target)}, which has none")
        return target

    def _build_opaque(self, target: Opaque, state: Any) -> Any:
        row = self.rows.get(str(target.cls)) if isinstance(target.cls, Global) else None
        if row is not None and row.build is not None:
            try:
                value = row.build(target, state, self)
            except CheckpointError as error:
                self.report(error.finding.code, error.finding.message, error.finding.severity)
                value = Opaque(UNREADABLE, (target.cls, state))
            except (TypeError, ValueError, OverflowError) as error:
                self.report("malformed-pickle", f"{target.cls} is given a state it can't take: {error}")
                value = Opaque(UNREADABLE, (target.cls, state))
            if value is not target:
                self.replaced[id(target)] = (target, value)
            return value
        if target.state is not None and not unreadable(target):
            self.report("ambiguous", f"an instance of {str(target.cls)[:100]} is given two states; the last is kept")
        target.state = state
        return target

    def set_items(self, target: Any, items: Sequence[Any]) -> None:
        """SETITEM(S): pairs into a dict, or a call of `__setitem__` on something else."""
        if len(items) % 2:
            self.report("malformed-pickle", "a dict is given a key without a value")
        if isinstance(target, dict):
            fault = add_pairs(target, zip(items[::2], items[1::2], strict=False), self)
            if fault is not None:
                self.report(fault.finding.code, fault.finding.message)
        else:
            self._fill(target, list(zip(items[::2], items[1::2], strict=False)), "items are set on")

    def append(self, target: Any, items: Sequence[Any]) -> None:
        """APPEND(S): values into a list, or a call of `append`/`extend` on something else."""
        if type(target) is list:
            target.extend(items)
        else:
            self._fill(target, items, "values are appended to")

    def add(self, target: Any, items: Sequence[Any]) -> None:
        """ADDITEMS: members into a set."""
        if type(target) is not set:
            self._fill(target, items, "members are added to")
            return
        for item in items:
            fault = key_fault(item, self)
            if fault is None:
                target.add(item)
            else:
                self.report(fault.finding.code, fault.finding.message)

    def _fill(self, target: Any, items: Sequence[Any], what: str) -> None:
        if isinstance(target, Opaque):
            target.items.extend(items)
        elif isinstance(target, Global):
            self.suspect("dangerous", f"{what} {str(target)[:100]} itself")
        else:
            self.report("malformed-pickle", f"{what} {sketch(target)}")

    def unmark(self) -> list[Any]:
        """The values since the last MARK, which is removed. Raises CheckpointError where there is none."""
        items = self.stack
        if not self.marks:
            raise fail("malformed-pickle", "an opcode needs a MARK and there is none")
        self.stack = self.marks.pop()
        return items

    def check_limits(self, n_opcodes: int) -> None:
        """Compare what has grown with its bounds. Raises CheckpointError [limit-exceeded]."""
        limits = self.limits
        n_values = len(self.stack) + sum(map(len, self.marks))
        for n, most, what in (
            (n_opcodes, limits.opcodes, "opcodes"),
            (len(self.memo), limits.memo, "memo entries"),
            (n_values, limits.stack, "values on its stack"),
        ):
            if n > most:
                raise fail("limit-exceeded", f"the pickle has more than {most:,} {what}")

    def verdict_of_imports(self, imports: tuple[Import, ...]) -> None:
        """Fold the imports' verdicts into the stream's, with one finding for each that is not safe."""
        for item in sorted(imports, key=lambda i: -VERDICTS.index(i.verdict)):
            if item.verdict != "safe":
                self.position = item.position
                self.suspect(item.verdict, f"the pickle names {item.path[:200]}, which {item.reason}")


def _parts(state: Any) -> tuple[Any, ...]:
    """The (dict, slots) pair that a state may be."""
    return state if isinstance(state, tuple) and len(state) == 2 else ()


def _has_unreadable(args: tuple[Any, ...]) -> bool:
    """Whether a part of a call is the remainder of an earlier fault, looking one tuple deep."""
    for arg in args[:_MAX_UNREADABLE_PARTS]:
        kind = type(arg)
        if kind is Opaque:
            if arg.cls is UNREADABLE:
                return True
        elif kind is tuple:
            for part in arg[:_MAX_UNREADABLE_PARTS]:
                if type(part) is Opaque and part.cls is UNREADABLE:
                    return True
    return False
