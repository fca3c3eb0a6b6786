"""Write plain data and tensors as a pickle of protocol 2 that `torch.load(weights_only=True)` accepts.

Only the opcodes that torch's restricted reader knows are used. What is shared stays shared, cycles through lists and
dicts included; equal input gives equal bytes. What a saved object turns into:

    Tensor                            _rebuild_tensor_v2, or _v3 over bytes where the type has no storage class
    TensorSubclass                    quantized, sparse and nested tensors; plain tensors with attributes
    NumpyArray                        a torch tensor; a numpy scalar becomes a Python number
    OrderedDict, Counter (Mapping)    themselves, with their attributes; other Mappings become plain dicts
    frozenset                         a set
    pathlib paths (Text)              str; devices and layouts stay what they are
    Namespace (Opaque)                a dict of its attributes; a deque becomes a list
    Storage                           refused, like every other class: see `on_opaque`
"""

from __future__ import annotations

from collections.abc import Callable
from struct import pack
from typing import Any, NamedTuple

from anyckpt.core.dtypes import DType
from anyckpt.core.inert import Global
from anyckpt.core.tensor import Tensor
from anyckpt.errors import Refused
from anyckpt.pickle import reduce

_BATCH = 1000  # items between MARK and SETITEMS or APPENDS, as CPython writes them


class StorageRef(NamedTuple):
    """Where the elements of a tensor will be: the record `key` of `n_bytes`; offset and strides in elements."""

    key: str
    n_bytes: int
    offset: int
    stride: tuple[int, ...]
    location: str = "cpu"


def emit(
    value: Any,
    *,
    storage: Callable[[Tensor], StorageRef],
    on_opaque: Callable[[Any], Any] | None = None,
) -> bytes:
    """Serialise `value`; `storage` says where the bytes of each tensor are.

    `on_opaque` is asked for a stand-in (a short string) for an object that has no form torch accepts. Without it such
    an object is refused. Raises Refused.
    """
    writer = _Writer(storage, on_opaque)
    writer.run(value)
    return b"".join(writer.out)


class _Writer:
    """An explicit stack of things still to write, so that nesting is bounded by memory alone."""

    def __init__(
        self, storage: Callable[[Tensor], StorageRef], on_opaque: Callable[[Any], Any] | None
    ) -> None:
        self.storage = storage
        self.on_opaque = on_opaque
        self.out: list[bytes] = [b"\x80\x02"]
        self.todo: list[tuple[Callable[..., None], Any]] = []
        # Text and names by value, everything else by identity; values are kept alive with their index.
        self.texts: dict[Any, int] = {}
        self.objects: dict[int, tuple[Any, int]] = {}
        self.n_memo = 0
        self.lowered: dict[int, tuple[Any, Any]] = {}
        self.open_calls: set[int] = set()

    def run(self, value: Any) -> None:
        """Write `value` and STOP."""
        self.todo.append((self.value, value))
        while self.todo:
            step, argument = self.todo.pop()
            step(argument)
        self.out.append(b".")

    def later(self, *values: Any, then: bytes = b"") -> None:
        """Write `values` in order, then an opcode."""
        if then:
            self.todo.append((self.out.append, then))
        self.todo.extend((self.value, value) for value in reversed(values))

    # -- memo --------------------------------------------------------------------------------------------------------

    def index(self) -> int:
        """Write a PUT of the next memo entry."""
        n = self.n_memo
        self.out.append(b"q" + bytes([n]) if n < 256 else b"r" + pack("<I", n))
        self.n_memo = n + 1
        return n

    def put(self, value: Any) -> None:
        """Remember what was just written as `value`."""
        self.objects[id(value)] = (value, self.index())

    def get(self, n: int) -> None:
        """Write a GET."""
        self.out.append(b"h" + bytes([n]) if n < 256 else b"j" + pack("<I", n))

    def known(self, value: Any) -> bool:
        """Write a GET if `value` was written before."""
        if (found := self.objects.get(id(value))) is None:
            return False
        self.get(found[1])
        return True

    # -- values ------------------------------------------------------------------------------------------------------

    def value(self, value: Any) -> None:
        """Write one value; containers leave the rest on the stack of things to do."""
        plain = _PLAIN.get(type(value))
        if plain is not None:
            plain(self, value)
        elif type(value) in (list, dict, tuple) or isinstance(value, reduce.Call):
            if not self.known(value):
                _CONTAINERS[type(value)](self, value)
        else:
            if (found := self.lowered.get(id(value))) is None:
                found = self.lowered[id(value)] = (value, reduce.lowered(value, self.storage, self.on_opaque))
            self.later(found[1])

    def text(self, value: str) -> None:
        """Text is written once for each spelling."""
        if (n := self.texts.get(value)) is not None:
            self.get(n)
            return
        raw = value.encode("utf-8", "surrogatepass")
        if len(raw) > 0xFFFFFFFF:
            raise Refused(f"a text of {len(raw):,} bytes does not fit protocol 2")
        self.out.append(b"X" + pack("<I", len(raw)) + raw)
        self.texts[value] = self.index()

    def global_(self, value: Global) -> None:
        """Name a class or function."""
        if (n := self.texts.get(value)) is not None:
            self.get(n)
            return
        self.out.append(f"c{value.module}\n{value.name}\n".encode())
        self.texts[value] = self.index()

    def number(self, value: int) -> None:
        """An integer in the shortest opcode."""
        if 0 <= value < 0x100:
            self.out.append(b"K" + bytes([value]))
        elif 0 <= value < 0x10000:
            self.out.append(b"M" + pack("<H", value))
        elif -0x80000000 <= value < 0x80000000:
            self.out.append(b"J" + pack("<i", value))
        else:
            raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            if len(raw) > 255:
                raise Refused(f"an integer of {value.bit_length()} bits is beyond what torch's reader accepts")
            self.out.append(b"\x8a" + bytes([len(raw)]) + raw)

    def list_(self, value: list[Any]) -> None:
        self.out.append(b"]")
        self.put(value)
        self.batches(value, b"a", b"e")

    def dict_(self, value: dict[Any, Any]) -> None:
        self.out.append(b"}")
        self.put(value)
        self.pairs(value)

    def pairs(self, value: dict[Any, Any]) -> None:
        """Set the items of the dict on top of the stack."""
        parts: list[Any] = []
        for key, item in value.items():
            parts += reduce.checked_key(key, self.on_opaque), item
        self.batches(parts, b"s", b"u", width=2)

    def batches(self, parts: list[Any], one: bytes, many: bytes, width: int = 1) -> None:
        """Write parts in batches: `one` is the opcode for a lone item, `many` for those since a MARK."""
        size = _BATCH * width
        for start in reversed(range(0, len(parts), size)):
            batch = parts[start : start + size]
            lone = len(batch) == width
            self.later(*batch, then=one if lone else many)
            if not lone:
                self.todo.append((self.out.append, b"("))

    def tuple_(self, value: tuple[Any, ...]) -> None:
        if not value:
            self.out.append(b")")
            return
        self.todo.append((self.end_of_tuple, value))
        self.later(*value)
        if len(value) > 3:
            self.out.append(b"(")

    def end_of_tuple(self, value: tuple[Any, ...]) -> None:
        """Close a tuple. One that a cycle through a list in it has written meanwhile would need POP to be dropped."""
        if id(value) in self.objects:
            raise Refused("a tuple that holds itself through a list can't be written: torch's reader has no POP")
        self.out.append(bytes([0x84 + len(value)]) if len(value) <= 3 else b"t")
        self.put(value)

    def call(self, value: reduce.Call) -> None:
        """A call, what it makes remembered, then its items and state. Raises Refused for one that needs itself."""
        if id(value) in self.open_calls:
            raise Refused("an object that is part of its own arguments can't be written")
        self.open_calls.add(id(value))
        tail: list[tuple[Callable[..., None], Any]] = [(self.put, value)]
        if value.items:
            tail.append((self.pairs, value.items))
        if value.state is not None:
            tail += [(self.value, value.state), (self.out.append, b"b")]
        self.todo.extend(reversed(tail))
        if value.function is None:
            self.later(*value.args, then=b"Q")
        else:
            self.later(value.function, value.args, then=b"\x81" if value.new else b"R")


def _fixed(opcode: bytes) -> Callable[[_Writer, Any], None]:
    return lambda writer, _: writer.out.append(opcode)


_PLAIN: dict[type, Callable[[_Writer, Any], None]] = {
    type(None): _fixed(b"N"),
    bool: lambda writer, value: writer.out.append(b"\x88" if value else b"\x89"),
    int: _Writer.number,
    float: lambda writer, value: writer.out.append(b"G" + pack(">d", value)),
    str: _Writer.text,
    Global: lambda writer, value: writer.value(reduce.named(value, writer.on_opaque)),
    reduce.Name: lambda writer, value: writer.global_(Global(value.module, value.name)),
    DType: lambda writer, value: writer.value(reduce.dtype_name(value)),
}
_CONTAINERS: dict[type, Callable[[_Writer, Any], None]] = {
    list: _Writer.list_, dict: _Writer.dict_, tuple: _Writer.tuple_, reduce.Call: _Writer.call,
}
