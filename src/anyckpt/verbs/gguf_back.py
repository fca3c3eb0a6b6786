from __future__ import annotations
def to_hub(c): return c
