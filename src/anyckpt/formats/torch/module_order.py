"""The order in which a model defines its parameters, worked out from shapes where files list tensors by name.

`named_parameters()` walks the tree of modules: a module's own parameters first, then its children one after the other,
each whole. Numbered children come in the order of their numbers, alike ones (the blocks of a stack) have the same order
inside, a weight stands before its bias. An optimizer's numbers follow that walk, so the shapes of its state tell most:

    by name       blocks.0.{down,ln1,ln2,proj,qkv,up}, embed, norm, pos
    by shape      pos[11,16] embed[67,16] ln1[16] qkv[48,16] proj[16,16] ln2[16] up[64,16] down[16,64] norm[16]

Where shapes leave a choice, what people usually write comes first (`USUAL`): an order so found is a likely one only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from anyckpt.core.box import Shape

MAX_STEPS = 200_000  # of the search; a model of another make is given up

# Names of modules and parameters in the order they are usually defined in, as patterns of a name's last part.
USUAL = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"emb|wte|tok|patch|stem|^conv_?1$", r"wpe|pos|type", r"pre|input|(ln|norm)_?1$|^attention_norm",
        r"^(q|query|qkv|in_proj|c_attn|wq)", r"^(k|key|wk)", r"^(v|value|wv)", r"^(o|out|proj|c_proj|wo|dense)",
        r"attn|attention", r"post|(ln|norm)_?2$|^ffn_norm", r"gate|w1$", r"up|fc_?1|c_fc|w3$", r"down|fc_?2|w2$",
        r"mlp|ffn|feed_?forward", r"layers|blocks|^h$|encoder|body", r"decoder", r"final|^(ln|norm)(_?f)?$", r"pool",
        r"head|classifier|^out(put)?$|^fc$",
    )
)  # fmt: skip
UNTOLD = 11  # the place of a name that says nothing: after the parts of a block, before what stands at the end
_DIGITS = re.compile(r"(\d+)")


@dataclass(slots=True)
class _Module:
    """A module: its own parameters as (last part of the name, shape), and its children."""

    own: list[tuple[str, Shape]] = field(default_factory=list)
    children: dict[str, _Module] = field(default_factory=dict)
    form: object = None


_At = tuple[int, ...]  # how many parameters of each group are taken
_Orders = Mapping[object, tuple[str, ...]]  # form of a module -> the order of its children that was settled on


def order_by_shapes(shapes: Mapping[str, Shape], groups: Sequence[Sequence[Shape | None]]) -> list[str] | None:
    """The names of `shapes` in the likeliest order of definition that gives every parameter of `groups` its shape.

    `groups` are the shapes of the optimizer's parameters, group by group; None fits any. Tensors of a shape that no
    group has (buffers) are put last. None where no order fits, or the search takes too long.
    """
    wanted = [shape for group in groups for shape in group]
    asked = set(wanted)
    among = {name: shape for name, shape in shapes.items() if None in asked or shape in asked}
    if len(among) != len(wanted):
        return None
    root = _Module()
    for name, shape in among.items():
        *path, last = name.split(".")
        module = root
        for part in path:
            module = module.children.setdefault(part, _Module())
        module.own.append((last, shape))
    _set_forms(root)
    search = _Search(groups)
    found = next(search.module(root, "", (0,) * len(groups), {}), None)
    if found is None:
        return None
    return [*found[2], *(name for name in shapes if name not in among)]


def _set_forms(module: _Module) -> None:
    for child in module.children.values():
        _set_forms(child)
    inside = tuple(sorted((name, child.form) for name, child in module.children.items()))
    module.form = (tuple(sorted(module.own)), hash(inside))


@dataclass(slots=True)
class _Search:
    groups: Sequence[Sequence[Shape | None]]
    steps: int = 0

    def module(
        self, module: _Module, prefix: str, at: _At, orders: _Orders
    ) -> Iterator[tuple[_At, _Orders, list[str]]]:
        """Every way to take a module's parameters in turn: where that leads, the orders settled on, the names."""
        for after_own, own in self._own(sorted(module.own, key=lambda o: _rank(o[0])), at):
            names = [prefix + name for name in own]
            for after, settled, inside in self._children(module, prefix, after_own, orders):
                yield after, settled, names + inside

    def _own(self, left: list[tuple[str, Shape]], at: _At) -> Iterator[tuple[_At, list[str]]]:
        if not left:
            yield at, []
            return
        for i, (name, shape) in enumerate(left):
            if name.endswith("bias") and any(other == name[:-4] + "weight" for other, _ in left):
                continue  # its weight comes first
            for after in self._taken(shape, at):
                for end, rest in self._own(left[:i] + left[i + 1 :], after):
                    yield end, [name, *rest]

    def _taken(self, shape: Shape, at: _At) -> Iterator[_At]:
        self.steps += 1
        if self.steps > MAX_STEPS:
            return
        for g, group in enumerate(self.groups):
            if at[g] < len(group) and group[at[g]] in (None, shape):
                yield (*at[:g], at[g] + 1, *at[g + 1 :])

    def _children(
        self, module: _Module, prefix: str, at: _At, orders: _Orders
    ) -> Iterator[tuple[_At, _Orders, list[str]]]:
        settled = orders.get(module.form)
        if settled is not None:
            yield from self._in_order(module, prefix, settled, at, orders)
            return
        usual = sorted(module.children, key=_rank)
        for order, after, known, names in self._any_order(module, prefix, usual, at, orders):
            yield after, {**known, module.form: order}, names

    def _in_order(
        self, module: _Module, prefix: str, order: tuple[str, ...], at: _At, orders: _Orders
    ) -> Iterator[tuple[_At, _Orders, list[str]]]:
        if not order:
            yield at, orders, []
            return
        for after, known, names in self.module(module.children[order[0]], f"{prefix}{order[0]}.", at, orders):
            for end, last, rest in self._in_order(module, prefix, order[1:], after, known):
                yield end, last, names + rest

    def _any_order(
        self, module: _Module, prefix: str, left: list[str], at: _At, orders: _Orders
    ) -> Iterator[tuple[tuple[str, ...], _At, _Orders, list[str]]]:
        if not left:
            yield (), at, orders, []
            return
        lowest = min((int(name) for name in left if name.isdecimal()), default=None)
        for name in left:
            if name.isdecimal() and int(name) != lowest:
                continue
            rest = [other for other in left if other != name]
            for after, known, names in self.module(module.children[name], f"{prefix}{name}.", at, orders):
                for order, end, last, more in self._any_order(module, prefix, rest, after, known):
                    yield (name, *order), end, last, names + more


def _rank(name: str) -> tuple[int, list[str], str]:
    """Where a name usually stands among its siblings; equals in the order of the numbers in them."""
    place = next((i for i, pattern in enumerate(USUAL) if pattern.search(name)), UNTOLD)
    natural = [f"{int(part):09d}" if part.isdecimal() else part for part in _DIGITS.split(name)]
    return place, natural, name

