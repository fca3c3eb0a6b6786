"""Which values may be keys of a dict or members of a set, decided before Python hashes them.

Hashing is the one thing that plain containers do with hostile values: a tuple nested a million deep overflows the C
stack, one that holds itself twice at each of forty levels takes 2^40 steps, and integers beyond 64 bits can be chosen
to collide. All of it is bounded here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from anyckpt.core.dtypes import DType
from anyckpt.core.inert import Global, NumpyArray, Opaque, TensorSubclass, Text
from anyckpt.core.tensor import Tensor
from anyckpt.errors import CheckpointError
from anyckpt.finding import fail
from anyckpt.pickle.call import Context
from anyckpt.pickle.storage import Storage

_PLAIN = frozenset((str, bytes, bool, float, complex, type(None)))
_BY_IDENTITY_OR_FIELDS = frozenset((Global, Opaque, NumpyArray, TensorSubclass, Text, Tensor, DType, Storage))
_MAX_INT_BITS = 64


def key_fault(key: Any, context: Context) -> CheckpointError | None:
    """Why `key` can't be a key, None where it can. Parts of nested keys are accounted for as copies are."""
    if type(key) in _PLAIN:
        return None
    todo = [key]
    for _ in range(context.key_nodes):
        if not todo:
            return None
        value = todo.pop()
        kind = type(value)
        if kind is int:
            if value.bit_length() > _MAX_INT_BITS:
                return fail("limit-exceeded", f"a dict key is an integer of {value.bit_length()} bits")
        elif kind is tuple or kind is frozenset:
            context.spend(len(value))
            todo.extend(value)
        elif kind not in _PLAIN and kind not in _BY_IDENTITY_OR_FIELDS:
            return fail("malformed-pickle", f"a {kind.__name__} is used as a key, and no loader can hash one")
    return fail("limit-exceeded", f"a dict key is nested or repeated beyond {context.key_nodes:,} parts")


def add_pairs(target: dict[Any, Any], pairs: Iterable[tuple[Any, Any]], context: Context) -> CheckpointError | None:
    """Set the (key, value) pairs whose key is sound; the fault of the first that is not."""
    fault = None
    for key, value in pairs:
        if type(key) is not str and (problem := key_fault(key, context)) is not None:
            fault = fault or problem
            continue
        target[key] = value
    return fault
