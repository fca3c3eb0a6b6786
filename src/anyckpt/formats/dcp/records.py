"""What `.metadata` is made of, once read: where items lie, and the chunks of a tensor as columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from anyckpt.core.box import Shape
from anyckpt.core.dtypes import DType

if TYPE_CHECKING:
    import numpy as np

    Ints = np.ndarray[Any, np.dtype[np.int64]]

Path = tuple[str | int, ...]
"""Where a name stood in the object that was saved: keys of dicts and indices of lists."""


class Item(NamedTuple):
    """Where one stored thing lies: `length` bytes at `offset` of the file `path`, coded by `transforms` in order."""

    path: str
    offset: int
    length: int
    transforms: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Chunks:
    """The chunks of one tensor: `starts[i]` and `sizes[i]` along each axis; arrays of [n_chunks, n_axes]."""

    dtype: DType
    shape: Shape
    starts: Ints
    sizes: Ints
