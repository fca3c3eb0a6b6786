"""What a saved object looks like after it was read without being built: plain data, and placeholders for the rest.

`None bool int float complex str bytes list tuple dict set frozenset`, `Tensor` and `DType` stand for themselves.
Everything else that a pickle can hold is one of the records below: nothing is ever imported or called.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from anyckpt.core.tensor import Tensor


@dataclass(frozen=True, slots=True)
class Global:
    """A class or function named by a pickle, not resolved: `module` and `name` as the loader would look them up."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(slots=True, eq=False)
class Opaque:
    """An object of a class that is not interpreted: what it would be called with, its state, and what was put in.

    `args` are the constructor's or reduce function's; `state` is what BUILD sets (None where nothing was), `items` what
    APPEND(S)/SETITEM(S) added. Mutable only while the pickle machine builds it.
    """

    cls: Any  # Global, or what stood in its place in a hostile file
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] | None = None
    state: Any = None
    items: list[Any] = field(default_factory=list)

    @property
    def class_name(self) -> str:
        """`module.name` of its class."""
        return str(self.cls)

    def attributes(self) -> dict[str, Any]:
        """The instance attributes that BUILD would set, from a dict state or a (dict, slots) pair."""
        state = self.state
        out: dict[str, Any] = {}
        for part in state if isinstance(state, tuple) and len(state) == 2 else (state,):
            if isinstance(part, dict):
                out.update((k, v) for k, v in part.items() if isinstance(k, str))
        return out

    def __repr__(self) -> str:
        return f"Opaque({self.cls})"


class Mapping(dict[Any, Any]):
    """A dict that was saved as a dict subclass (`OrderedDict`, `defaultdict`, `Counter`) or with attributes.

    `kind` is the class as `module.name`; `args` what its constructor took beside items (defaultdict's factory);
    `attributes` what BUILD set on it (`_metadata` of a Module's state_dict).
    """

    kind: str = "collections.OrderedDict"
    args: tuple[Any, ...] = ()
    attributes: dict[str, Any]

    def __init__(self, *items: Any, kind: str = "collections.OrderedDict") -> None:
        super().__init__(*items)
        self.kind = kind
        self.attributes = {}


@dataclass(frozen=True, slots=True, eq=False)
class NumpyArray:
    """A numpy array or scalar found in a pickle; `is_scalar` for `np.float64(…)` and its kin."""

    tensor: Tensor
    is_scalar: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class TensorSubclass:
    """A tensor with more to it: a subclass, or a tensor with Python attributes.

    `cls` names the class; `base` is the plain tensor where there is one (an ordinary tensor with attributes) and None
    for wrapper subclasses (DTensor, ShardedTensor, torchao), whose data are tensors inside `state`.
    `dtype` and `shape` are those it presents.
    """

    cls: Global
    base: Tensor | None
    state: Any
    dtype: Any = None
    shape: tuple[int, ...] = ()

    def attributes(self) -> dict[str, Any]:
        """Its attributes by name, from a dict state or a (dict, slots) pair."""
        return Opaque(self.cls, state=self.state).attributes()


@dataclass(frozen=True, slots=True)
class Text:
    """Text of a class of its own: a pathlib path (`kind` "pathlib.PosixPath"), a `torch.device` ("torch.device")."""

    text: str
    kind: str


def walk(root: Any, *, max_depth: int = 200) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield (path, value) of everything inside `root`, each shared object once, without recursion.

    Paths are tuples of dict keys, list indices and attribute names. Deeper than `max_depth` is not entered.
    """
    stack: list[tuple[tuple[Any, ...], Any]] = [((), root)]
    seen: set[int] = set()
    while stack:
        path, value = stack.pop()
        yield path, value
        if len(path) >= max_depth:
            continue
        children = _children(value)
        if children:
            if id(value) in seen:
                continue
            seen.add(id(value))
            stack.extend(((*path, key), child) for key, child in reversed(children))


def is_deeper(root: Any, max_depth: int = 200) -> bool:
    """Whether anything lies deeper inside `root` than `walk` goes. Shared objects and cycles are entered once."""
    level: list[Any] = [root]
    seen: set[int] = set()
    for _ in range(max_depth):
        below: list[Any] = []
        for value in level:
            if id(value) not in seen:
                seen.add(id(value))
                inside = value.values() if isinstance(value, dict) else [child for _, child in _children(value)]
                below += [child for child in inside if type(child) not in _LEAVES]
        if not below:
            return False
        level = below
    return True


_LEAVES = frozenset((bool, int, float, complex, str, bytes, type(None), Tensor))  # most of what a checkpoint holds


def _children(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, list | tuple):
        return list(enumerate(value))
    if isinstance(value, Opaque):
        parts = list(value.attributes().items()) if value.attributes() else [("state", value.state)]
        parts += [("args", value.args)] if value.args else []
        return parts + ([("items", value.items)] if value.items else [])
    if isinstance(value, TensorSubclass):
        return list(value.attributes().items())
    return []
