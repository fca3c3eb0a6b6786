"""Pipeline parallelism: which layers of the whole model a chunk holds. Pure.

A stage p holds one chunk, or with virtual pipelining V of them; the model runs through the chunks v-major:

    PP 2, VPP 2, 8 layers     stage 0: [0 1] [4 5]     stage 1: [2 3] [6 7]        chunk c = v · PP + p

Splits may be uneven (a first or last stage with fewer layers, a layout given by hand), so a reader counts the layers it
finds and adds them up in the order of chunks. Experts are split evenly: expert j of rank e is global e · (E/EP) + j.
"""

from __future__ import annotations

from collections.abc import Mapping

from anyckpt.errors import UsageError

Chunk = tuple[int, int]
"""(stage, virtual chunk in it)."""


def chunk_order(pp: int, vpp: int = 1) -> list[Chunk]:
    """The chunks in the order that the model runs through them."""
    return [(p, v) for v in range(vpp) for p in range(pp)]


def first_layers(counts: Mapping[Chunk, int], pp: int, vpp: int = 1) -> dict[Chunk, int]:
    """The whole model's number of each chunk's first layer, from how many layers each chunk has (absent: none).

    >>> first_layers({(0, 0): 2, (1, 0): 1, (0, 1): 1, (1, 1): 1}, 2, 2)
    {(0, 0): 0, (1, 0): 2, (0, 1): 3, (1, 1): 4}
    """
    first: dict[Chunk, int] = {}
    n = 0
    for chunk in chunk_order(pp, vpp):
        first[chunk] = n
        n += counts.get(chunk, 0)
    return first


def layer_counts(n_layers: int, pp: int, vpp: int = 1) -> dict[Chunk, int]:
    """An even split. Raises UsageError, naming what would divide, where there is none."""
    n_chunks = pp * vpp
    if n_layers % n_chunks:
        fitting = [n for n in range(1, n_layers + 1) if n_layers % n == 0]
        raise UsageError(
            f"{n_layers} layers can't be split evenly over {n_chunks} pipeline chunks",
            hint=f"PP × VPP may be {', '.join(map(str, fitting))}",
        )
    return dict.fromkeys(chunk_order(pp, vpp), n_layers // n_chunks)


def local_experts(n_experts: int, ep: int) -> int:
    """Experts of each rank. Raises UsageError where they don't divide."""
    if n_experts % ep:
        fitting = [n for n in range(1, n_experts + 1) if n_experts % n == 0]
        raise UsageError(
            f"{n_experts} experts can't be split over {ep} ranks", hint=f"EP may be {', '.join(map(str, fitting))}"
        )
    return n_experts // ep
