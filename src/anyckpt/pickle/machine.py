"""Run a pickle without loading it: opcodes in, inert values and findings out. Nothing is imported or called.

    run(data)       one stream; never raises for what the data hold
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any

from anyckpt.core.inert import Global
from anyckpt.errors import CheckpointError
from anyckpt.finding import fail
from anyckpt.pickle.call import Row
from anyckpt.pickle.opcodes import ARGUMENT_BYTES, TABLE, Stop
from anyckpt.pickle.result import DEFAULT_LIMITS, Import, Limits, Result
from anyckpt.pickle.semantics import Machine
from anyckpt.pickle.stamps import OutOfOrder, SparseMemo, Stream, wanted
from anyckpt.pickle.sweep import swept

__all__ = ["Import", "Limits", "Result", "run"]

_UINT4 = struct.Struct("<I").unpack_from
STAMP_BYTES = 1 << 16  # smaller streams are not worth a look at what they name
_BLOCK = 1 << 14  # opcodes between two looks at what has grown


def run(
    data: bytes | memoryview,
    *,
    persistent: Callable[[Any], Any] | None = None,
    where: str = "",
    limits: Limits = DEFAULT_LIMITS,
    start: int = 0,
    rows: Mapping[str, Row] | None = None,
) -> Result:
    """Interpret the stream that begins at `start`.

    Args:
        data: the bytes; only the stream's own are read.
        persistent: what a persistent id stands for; it may raise CheckpointError. Without it, ids stay unreadable.
        where: what to call the stream in findings.
        limits: bounds on what the stream may make.
        start: offset of its first opcode.
        rows: other handlers for names that the allowlist has, for streams of very many objects of a few classes.
    """
    machine = Machine(data, persistent, where, limits, start, rows)
    try:
        if rows and isinstance(data, bytes) and len(data) >= STAMP_BYTES and any(row.stamp for row in rows.values()):
            machine.memo = SparseMemo(wanted(data))
            machine.stream = Stream(data, machine.memo)
        end, fault = _drive(machine, start)
    except OutOfOrder:
        machine = Machine(data, persistent, where, limits, start, rows)
        end, fault = _drive(machine, start)
    value = machine.stack[-1] if fault is None else _salvage(machine)
    imports = machine.imports()
    if fault is not None:
        machine.report(fault.finding.code, fault.finding.message)
    machine.verdict_of_imports(imports)
    if fault is not None:
        machine.position = end
        _sweep(machine, end, imports)
    report = machine.report_
    return Result(
        value, fault is None, end, machine.protocol, imports, tuple(report.findings), report.verdict
    )


def _drive(m: Machine, pos: int) -> tuple[int, CheckpointError | None]:
    """Execute opcodes until STOP or a fault; where it ended, and the fault.

    The seven opcodes that make up most of every checkpoint are written out here, which doubles the speed; `opcodes` has
    them all, and is what they fall back to where an argument is cut short.
    """
    data, end, table, memo = m.data, len(m.data), TABLE, m.memo
    stack, replaced = m.stack, m.replaced
    n_opcodes = 0
    try:
        while True:
            for _ in range(_BLOCK):
                op = data[pos]
                if op == 0x71:  # BINPUT
                    memo[data[pos + 1]] = stack[-1]
                    pos += 2
                elif op == 0x94:  # MEMOIZE: the number of entries, not the highest index + 1
                    memo[len(memo)] = stack[-1]
                    pos += 1
                elif op == 0x68 and not replaced:  # BINGET
                    stack.append(memo[data[pos + 1]])
                    pos += 2
                elif op == 0x4B:  # BININT1
                    stack.append(data[pos + 1])
                    pos += 2
                elif op == 0x72:  # LONG_BINPUT
                    memo[_UINT4(data, pos + 1)[0]] = stack[-1]
                    pos += 5
                elif op == 0x8C and (after := pos + 2 + data[pos + 1]) <= end:  # SHORT_BINUNICODE
                    stack.append(str(data[pos + 2 : after], "utf-8", "surrogatepass"))
                    pos = after
                elif op == 0x58 and (after := pos + 5 + _UINT4(data, pos + 1)[0]) <= end:  # BINUNICODE
                    stack.append(str(data[pos + 5 : after], "utf-8", "surrogatepass"))
                    pos = after
                else:
                    m.position = pos
                    pos = table[op](m, pos + 1)
                    stack = m.stack
            n_opcodes += _BLOCK
            m.check_limits(n_opcodes)
    except Stop as stop:
        return stop.end, None
    except CheckpointError as fault:
        return pos, fault
    except (IndexError, struct.error):
        if pos >= end:
            return end, fail("truncated", "the pickle ends before its STOP opcode")
        if pos + 1 + ARGUMENT_BYTES.get(data[pos], 0) > end:
            return pos, fail("truncated", "the pickle ends within an opcode")
        return pos, fail("malformed-pickle", f"opcode 0x{data[pos]:02x} needs more values than the stack holds")
    except KeyError:
        return pos, fail("malformed-pickle", "a memo entry is read and was never written")
    except ValueError as error:
        return pos, fail("malformed-pickle", f"the argument of opcode 0x{data[pos]:02x} can't be read: {error}")


def _salvage(m: Machine) -> Any:
    """What a broken stream had put together: pending items go into the containers that wait for them."""
    levels = [*m.marks, m.stack]
    for outer, pending in zip(reversed(levels[:-1]), reversed(levels[1:]), strict=True):
        target = outer[-1] if outer else None
        # The last pair may hold a half-made value; a Global there is surely a call that did not come.
        if pending and isinstance(pending[-1], Global):
            pending = pending[:-1]
        try:
            if isinstance(target, dict):
                m.set_items(target, pending[: len(pending) // 2 * 2])
            elif type(target) is list:
                m.append(target, pending)
        except CheckpointError:
            break
    bottom = next((level for level in levels if level), [])
    return bottom[0] if bottom else None


def _sweep(m: Machine, start: int, known: tuple[Import, ...]) -> None:
    """Report imports that stand behind a fault: a loader that reads on, or another tool, may reach them."""
    seen = {item.path for item in known}
    for item in swept(m.data, start, m.limits.sweep_bytes):
        if item.path not in seen:
            seen.add(item.path)
            m.position = item.position
            m.suspect(item.verdict, f"behind the fault, the pickle names {item.path[:200]}, which {item.reason}")
