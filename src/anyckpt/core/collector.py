"""Python's garbage collector, held off while very many small records are made."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused() -> Iterator[None]:
    """Do not look for cycles meanwhile. Descriptions of a million tensors are a few million objects, none of them
    garbage, and looking through them again and again takes longer than making them."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
