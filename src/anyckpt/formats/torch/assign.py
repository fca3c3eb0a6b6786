"""Which parameter an optimizer's number stands for, where the file does not say.

A torch optimizer numbers its parameters in the order of its groups, and each group holds a subsequence of
`model.named_parameters()`. So every group must fit into the model's order, shape for shape:

    model     embed[67,16]  ln.weight[16]  qkv[48,16]  qkv.bias[48]  scale[]  head[67,16]
    group 0   0: [67,16]                   1: [48,16]                         2: [67,16]       decayed
    group 1                 3: [16]                    4: [48]                                 not decayed

Where several assignments fit, the one that people write is taken: buffers left out, frozen parameters in as few runs as
possible, and parameters of one kind (matrices; biases and norms) changing their group as seldom as possible. Numbers
for which equally likely assignments differ stay without a name: nothing is guessed.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from anyckpt.core.box import Shape
from anyckpt.core.tensor import Tensor

# Last parts of the names of float buffers in torch.nn, transformers, timm and their kin; never parameters.
BUFFER = re.compile(
    r"(^|\.)(running_mean|running_var|num_batches_tracked|inv_freq|original_inv_freq|(cos|sin)_(cached|cache)|"
    r"freqs_cis|rope_(cos|sin)|masked_bias|attn_mask|causal_mask|relative_position_(index|bias_table_index)|"
    r"_extra_state|mean|std|pixel_mean|pixel_std|min_val|max_val|activation_post_process\..*)$"
)
_SURE_BUFFER = re.compile(r"(^|\.)(running_(mean|var)|num_batches_tracked|(original_)?inv_freq|_extra_state)$")
_VECTOR = re.compile(r"(^|\.)bias$|norm|(^|[._])ln(_?\w)?[._]|(^|\.)bn\d*\.", re.IGNORECASE)

SKIP_RUN = 2  # a run of frozen parameters begins
USE_BUFFER = 6  # what looks like a buffer is taken for a parameter
CHANGE_GROUP = 1  # two neighbours of one kind are in different groups
NARROW = 16  # states of the first search, which finds what an assignment may cost at most
MAX_EDGES = 300_000  # of the second one, which finds all assignments of that cost


@dataclass(frozen=True, slots=True)
class Candidate:
    """A weight that may be one of the optimizer's parameters."""

    name: str
    shape: Shape
    is_vector: bool
    is_buffer: bool


@dataclass(frozen=True, slots=True)
class Assignment:
    """`names[group][i]` is the name of the group's i-th parameter, None where nothing decides it.

    `fits` is False where no order-preserving assignment that agrees with the shapes was found.
    """

    names: tuple[tuple[str | None, ...], ...]
    fits: bool


def candidates(weights: Mapping[str, Tensor], aliases: Mapping[str, str]) -> list[Candidate]:
    """The weights that can be parameters, in order: of a floating type, tied ones once, running statistics left out."""
    return [
        Candidate(name, t.shape, t.ndim < 2 or bool(_VECTOR.search(name)), bool(BUFFER.search(name)))
        for name, t in weights.items()
        if t.dtype.kind in ("float", "complex") and name not in aliases and not _SURE_BUFFER.search(name)
    ]


def assign(groups: Sequence[Sequence[Shape | None]], among: Sequence[Candidate]) -> Assignment:
    """Name the parameters of `groups`, given by their shapes (None where the optimizer holds nothing of that shape)."""
    nothing = tuple((None,) * len(group) for group in groups)
    shapes = [shape for group in groups for shape in group]
    if len(groups) > 1 and 2 * shapes.count(None) > len(shapes):
        return Assignment(nothing, fits=True)  # of most there is nothing to compare, and the groups may interleave
    bound = _search(groups, among, None, NARROW) or _search(groups, among, None, 16 * NARROW)
    if bound is None:
        return Assignment(nothing, fits=False)
    found = _search(groups, among, bound.cost, max(NARROW, MAX_EDGES // max(1, len(among))))
    if found is None or not found.complete:
        return Assignment(nothing, fits=True)
    return Assignment(
        tuple(
            tuple(
                next(iter(names)) if len(names) == 1 and (shape is not None or len(groups) == 1) else None
                for shape, names in zip(group, possible, strict=True)
            )
            for group, possible in zip(groups, _possible(groups, among, found), strict=True)
        ),
        fits=True,
    )


_State = tuple[tuple[int, ...], tuple[int, int], bool]  # next of each group; last group of each kind; in a skipped run
_Edge = tuple[_State, _State, int, int]  # from, to, the group that takes the candidate (-1: none), the cost


@dataclass(frozen=True, slots=True)
class _Found:
    """The cheapest cost; for each candidate the edges looked at; `complete`: no state was dropped for want of room."""

    cost: int
    layers: list[list[_Edge]]
    complete: bool


def _search(
    groups: Sequence[Sequence[Shape | None]], among: Sequence[Candidate], bound: int | None, width: int
) -> _Found | None:
    """Walk the candidates, each skipped or taken by a group; None where no walk gives every parameter a name.

    States that cost more than `bound` are dropped, and the dearest beyond `width`. Edges are kept where `bound` is
    given.
    """
    n_wanted = sum(map(len, groups))
    spare = _Spare(groups, among)
    live: dict[_State, int] = {((0,) * len(groups), (-1, -1), False): 0}
    layers: list[list[_Edge]] = []
    complete = True
    for i, candidate in enumerate(among):
        n_left = len(among) - i - 1
        following: dict[_State, int] = {}
        edges: list[_Edge] = []
        for state, so_far in live.items():
            may_skip = n_wanted - sum(state[0]) <= n_left and spare.has(candidate.shape, i, state[0])
            for after, group, cost in _choices(state, candidate, groups, may_skip):
                total = so_far + cost
                if bound is not None:
                    if total > bound:
                        continue
                    edges.append((state, after, group, cost))
                if total < following.get(after, total + 1):
                    following[after] = total
        if len(following) > width:
            complete = False
            following = dict(sorted(following.items(), key=lambda item: item[1])[:width])
        live = following
        if bound is not None:
            layers.append(edges)
    costs = [cost for (at, _, _), cost in live.items() if sum(at) == n_wanted]
    return _Found(min(costs), layers, complete) if costs else None


class _Spare:
    """How many candidates of each shape can be left out at most: the reason to give up a walk early."""

    def __init__(self, groups: Sequence[Sequence[Shape | None]], among: Sequence[Candidate]) -> None:
        self.available: dict[Shape, list[int]] = {}
        for i, candidate in enumerate(among):
            self.available.setdefault(candidate.shape, []).append(i)
        self.wanted: dict[Shape, list[list[int]]] = {shape: [[] for _ in groups] for shape in self.available}
        for g, group in enumerate(groups):
            for i, shape in enumerate(group):
                if shape in self.wanted:
                    self.wanted[shape][g].append(i)

    def has(self, shape: Shape, i: int, at: tuple[int, ...]) -> bool:
        """Whether candidate i, of this shape, may be left out after what was taken up to `at`."""
        places, wanted = self.available[shape], self.wanted[shape]
        taken = sum(bisect_left(own, n) for own, n in zip(wanted, at, strict=True))
        return bisect_left(places, i) - taken < len(places) - sum(map(len, wanted))


def _choices(
    state: _State, candidate: Candidate, groups: Sequence[Sequence[Shape | None]], may_skip: bool
) -> Iterator[tuple[_State, int, int]]:
    """What may be done with a candidate: the state after, the group that takes it (-1: none), the cost."""
    at, last, skipping = state
    if may_skip:
        cost = 0 if candidate.is_buffer or skipping else SKIP_RUN
        yield (at, last, skipping or not candidate.is_buffer), -1, cost
    kind = int(candidate.is_vector)
    for g, group in enumerate(groups):
        if at[g] < len(group) and (group[at[g]] is None or group[at[g]] == candidate.shape):
            cost = USE_BUFFER if candidate.is_buffer else 0
            cost += CHANGE_GROUP if last[kind] not in (-1, g) else 0
            now = (last[0], g) if kind else (g, last[1])
            yield ((*at[:g], at[g] + 1, *at[g + 1 :]), now, False), g, cost


def _possible(
    groups: Sequence[Sequence[Shape | None]], among: Sequence[Candidate], found: _Found
) -> list[list[set[str]]]:
    """The names that each parameter has in any of the cheapest assignments: the walk back from its end."""
    names: list[list[set[str]]] = [[set() for _ in group] for group in groups]
    n_wanted = sum(map(len, groups))
    # State -> the cost that may have been spent on the way to it if the walk is to end as cheaply as can be.
    allowed: dict[_State, int] = {}
    for _, after, _, _ in found.layers[-1] if found.layers else ():
        if sum(after[0]) == n_wanted:
            allowed[after] = found.cost
    forward = _costs_from_start(groups, found)
    for layer, costs, candidate in zip(reversed(found.layers), reversed(forward), reversed(among), strict=True):
        before: dict[_State, int] = {}
        for state, after, group, cost in layer:
            if after not in allowed or costs[state] + cost > allowed[after]:
                continue
            before[state] = max(before.get(state, 0), allowed[after] - cost)
            if group >= 0:
                names[group][state[0][group]].add(candidate.name)
        allowed = before
    return names


def _costs_from_start(groups: Sequence[Sequence[Shape | None]], found: _Found) -> list[dict[_State, int]]:
    """For each candidate, the least cost of reaching each state before it."""
    costs: dict[_State, int] = {((0,) * len(groups), (-1, -1), False): 0}
    out = []
    for layer in found.layers:
        out.append(costs)
        following: dict[_State, int] = {}
        for state, after, _, cost in layer:
            total = costs[state] + cost
            if total < following.get(after, total + 1):
                following[after] = total
        costs = following
    return out
