"""The one check that a read stays inside its file, and the sentence for one that does not."""

from __future__ import annotations

from anyckpt.errors import CheckpointError
from anyckpt.finding import fail


def check_range(name: str, size: int, offset: int, length: int) -> None:
    """Raise [truncated] unless [offset, offset + length) lies in a file of `size` bytes; call before allocating."""
    if offset < 0 or length < 0:
        raise fail("negative-size", f"a read of {length:,} bytes at offset {offset:,} makes no sense", where=name)
    if offset + length > size:
        raise cut_short(name, size, offset, offset + length)


def cut_short(name: str, size: int, start: int, stop: int) -> CheckpointError:
    """The [truncated] fault of a structure at [start, stop) in a file that ends at `size`."""
    return fail(
        "truncated",
        f"needs bytes {start:,}-{stop:,}; the file ends at {size:,} ({byte_count(stop - size)} missing)",
        where=name,
        hint="download or copy this file again",
    )


def byte_count(n: int) -> str:
    """A count of bytes for people.

    >>> byte_count(19136512), byte_count(12)
    ('18.2 MiB', '12 bytes')
    """
    if abs(n) < 1024:
        return f"{n} byte{'' if n == 1 else 's'}"
    value, units = n / 1024, ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"]
    while abs(value) >= 1024 and len(units) > 1:
        value /= 1024
        del units[0]
    return f"{value:.1f} {units[0]}"
