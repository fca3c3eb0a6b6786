"""A torch optimizer's state dict, made into slots by parameter name.

    {"state": {id: {"step": …, "exp_avg": …}}, "param_groups": [{"lr": …, "params": [ids], "param_names": [names]}]}

Ids run through the groups, not through the model (torch/optim/optimizer.py). Names come, best first, from `param_names`
(torch >= 2.6, when built from named_parameters), from keys that are names already (FSDP, DCP, Fabric), and else from
the order of the model's parameters, shapes compared (`assign`); what is inferred is reported as inferred.
torch before 1.6 had `id(parameter)` for ids: the order of `params` decides there too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from anyckpt.core.box import Shape
from anyckpt.core.checkpoint import NOTHING, Optimizer
from anyckpt.core.inert import NumpyArray, TensorSubclass
from anyckpt.core.tensor import Tensor, from_array
from anyckpt.finding import Report
from anyckpt.formats.torch.assign import assign, candidates

SlotKind = Literal["like-weight", "scalar", "factored", "opaque"]


@dataclass(frozen=True, slots=True)
class Family:
    """How to recognise an optimizer: slots it always has, and what its groups carry (a value of None: any)."""

    kind: str
    slots: frozenset[str]
    options: Mapping[str, Any]


def _family(kind: str, slots: str, **options: Any) -> Family:
    return Family(kind, frozenset(slots.split()), options)


FAMILIES: tuple[Family, ...] = (
    # Sources: torch/optim/*.py (2.13), transformers/optimization.py, bitsandbytes/optim/optimizer.py. First match wins.
    _family("NAdam", "exp_avg exp_avg_sq mu_product"),
    _family("Adam8bit", "state1 state2"),
    _family("Lion8bit", "state1"),
    _family("LAMB", "exp_avg exp_avg_sq", max_grad_norm=None),
    _family("RAdam", "exp_avg exp_avg_sq", decoupled_weight_decay=None, amsgrad=...),
    _family("AdamW", "exp_avg exp_avg_sq", decoupled_weight_decay=True),
    _family("Adam", "exp_avg exp_avg_sq", decoupled_weight_decay=False),
    _family("Adam or AdamW", "exp_avg exp_avg_sq", amsgrad=None),
    _family("SparseAdam", "exp_avg exp_avg_sq", maximize=None, weight_decay=...),
    _family("FusedAdam", "exp_avg exp_avg_sq", bias_correction=None),
    _family("Adam or AdamW", "exp_avg exp_avg_sq"),
    _family("Adamax", "exp_avg exp_inf"),
    _family("Adadelta", "square_avg acc_delta"),
    _family("RMSprop", "square_avg"),
    _family("Rprop", "prev step_size"),
    _family("ASGD", "eta mu ax"),
    _family("Adagrad", "sum"),
    _family("Adafactor", "row_var col_var"),
    _family("Adafactor", "variance"),
    _family("Adafactor", "exp_avg_sq_row exp_avg_sq_col"),
    _family("LBFGS", "func_evals n_iter"),
    _family("Muon", "momentum_buffer", ns_steps=None),
    _family("SGD", "momentum_buffer"),
    _family("Lion", "exp_avg"),
    _family("SGD", "", dampening=None, nesterov=None),
)
"""Optimizers by their marks; an option that is `...` must be absent from the groups."""

SLOTS: dict[str, SlotKind] = {
    **dict.fromkeys(
        "exp_avg exp_avg_sq max_exp_avg_sq momentum_buffer square_avg grad_avg acc_delta sum exp_inf prev step_size "
        "ax variance master exp_avg_diff neg_pre_grad".split(),
        "like-weight",
    ),
    **dict.fromkeys("step mu_product eta mu func_evals n_iter RMS t H_diag prev_loss".split(), "scalar"),
    **dict.fromkeys("row_var col_var exp_avg_sq_row exp_avg_sq_col".split(), "factored"),
    **dict.fromkeys(
        "state1 state2 absmax1 absmax2 qmap1 qmap2 new_max1 new_max2 max1 max2 d al ro "
        "prev_flat_grad".split(),
        "opaque",
    ),
}
"""What a slot's tensor is to its parameter: of its shape and order, one number, a factor of its shape, or coded."""

_FACTORS = (("row_var", "col_var", 1), ("exp_avg_sq_row", "exp_avg_sq_col", 0))  # the last: axes kept as length 1


def is_optimizer(value: Any) -> bool:
    """Whether a saved value is an optimizer's state dict, by its structure."""
    return (
        isinstance(value, dict)
        and isinstance(value.get("param_groups"), list | tuple)
        and isinstance(value.get("state"), dict)
        and all(isinstance(group, dict) for group in value["param_groups"])
    )


def optimizers_in(value: Any) -> list[dict[Any, Any]]:
    """The optimizer state dicts that a value is or holds directly (a list, or a dict of several)."""
    if is_optimizer(value):
        return [value]
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [child for child in children if is_optimizer(child)]


def read_optimizer(
    saved: Iterable[dict[Any, Any]],
    weights: Mapping[str, Tensor],
    report: Report,
    *,
    aliases: Mapping[str, str] = NOTHING,
    where: str = "",
) -> Optimizer:
    """Make one optimizer of the state dicts of one or several, named by the parameters in `weights`.

    `weights` must be in the model's order; without weights, numbers stay numbers. What has no name, and values that are
    no numbers or tensors, are kept in `unmatched`.
    """
    parameters: list[_Parameter] = []
    groups: list[dict[Any, Any]] = []
    strays: dict[str, Any] = {}
    for i, one in enumerate(saved):
        state = {_key(key): value for key, value in one["state"].items()}
        for group in one["param_groups"]:
            named = group.get("param_names")
            keys = [_key(key) for key in _list(group.get("params"))]
            names = _list(named) if isinstance(named, list | tuple) and len(named) == len(keys) else [None] * len(keys)
            for key, name in zip(keys, names, strict=True):
                known = name if isinstance(name, str) else None if isinstance(key, int) else str(key)
                parameters.append(_Parameter(len(groups), str(key), known, _dict(state.pop(key, {}))))
            groups.append(group)
        strays.update({(f"{i}:" if i else "") + str(key): value for key, value in state.items()})
    inferred = _name(parameters, weights, aliases, len(groups), report, where)
    unmatched: dict[str, Any] = dict(strays)
    if strays:
        message = f"the optimizer holds state of {len(strays)} parameters that no group lists"
        report.add("ambiguous", message, where=where)
    slots: dict[str, dict[str, Tensor]] = {}
    for parameter in parameters:
        shown = parameter.name if parameter.name is not None else parameter.key
        lost: dict[str, Any] = {} if parameter.name is not None or not weights else dict(parameter.state)
        if not lost:
            for slot, tensor in _tensors(parameter.state, lost):
                slots.setdefault(slot, {})[shown] = tensor
        if lost:
            unmatched[shown] = lost
    return Optimizer(
        slots=slots,
        groups=tuple(_group(group, i, parameters) for i, group in enumerate(groups)),
        kind=kind_of(slots, groups),
        names_inferred=inferred,
        unmatched=unmatched,
    )


def shapes_by_group(saved: Iterable[dict[Any, Any]]) -> list[list[Shape | None]] | None:
    """For each group of state dicts that number their parameters, the parameters' shapes as their state tells them
    (None: it tells nothing). None where any parameter has a name."""
    shapes: list[list[Shape | None]] = []
    for one in saved:
        state = {_key(key): value for key, value in one["state"].items()}
        for group in one["param_groups"]:
            keys = [_key(key) for key in _list(group.get("params"))]
            if "param_names" in group or not all(isinstance(key, int) for key in keys):
                return None
            shapes.append([_Parameter(0, str(key), None, _dict(state.get(key, {}))).shape() for key in keys])
    return shapes


def last_step(optimizer: Optimizer) -> int | None:
    """The number of steps taken, from the first few per-parameter counts; None where none is stored."""
    steps = [t for t in optimizer.slots.get("step", {}).values() if t.size == 1 and t.is_stored][:4]
    values = [float(t.numpy().reshape(-1)[0]) for t in steps]
    return max((int(v) for v in values if v == v and 0 <= v < 1e15), default=None)


@dataclass(slots=True)
class _Parameter:
    """One entry of a group: which group, its key in the file, its name once known, its state."""

    group: int
    key: str
    name: str | None
    state: dict[Any, Any]

    def shape(self) -> Shape | None:
        """The parameter's shape as far as the state tells."""
        tensors = {slot: _plain(value) for slot, value in self.state.items()}
        for row, column, n_kept in _FACTORS:
            rows, columns = tensors.get(row), tensors.get(column)
            if rows is not None and columns is not None and columns.ndim:
                return (*rows.shape[: rows.ndim - n_kept], columns.shape[-1])
        like = [t for slot, t in tensors.items() if t is not None and SLOTS.get(slot, "like-weight") == "like-weight"]
        if not like:
            like = [t for slot, t in tensors.items() if t is not None and slot in ("state1", "state2")]
        # A slot of an optimizer that is not in the table may be a number; one with axes is taken first.
        return max(like, key=lambda t: t.ndim).shape if like else None


def _name(
    parameters: list[_Parameter],
    weights: Mapping[str, Tensor],
    aliases: Mapping[str, str],
    n_groups: int,
    report: Report,
    where: str,
) -> bool:
    """Give names to the parameters that have none; returns whether any was inferred."""
    nameless = [p for p in parameters if p.name is None]
    if not nameless or not weights:
        return False
    taken = {p.name for p in parameters}
    by_group: list[list[_Parameter]] = [[p for p in nameless if p.group == g] for g in range(n_groups)]
    among = [c for c in candidates(weights, aliases) if c.name not in taken]
    found = assign([[p.shape() for p in group] for group in by_group], among)
    for group, names in zip(by_group, found.names, strict=True):
        for parameter, name in zip(group, names, strict=True):
            parameter.name = name
    lost = sum(p.name is None and bool(p.state) for p in nameless)
    if not found.fits:
        report.add(
            "ambiguous",
            f"the optimizer numbers {len(nameless)} parameters, and in no order do their shapes fit the weights",
            where=where,
            hint="its state is kept by number; it can't be carried to another format",
        )
    elif lost:
        report.add(
            "ambiguous",
            f"the optimizer gives numbers, not names, and {lost} of {len(nameless)} could be several of the weights",
            where=where,
            hint="their state is kept by number; build the optimizer from model.named_parameters() to have names",
        )
    named = len(nameless) - sum(p.name is None for p in nameless)
    if named:
        report.add(
            "inferred",
            f"the optimizer gives numbers, not names: {named} were matched with the weights by order and shape",
            where=where,
        )
    return named > 0


def _tensors(state: Mapping[Any, Any], lost: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of one parameter's state by slot; numbers become 0-dim tensors, what is neither goes to `lost`."""
    for slot, value in state.items():
        slot = str(slot)
        plain = _plain(value)
        if plain is not None:
            yield slot, plain
        elif isinstance(value, TensorSubclass):
            inner = {k: t for k, v in value.attributes().items() if (t := _plain(v)) is not None}
            yield from ((f"{slot}/{attribute}", t) for attribute, t in inner.items())
            if not inner:
                lost[slot] = value
        elif isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**63:
            yield slot, _number(value)
        elif value is not None:
            lost[slot] = value


def _plain(value: Any) -> Tensor | None:
    if isinstance(value, TensorSubclass):
        return value.base
    if isinstance(value, NumpyArray):
        return value.tensor
    return value if isinstance(value, Tensor) else None


def _number(value: int | float) -> Tensor:
    import numpy as np

    return from_array(np.array(value, np.int64 if isinstance(value, int) else np.float64))


def _group(group: dict[Any, Any], index: int, parameters: list[_Parameter]) -> dict[str, Any]:
    """A group's options, with its parameters' names, or numbers where there is no name."""
    options = {str(k): v for k, v in group.items() if k not in ("params", "param_names")}
    options["params"] = [p.name if p.name is not None else p.key for p in parameters if p.group == index]
    return options


def kind_of(slots: Mapping[str, Any], groups: Sequence[Mapping[Any, Any]]) -> str:
    """The name of the optimizer that keeps such slots and options, "" for none that is known."""
    options = groups[0] if groups else {}

    def fits(family: Family) -> bool:
        if not family.slots <= set(slots) or (not family.slots and slots):
            return False
        for name, value in family.options.items():
            if (name in options) == (value is ...) or (value not in (None, ...) and options.get(name) != value):
                return False
        return True

    return next((f.kind for f in FAMILIES if fits(f)), "")


def _key(key: Any) -> int | str:
    """An id as a number, a name as text: DCP and some trainers turn numbers into strings."""
    if isinstance(key, int):
        return int(key)
    text = key.decode("utf-8", "replace") if isinstance(key, bytes) else str(key)
    return int(text) if text.isdecimal() and len(text) < 25 else text


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else []


def _dict(value: Any) -> dict[Any, Any]:
    return value if isinstance(value, dict) else {"": value}
