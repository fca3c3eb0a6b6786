"""Handlers for the standard library: containers, numbers, text, paths, dates."""

from __future__ import annotations

from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

from anyckpt.core.inert import Global, Mapping, Opaque, Text
from anyckpt.finding import fail
from anyckpt.pickle.call import Call, Row, record
from anyckpt.pickle.keys import add_pairs, key_fault

_MAX_DIGITS = 4300
_CONTAINERS = (list, tuple, dict, set, frozenset)


def _items(call: Call, value: Any) -> Any:
    """The container that a constructor copies, accounted for."""
    if not isinstance(value, _CONTAINERS):
        raise fail("malformed-pickle", f"{call.function} is made from a {type(value).__name__}")
    call.context.spend(len(value))
    return value


def _pairs(call: Call, value: Any) -> list[tuple[Any, Any]]:
    items = _items(call, value)
    if isinstance(items, dict):
        return list(items.items())
    if not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in items):
        raise fail("malformed-pickle", f"{call.function} is made from items that are not pairs")
    return [(key, value) for key, value in items]


def _fill(call: Call, target: dict[Any, Any], value: Any) -> Any:
    if (fault := add_pairs(target, _pairs(call, value), call.context)) is not None:
        call.context.report(fault.finding.code, fault.finding.message)
    return target


def _dict(call: Call) -> Any:
    call.expect(0, 1)
    return _fill(call, {}, call.args[0]) if call.args else {}


def _mapping(call: Call) -> Any:
    call.expect(0, 1)
    made = Mapping(kind=str(call.function))
    return _fill(call, made, call.args[0]) if call.args else made


def _defaultdict(call: Call) -> Any:
    call.expect(0, 1, 2)
    made = Mapping(kind="collections.defaultdict")
    made.args = call.args[:1]
    if call.args and not (call.args[0] is None or isinstance(call.args[0], Global)):
        call.context.suspect("unknown", "the factory of a defaultdict is not a plain name")
    return _fill(call, made, call.args[1]) if len(call.args) > 1 else made


def _list(call: Call) -> Any:
    call.expect(0, 1)
    return list(_items(call, call.args[0])) if call.args else []


def _tuple(call: Call) -> Any:
    call.expect(0, 1)
    return tuple(_items(call, call.args[0])) if call.args else ()


def _set(call: Call) -> Any:
    call.expect(0, 1)
    made = set()
    for member in _items(call, call.args[0]) if call.args else ():
        if (fault := key_fault(member, call.context)) is not None:
            call.context.report(fault.finding.code, fault.finding.message)
        else:
            made.add(member)
    return frozenset(made) if call.function.name == "frozenset" else made


def _number(call: Call) -> Any:
    call.expect(0, 1)
    value = call.args[0] if call.args else 0
    if not isinstance(value, int | float | str) or (isinstance(value, str) and len(value) > _MAX_DIGITS):
        raise fail("malformed-pickle", f"{call.function} of a {type(value).__name__}")
    if call.function.name == "float":
        return float(value)
    return bool(value) if call.function.name == "bool" else int(value)


def _str(call: Call) -> Any:
    call.expect(0, 1)
    if call.args and not isinstance(call.args[0], str):
        raise fail("malformed-pickle", f"str of a {type(call.args[0]).__name__}")
    return call.args[0] if call.args else ""


def _complex(call: Call) -> Any:
    call.expect(0, 1, 2)
    if not all(isinstance(part, int | float | complex) for part in call.args):
        raise fail("malformed-pickle", "complex of something that is no number")
    return complex(*call.args)


def _bytes(call: Call) -> Any:
    """`bytes` and `bytearray`: empty, from bytes, from small integers, or (protocols 0-2) from latin-1 text."""
    call.expect(0, 1, 2)
    if not call.args:
        return b""
    if len(call.args) == 2:
        return _encode(call)
    value = call.args[0]
    if isinstance(value, bytes):
        return value
    if not isinstance(value, list | tuple) or not all(type(item) is int for item in value):
        raise fail("malformed-pickle", f"{call.function} of a {type(value).__name__}")
    call.context.spend(len(value))
    return bytes(value)


def _encode(call: Call) -> Any:
    """`_codecs.encode(text, "latin1")` is how protocols 0-2 write bytes; other codecs have no place in a checkpoint."""
    call.expect(2)
    text, codec = call.args
    if not isinstance(text, str) or not isinstance(codec, str):
        raise fail("malformed-pickle", f"{call.function} of a {type(text).__name__}")
    if codec.lower().replace("_", "-") not in ("latin1", "latin-1", "iso-8859-1"):
        call.context.suspect("unknown", f"{call.function} is called with the codec {codec[:40]!r}")
        return call.opaque()
    call.context.spend(len(text))
    return text.encode("latin-1")


def _path(call: Call) -> Any:
    if not all(isinstance(part, str) for part in call.args) or call.kwargs:
        raise fail("malformed-pickle", f"{call.function} of parts that are not text")
    call.context.spend(sum(map(len, call.args)))
    pure = PureWindowsPath if "Windows" in call.function.name else PurePosixPath
    return Text(str(pure(*call.args)), f"pathlib.{call.function.name}")


def _reconstructor(call: Call) -> Any:
    """`copyreg._reconstructor(cls, base, state)`, the NEWOBJ of protocols 0 and 1."""
    call.expect(3)
    cls, base, state = call.args
    if not isinstance(cls, Global) or not isinstance(base, Global):
        raise fail("malformed-pickle", f"{call.function} is given something else than two classes")
    if base.module != "builtins":
        call.context.suspect("unknown", f"{call.function} is given the base class {base}")
    return call.context.invoke(cls, () if state is None else (state,), "NEWOBJ")


def _partial(call: Call) -> Any:
    if not call.args or not isinstance(call.args[0], Global):
        call.context.suspect("unknown", "functools.partial of something that is not a plain name")
    return call.opaque()


_GETATTR_PAIRS = {
    # How every rank file with a ShardedTensor names its nested class (torch 1.11 to 2.13).
    ("torch.distributed._shard.sharded_tensor.api.ShardedTensor", "ProcessGroupState"),
    ("torch.distributed._shard.sharded_tensor.ShardedTensor", "ProcessGroupState"),
}


def _getattr(call: Call) -> Any:
    if len(call.args) == 2 and not call.kwargs:
        owner, name = call.args
        if isinstance(owner, Global) and isinstance(name, str) and (str(owner), name) in _GETATTR_PAIRS:
            return Global(owner.module, f"{owner.name}.{name}")
    call.context.suspect("dangerous", "builtins.getattr is called to reach an attribute by name")
    return call.opaque()


def _logger(call: Call) -> Any:
    call.expect(0, 1)
    return call.opaque()


_RECORDS = """
argparse.Namespace types.SimpleNamespace datetime.datetime datetime.date datetime.time datetime.timedelta
datetime.timezone decimal.Decimal fractions.Fraction uuid.UUID uuid.SafeUUID random.Random collections.deque
builtins.object builtins.range builtins.slice builtins.NoneType
"""
_UNCALLED = "builtins.Ellipsis builtins.NotImplemented builtins.len builtins.min builtins.max builtins.sum"


def _type_of(call: Call) -> Any:
    """`type(None)`, `type(...)` are how pickle writes NoneType and its kin."""
    if len(call.args) == 1 and (call.args[0] is None or isinstance(call.args[0], Global | Opaque)):
        return call.opaque()
    call.context.suspect("unknown", "builtins.type is called to make a class")
    return call.opaque()


ROWS: dict[str, Row] = {
    **{name: Row(record) for name in _RECORDS.split()},
    **{name: Row() for name in _UNCALLED.split()},
    "builtins.type": Row(_type_of),
    "builtins.dict": Row(_dict), "builtins.list": Row(_list), "builtins.tuple": Row(_tuple),
    "builtins.set": Row(_set), "builtins.frozenset": Row(_set),
    "builtins.int": Row(_number), "builtins.float": Row(_number), "builtins.bool": Row(_number),
    "builtins.str": Row(_str), "builtins.complex": Row(_complex),
    "builtins.bytes": Row(_bytes), "builtins.bytearray": Row(_bytes),
    "builtins.getattr": Row(_getattr, guarded=True),
    "collections.OrderedDict": Row(_mapping), "collections.Counter": Row(_mapping),
    "collections.defaultdict": Row(_defaultdict),
    "_codecs.encode": Row(_encode),
    "copyreg._reconstructor": Row(_reconstructor),
    "functools.partial": Row(_partial),
    "logging.getLogger": Row(_logger),
    **{
        f"{module}.{name}": Row(_path)
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath", "Path", "PurePath")
    },
}
