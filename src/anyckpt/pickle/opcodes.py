"""Every opcode of protocols 0 to 5, as functions (machine, position behind the opcode) -> position behind its argument.

Meanings from CPython 3.13 `Lib/pickletools.py` and `Modules/_pickle.c`. A read past the end raises IndexError or
struct.error, which the driver words as "truncated"; lengths are compared with what remains before anything is sliced.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import Any

from anyckpt.core.inert import Global, Opaque
from anyckpt.finding import fail
from anyckpt.pickle import operands
from anyckpt.pickle.call import UNREADABLE
from anyckpt.pickle.semantics import Machine
from anyckpt.pickle.storage import sketch

Opcode = Callable[[Machine, int], int]

HIGHEST_PROTOCOL = 5
_INT4 = Struct("<i").unpack_from
_UINT2 = Struct("<H").unpack_from
_UINT4 = Struct("<I").unpack_from
_UINT8 = Struct("<Q").unpack_from
_FLOAT8 = Struct(">d").unpack_from


class Stop(Exception):
    """STOP was reached; `end` is the offset behind it."""

    def __init__(self, end: int) -> None:
        super().__init__(end)
        self.end = end


# -- makers of opcodes that differ in one thing ----------------------------------------------------------------------


def _constant(value: Any) -> Opcode:
    def op(m: Machine, pos: int) -> int:
        m.stack.append(value)
        return pos

    return op


def _new(make: Callable[[], Any]) -> Opcode:
    def op(m: Machine, pos: int) -> int:
        m.stack.append(make())
        return pos

    return op


def _scalar(unpack: Callable[[Any, int], tuple[Any, ...]], size: int) -> Opcode:
    def op(m: Machine, pos: int) -> int:
        m.stack.append(unpack(m.data, pos)[0])
        return pos + size

    return op


def _counted(unpack: Callable[[Any, int], tuple[Any, ...]], size: int, make: Callable[[Machine, bytes], Any]) -> Opcode:
    """A length, then so many bytes."""

    def op(m: Machine, pos: int) -> int:
        n: int = unpack(m.data, pos)[0]
        if n < 0:
            raise fail("malformed-pickle", f"an opcode has the negative length {n}")
        pos += size
        m.stack.append(make(m, operands.take(m, pos, n)))
        return pos + n

    return op


def _uint1(data: Any, pos: int) -> tuple[int]:
    return (data[pos],)


def _parsed(parse: Callable[[Machine, int], tuple[Any, int]]) -> Opcode:
    """A line of text."""

    def op(m: Machine, pos: int) -> int:
        value, pos = parse(m, pos)
        m.stack.append(value)
        return pos

    return op


def _put(unpack: Callable[[Any, int], tuple[Any, ...]], size: int) -> Opcode:
    def op(m: Machine, pos: int) -> int:
        m.memo[unpack(m.data, pos)[0]] = m.stack[-1]
        return pos + size

    return op


def _get(unpack: Callable[[Any, int], tuple[Any, ...]], size: int) -> Opcode:
    def op(m: Machine, pos: int) -> int:
        _recall(m, unpack(m.data, pos)[0])
        return pos + size

    return op


def _recall(m: Machine, index: int) -> None:
    try:
        value = m.memo[index]
    except KeyError:
        raise fail("malformed-pickle", f"memo entry {index} is read and was never written") from None
    if m.replaced and (final := m.replaced.get(id(value))) is not None:
        value = final[1]
    m.stack.append(value)


def _extension(unpack: Callable[[Any, int], tuple[Any, ...]], size: int) -> Opcode:
    def op(m: Machine, pos: int) -> int:
        code = unpack(m.data, pos)[0]
        m.report("unsupported-opcode", f"extension code {code} imports through a registry of the process")
        m.suspect("dangerous", f"extension code {code} imports something that this file does not name")
        m.stack.append(Global("copyreg extension", str(code)))
        return pos + size

    return op


# -- the hot ones, written out ---------------------------------------------------------------------------------------


def _binint1(m: Machine, pos: int) -> int:
    m.stack.append(m.data[pos])
    return pos + 1


def _binput(m: Machine, pos: int) -> int:
    m.memo[m.data[pos]] = m.stack[-1]
    return pos + 1


def _memoize(m: Machine, pos: int) -> int:
    m.memo[len(m.memo)] = m.stack[-1]  # the number of entries, not the highest index + 1
    return pos


def _get_text(m: Machine, pos: int) -> int:
    digits, pos = operands.number_line(m, pos)
    _recall(m, int(digits))
    return pos


def _put_text(m: Machine, pos: int) -> int:
    digits, pos = operands.number_line(m, pos)
    index = int(digits)
    if index < 0:
        raise fail("malformed-pickle", f"memo entry {sketch(index)} is negative")
    m.memo[index] = m.stack[-1]
    return pos


# -- stack -----------------------------------------------------------------------------------------------------------


def _mark(m: Machine, pos: int) -> int:
    if len(m.marks) >= m.limits.marks:
        raise fail("limit-exceeded", f"more than {m.limits.marks:,} marks are open")
    m.marks.append(m.stack)
    m.stack = []
    return pos


def _pop(m: Machine, pos: int) -> int:
    if m.stack:
        m.stack.pop()
    else:
        m.unmark()
    return pos


def _pop_mark(m: Machine, pos: int) -> int:
    m.unmark()
    return pos


def _dup(m: Machine, pos: int) -> int:
    m.stack.append(m.stack[-1])
    return pos


def _stop(m: Machine, pos: int) -> int:
    if not m.stack:
        raise fail("malformed-pickle", "the pickle stops without a value")
    raise Stop(pos)


# -- containers ------------------------------------------------------------------------------------------------------


def _tuple(m: Machine, pos: int) -> int:
    items = m.unmark()
    m.stack.append(tuple(items))
    return pos


def _tuple_of(n: int) -> Opcode:
    def op(m: Machine, pos: int) -> int:
        stack = m.stack
        if len(stack) < n:
            raise IndexError
        stack[-n:] = [tuple(stack[-n:])]
        return pos

    return op


def _list(m: Machine, pos: int) -> int:
    items = m.unmark()
    m.stack.append(items)
    return pos


def _dict(m: Machine, pos: int) -> int:
    items = m.unmark()
    target: dict[Any, Any] = {}
    m.stack.append(target)
    m.set_items(target, items)
    return pos


def _frozenset(m: Machine, pos: int) -> int:
    items = m.unmark()
    target: set[Any] = set()
    m.add(target, items)
    m.stack.append(frozenset(target))
    return pos


def _append(m: Machine, pos: int) -> int:
    value = m.stack.pop()
    m.append(m.stack[-1], (value,))
    return pos


def _appends(m: Machine, pos: int) -> int:
    items = m.unmark()
    m.append(m.stack[-1], items)
    return pos


def _setitem(m: Machine, pos: int) -> int:
    value, key = m.stack.pop(), m.stack.pop()
    m.set_items(m.stack[-1], (key, value))
    return pos


def _setitems(m: Machine, pos: int) -> int:
    items = m.unmark()
    m.set_items(m.stack[-1], items)
    return pos


def _additems(m: Machine, pos: int) -> int:
    items = m.unmark()
    m.add(m.stack[-1], items)
    return pos


# -- imports, calls, state -------------------------------------------------------------------------------------------


def _global(m: Machine, pos: int) -> int:
    module, pos = operands.name_line(m, pos)
    name, pos = operands.name_line(m, pos)
    m.stack.append(m.import_(module, name))
    return pos


def _stack_global(m: Machine, pos: int) -> int:
    name, module = m.stack.pop(), m.stack.pop()
    if type(module) is str and type(name) is str:
        m.stack.append(m.import_(module, name))
        return pos
    if isinstance(module, Opaque | Global) or isinstance(name, Opaque | Global):
        m.suspect("dangerous", "the name of a global is computed by a call")
    else:
        m.report("malformed-pickle", f"a global is named by {sketch(module)} and {sketch(name)}")
    m.stack.append(Opaque(UNREADABLE, (module, name)))
    return pos


def _inst(m: Machine, pos: int) -> int:
    module, pos = operands.name_line(m, pos)
    name, pos = operands.name_line(m, pos)
    args = tuple(m.unmark())
    m.stack.append(m.call(m.import_(module, name), args, None, "INST"))
    return pos


def _obj(m: Machine, pos: int) -> int:
    cls, *args = m.unmark() or [None]
    m.stack.append(m.call(cls, tuple(args), None, "OBJ"))
    return pos


def _reduce(m: Machine, pos: int) -> int:
    args, function = m.stack.pop(), m.stack.pop()
    m.stack.append(m.call(function, args, None, "REDUCE"))
    return pos


def _newobj(m: Machine, pos: int) -> int:
    args, cls = m.stack.pop(), m.stack.pop()
    if m.stream is not None and args == () and (behind := m.stamped(cls, pos)) is not None:
        return behind
    m.stack.append(m.call(cls, args, None, "NEWOBJ"))
    return pos


def _newobj_ex(m: Machine, pos: int) -> int:
    kwargs, args, cls = m.stack.pop(), m.stack.pop(), m.stack.pop()
    m.stack.append(m.call(cls, args, kwargs or None, "NEWOBJ_EX"))
    return pos


def _build(m: Machine, pos: int) -> int:
    state, target = m.stack.pop(), m.stack.pop()
    m.stack.append(m.build(target, state))
    return pos


def _persid(m: Machine, pos: int) -> int:
    pid, pos = operands.name_line(m, pos)
    m.stack.append(m.persistent_load(pid))
    return pos


def _binpersid(m: Machine, pos: int) -> int:
    m.stack.append(m.persistent_load(m.stack.pop()))
    return pos


# -- the stream itself -----------------------------------------------------------------------------------------------


def _proto(m: Machine, pos: int) -> int:
    version = m.data[pos]
    if version > HIGHEST_PROTOCOL:
        raise fail("unsupported-version", f"pickle protocol {version}; the highest is {HIGHEST_PROTOCOL}")
    m.protocol = version
    return pos + 1


def _frame(m: Machine, pos: int) -> int:
    n = _UINT8(m.data, pos)[0]
    if n > len(m.data) - pos - 8:
        m.report("malformed-pickle", f"a frame claims {n:,} bytes and fewer remain", "warning")
    return pos + 8


def _next_buffer(m: Machine, pos: int) -> int:
    m.report("unsupported-opcode", "a buffer is kept outside of this pickle")
    m.stack.append(Opaque(UNREADABLE))
    return pos


def _nothing(m: Machine, pos: int) -> int:
    return pos


def _unknown(m: Machine, pos: int) -> int:
    raise fail("malformed-pickle", f"byte 0x{m.data[pos - 1]:02x} is no pickle opcode")


_OPCODES: dict[bytes, Opcode] = {
    b"(": _mark, b".": _stop, b"0": _pop, b"1": _pop_mark, b"2": _dup, b"N": _constant(None),
    b"F": _parsed(operands.real), b"I": _parsed(operands.integer), b"L": _parsed(operands.long_integer),
    b"S": _parsed(operands.quoted), b"V": _parsed(operands.escaped), b"T": _counted(_INT4, 4, operands.python2),
    b"U": _counted(_uint1, 1, operands.python2), b"X": _counted(_UINT4, 4, operands.text),
    b"G": _scalar(_FLOAT8, 8), b"J": _scalar(_INT4, 4), b"K": _binint1, b"M": _scalar(_UINT2, 2),
    b"P": _persid, b"Q": _binpersid, b"R": _reduce, b"b": _build, b"c": _global, b"i": _inst, b"o": _obj,
    b"a": _append, b"e": _appends, b"s": _setitem, b"u": _setitems,
    b"]": _new(list), b"}": _new(dict), b")": _constant(()), b"l": _list, b"d": _dict, b"t": _tuple,
    b"g": _get_text, b"h": _get(_uint1, 1), b"j": _get(_UINT4, 4),
    b"p": _put_text, b"q": _binput, b"r": _put(_UINT4, 4),
    # protocol 2
    b"\x80": _proto, b"\x81": _newobj, b"\x82": _extension(_uint1, 1), b"\x83": _extension(_UINT2, 2),
    b"\x84": _extension(_INT4, 4), b"\x85": _tuple_of(1), b"\x86": _tuple_of(2), b"\x87": _tuple_of(3),
    b"\x88": _constant(True), b"\x89": _constant(False), b"\x8a": _counted(_uint1, 1, operands.little_endian),
    b"\x8b": _counted(_INT4, 4, operands.little_endian),
    # protocol 3
    b"B": _counted(_UINT4, 4, operands.binary), b"C": _counted(_uint1, 1, operands.binary),
    # protocol 4
    b"\x8c": _counted(_uint1, 1, operands.text), b"\x8d": _counted(_UINT8, 8, operands.text),
    b"\x8e": _counted(_UINT8, 8, operands.binary), b"\x8f": _new(set), b"\x90": _additems, b"\x91": _frozenset,
    b"\x92": _newobj_ex, b"\x93": _stack_global, b"\x94": _memoize, b"\x95": _frame,
    # protocol 5; a bytearray is given as bytes
    b"\x96": _counted(_UINT8, 8, operands.binary), b"\x97": _next_buffer, b"\x98": _nothing,
}

TABLE: tuple[Opcode, ...] = tuple(_OPCODES.get(bytes([byte]), _unknown) for byte in range(256))
"""The function of each opcode byte."""

ARGUMENT_BYTES: dict[int, int] = {
    opcode[0]: size
    for size, opcodes in {
        1: (b"K", b"U", b"h", b"q", b"\x80", b"\x82", b"\x8a", b"C", b"\x8c"),
        2: (b"M", b"\x83"),
        4: (b"J", b"T", b"X", b"j", b"r", b"\x84", b"\x8b", b"B"),
        8: (b"G", b"\x8d", b"\x8e", b"\x95", b"\x96"),
    }.items()
    for opcode in opcodes
}
"""Bytes that must follow an opcode before its argument's own length is known."""
