"""The zip that torch.save writes, laid out beforehand: every header, filler and descriptor, byte for byte.

    local header   PK 03 04, flags 0x0808 (sizes behind the data, UTF-8), CRC and sizes 0; 0x0800 for an empty record
                   name, [zip64 field], "FB" u16 n, n × "Z"      so that data begin at a multiple of the alignment
    data
    descriptor     PK 07 08, CRC, sizes as u32 (u64 where the header has a zip64 field); none for an empty record
    …
    directory, zip64 end record and locator (always), end record

A zip64 field stands where a record's size or its header's offset is 0xFFFFFFFF or more. Facts from torch 2.13 (miniz
and `caffe2/serialize/inline_container.cc`), compared with files that torch wrote, one of them over 4 GiB.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from anyckpt.core.layout import Checksum, FileLayout, Part
from anyckpt.core.tensor import Tensor

ALIGNMENT = 64
_LOCAL = struct.Struct("<4s5H3L2H")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR = struct.Struct("<4sLQL")
_END = struct.Struct("<4s4H2LH")
_U16, _U32 = 0xFFFF, 0xFFFFFFFF
_STREAMED, _UTF8 = 0x0808, 0x0800


@dataclass(frozen=True, slots=True)
class Record:
    """One member: its name below the top folder, and its bytes or the tensor whose elements are its bytes."""

    name: str
    content: bytes | Tensor

    @property
    def n_bytes(self) -> int:
        return self.content.nbytes if isinstance(self.content, Tensor) else len(self.content)


def lay_out(top: str, records: Sequence[Record], *, alignment: int = ALIGNMENT) -> FileLayout:
    """The archive of `records` in this order below the folder `top`. CRCs of tensors are left to the runner."""
    parts: list[Part] = []
    checksums: list[Checksum] = []
    directory = bytearray()
    crc_places: list[tuple[int, int, int]] = []  # in the directory; the data that it covers
    literal = bytearray()  # what was laid out since the last tensor
    literal_start = offset = 0
    for record in records:
        name, n_bytes = f"{top}/{record.name}".encode(), record.n_bytes
        is_wide = n_bytes >= _U32 or offset >= _U32
        flags = _STREAMED if n_bytes else _UTF8
        extra = _zip64(n_bytes, 0, offset)
        data_start = offset + _LOCAL.size + len(name) + len(extra) + 4
        pad = -data_start % alignment
        data_start += pad
        extra += struct.pack("<2sH", b"FB", pad) + b"Z" * pad
        literal += _LOCAL.pack(b"PK\3\4", 0, flags, 0, 0, 0, 0, 0, 0, len(name), len(extra)) + name + extra
        crc = 0
        if isinstance(record.content, bytes):
            literal += record.content
            crc = zlib.crc32(record.content)
        elif n_bytes:
            parts.append(Part(literal_start, len(literal), bytes(literal)))
            parts.append(Part(data_start, n_bytes, record.content))
            checksums.append(Checksum(data_start + n_bytes + 4, data_start, data_start + n_bytes))
            crc_places.append((len(directory) + 16, data_start, data_start + n_bytes))
            literal, literal_start = bytearray(), data_start + n_bytes
        if n_bytes:
            literal += struct.pack("<4sLQQ" if is_wide else "<4sLLL", b"PK\7\x08", crc, n_bytes, n_bytes)
        directory += _central(name, flags, crc, n_bytes, offset)
        offset = literal_start + len(literal)
    checksums += [Checksum(offset + at, start, stop) for at, start, stop in crc_places]
    literal += directory + _ends(len(records), len(directory), offset)
    parts.append(Part(literal_start, len(literal), bytes(literal)))
    return FileLayout("", literal_start + len(literal), tuple(parts), tuple(checksums))


def _zip64(size: int, stored_size: int, offset: int) -> bytes:
    """The zip64 field of a header, b"" where nothing needs it. torch leaves the stored size 0 in the local one."""
    values = [size, stored_size] if size >= _U32 else []
    values += [offset] if offset >= _U32 else []
    return struct.pack(f"<HH{len(values)}Q", 1, 8 * len(values), *values) if values else b""


def _central(name: bytes, flags: int, crc: int, n_bytes: int, offset: int) -> bytes:
    extra = _zip64(n_bytes, n_bytes, offset)
    size, start = min(n_bytes, _U32), min(offset, _U32)
    fields = (0, 0, flags, 0, 0, 0, crc, size, size, len(name), len(extra), 0, 0, 0, 0, start)
    return _CENTRAL.pack(b"PK\1\2", *fields) + name + extra


def _ends(n_records: int, directory_bytes: int, offset: int) -> bytes:
    """The zip64 end record and locator and the end record; version numbers as miniz writes them."""
    wide = _END64.pack(b"PK\6\6", 44, 0x031E, 45, 0, 0, n_records, n_records, directory_bytes, offset)
    locator = _LOCATOR.pack(b"PK\6\7", 0, offset + directory_bytes, 1)
    n = min(n_records, _U16)
    return wide + locator + _END.pack(
        b"PK\5\6", 0, 0, n, n, min(directory_bytes, _U32), min(offset, _U32), 0
    )
