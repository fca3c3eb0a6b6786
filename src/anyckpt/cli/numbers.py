"""Numbers as people read them."""

from __future__ import annotations


def count(n: int) -> str:
    """A count of many things.

    >>> count(162), count(7_241_732_096), count(43_500)
    ('162', '7.24 B', '43.5 K')
    """
    value = float(n)
    for unit in ("", " K", " M", " B", " T"):
        if abs(value) < 999.5 or unit == " T":
            break
        value /= 1000
    return f"{n:,}" if not unit else f"{value:.3g}{unit}"


def percent(part: int, whole: int) -> str:
    """A share; a small one is not shown as none.

    >>> percent(1, 3), percent(1, 5000), percent(0, 7)
    ('33 %', '<1 %', '0 %')
    """
    if part and part * 100 < whole:
        return "<1 %"
    return f"{round(part * 100 / whole)} %"
