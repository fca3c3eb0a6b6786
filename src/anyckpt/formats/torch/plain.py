"""A saved object made of nothing but plain data and tensors, so that torch.load(weights_only=True) takes it.

Objects of unknown classes become their attributes, whole modules their state dict, what can't be kept goes, and all of
it is listed. What is shared stays shared; the object itself is not changed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from anyckpt.core.inert import Global, Mapping, NumpyArray, Opaque, TensorSubclass, Text
from anyckpt.core.tensor import Tensor
from anyckpt.errors import Refused
from anyckpt.formats.torch.module import is_module, module_entries
from anyckpt.formats.torch.unwrap import text_key
from anyckpt.pickle.storage import Storage
from anyckpt.pickle.weights_only import WEIGHTS_ONLY

MAX_DEPTH = 300
WRITABLE_SUBCLASSES = frozenset(
    ("torch._utils._rebuild_qtensor", "torch._utils._rebuild_sparse_tensor", "torch._utils._rebuild_nested_tensor")
)
"""Subclasses of tensors that torch's restricted reader builds again by itself."""

_ATTRIBUTES_ONLY = frozenset(("argparse.Namespace", "types.SimpleNamespace"))


@dataclass(slots=True)
class Replacements:
    """What was made plain, and what was dropped: each a dict of `place`, `what` and `by`."""

    listed: list[dict[str, str]]
    _done: dict[int, tuple[Any, Any]] = field(default_factory=dict)

    def note(self, place: tuple[str, ...], what: str, by: str) -> None:
        """List one replacement."""
        self.listed.append({"place": ".".join(place), "what": what, "by": by})

    def plain(self, value: Any, place: tuple[str, ...] = ()) -> Any:
        """`value` without anything that a restricted reader refuses. Raises Refused for one nested too deep."""
        if id(value) in self._done:
            return self._done[id(value)][1]
        if len(place) > MAX_DEPTH:
            raise Refused(f"the object is nested more than {MAX_DEPTH} levels deep")
        if isinstance(value, list):
            made: Any = self._keep(value, [])
            made.extend(self.plain(item, (*place, str(i))) for i, item in enumerate(value))
            return made
        if isinstance(value, tuple):
            return self._keep(value, tuple(self.plain(item, (*place, str(i))) for i, item in enumerate(value)))
        if isinstance(value, dict):
            return self._dict(value, place)
        if is_module(value):
            self.note(place, f"a module of class {value.cls}", "its state dict")
            return self._keep(value, self.plain(Mapping(module_entries(value)), place))
        if isinstance(value, Opaque):
            return self._opaque(value, place)
        if isinstance(value, TensorSubclass):
            return self._subclass(value, place)
        return self._leaf(value, place)

    def _keep(self, value: Any, made: Any) -> Any:
        self._done[id(value)] = (value, made)
        return made

    def _dict(self, value: dict[Any, Any], place: tuple[str, ...]) -> Any:
        kind = value.kind if isinstance(value, Mapping) else ""
        if kind in ("collections.OrderedDict", "collections.Counter"):
            made: dict[Any, Any] = self._keep(value, Mapping(kind=kind))
            attributes = value.attributes if isinstance(value, Mapping) else {}
            if isinstance(made, Mapping) and attributes:
                made.attributes = self.plain(dict(attributes), place)
        else:
            made = self._keep(value, {})
            if kind and kind != "builtins.dict":
                self.note(place, f"a {kind}", "a dict")
        for key, item in value.items():
            inner = (*place, text_key(key)[:80])
            if isinstance(item, TensorSubclass) and item.base is None and str(item.cls) not in WRITABLE_SUBCLASSES:
                self.note(inner, f"a tensor of class {item.cls}", "the tensors inside it")
                made.update(
                    (f"{text_key(key)}/{name}", self.plain(part, (*inner, name)))
                    for name, part in item.attributes().items()
                )
            else:
                made[self._key(key)] = self.plain(item, inner)
        return made

    @staticmethod
    def _key(key: Any) -> Any:
        if isinstance(key, Text):
            return key.text
        return str(key) if isinstance(key, Opaque | Global | frozenset) else key

    def _opaque(self, value: Opaque, place: tuple[str, ...]) -> Any:
        if value.class_name == "collections.deque":
            inside = value.args[0] if value.args and isinstance(value.args[0], list | tuple) else ()
            self.note(place, "a collections.deque", "a list")
            return self._keep(value, [self.plain(v, (*place, str(i))) for i, v in enumerate([*inside, *value.items])])
        attributes = value.attributes() | (value.kwargs or {})
        if attributes or value.class_name in _ATTRIBUTES_ONLY:
            self.note(place, f"an object of class {value.class_name}", "a dict of its attributes")
            made: dict[str, Any] = self._keep(value, {})
            made.update((name, self.plain(item, (*place, name))) for name, item in attributes.items())
            return made
        if len(value.args) == 1 and isinstance(value.args[0], str | int | float) and not value.items:
            self.note(place, f"an object of class {value.class_name}", repr(value.args[0])[:80])  # an Enum's value
            return self._keep(value, value.args[0])
        self.note(place, f"an object of class {value.class_name}", "its arguments" if value.args else "None")
        return self._keep(value, self.plain(value.args, place) if value.args else None)

    def _subclass(self, value: TensorSubclass, place: tuple[str, ...]) -> Any:
        if str(value.cls) in WRITABLE_SUBCLASSES:
            return value
        if value.base is not None:
            self.note(place, f"a tensor of class {value.cls} with attributes", "the tensor")
            return value.base
        self.note(place, f"a tensor of class {value.cls}", "the tensors inside it")
        return self._keep(value, {k: self.plain(v, (*place, k)) for k, v in value.attributes().items()})

    def _leaf(self, value: Any, place: tuple[str, ...]) -> Any:
        if isinstance(value, Global) and str(value) not in WEIGHTS_ONLY:
            self.note(place, f"the function or class {value}", "None")
            return None
        if isinstance(value, Storage):
            self.note(place, "a bare storage", "None")
            return None
        if isinstance(value, Text) and value.kind not in ("torch.device", "torch.layout"):
            self.note(place, f"a {value.kind}", "its text")
            return value.text
        if isinstance(value, NumpyArray):
            self.note(place, "a numpy scalar" if value.is_scalar else "a numpy array", "a tensor or number")
        if isinstance(value, Tensor) and value.dtype.kind == "quantized":
            raise Refused(f"{'.'.join(place)} is quantized and its scale is not known")
        return value
