"""CRC-32s of parts combine to that of the whole."""

from __future__ import annotations

import zlib

from hypothesis import given
from hypothesis import strategies as st

from anyckpt.plan.crc import combine


@given(st.lists(st.binary(max_size=300), max_size=8))
def test_parts_combine_to_the_crc_of_the_whole(parts: list[bytes]) -> None:
    assert combine((zlib.crc32(p), len(p)) for p in parts) == zlib.crc32(b"".join(parts))
