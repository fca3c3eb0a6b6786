r"""safetensors: one JSON header, then the tensors' bytes without a gap.

    0      u64 little-endian n: length of the header, at most 100,000,000
    8      n bytes of JSON: {"__metadata__": {str: str}, NAME: {"dtype", "shape", "data_offsets": [begin, end]}, …}
           padded with spaces, so that 8 + n is a multiple of 8
    8 + n  data; offsets count from here, tile it exactly, and end with the file

Facts from safetensors 0.8.0 `tensor.rs` and by running it. The reference reader also takes leading spaces and repeated
keys (the last one wins), which no writer makes and which two readers may take differently: those are findings here.
"""

from __future__ import annotations

import json as plain_json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, cast

from anyckpt.core.box import Shape
from anyckpt.core.checkpoint import Checkpoint
from anyckpt.core.dtypes import BY_SAFETENSORS, DType
from anyckpt.core.layout import FileLayout, Part
from anyckpt.core.source import File, Span
from anyckpt.core.tensor import Piece, Tensor
from anyckpt.errors import UsageError
from anyckpt.finding import Report, fail
from anyckpt.formats.table import WriteOptions
from anyckpt.io import json
from anyckpt.io.bounds import cut_short
from anyckpt.io.paths import printable

MAX_HEADER_BYTES = 100_000_000
MAX_U64 = (1 << 64) - 1
STEP_KEYS = ("step", "global_step", "iteration")
_WHOLE = {int}
CUT_HINT = "download or copy this file again"

Row = tuple[DType, Shape, File, int]
"""dtype, shape, file, and the offset in it: a tensor as a million of them fit in memory."""


class Stored(Mapping[str, Tensor]):
    """Tensors by name, held as rows; each becomes a Tensor when it is first asked for, and stays the same one."""

    __slots__ = ("_rows",)

    def __init__(self, rows: dict[str, Row] | dict[str, Row | Tensor]) -> None:
        self._rows = cast("dict[str, Row | Tensor]", rows)  # taken over: rows give way to tensors in it

    def __getitem__(self, name: str) -> Tensor:
        row = self._rows[name]
        if isinstance(row, Tensor):
            return row
        dtype, shape, file, offset = row
        tensor = Tensor(dtype, shape, (Piece(Span(file, offset, dtype.nbytes(prod(shape)))),))
        self._rows[name] = tensor
        return tensor

    def tie(self, aliases: Mapping[str, str]) -> None:
        """Give each tied name the tensor of the name that holds the bytes."""
        for name, stored in aliases.items():
            self._rows[name] = self[stored]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, name: object) -> bool:
        return name in self._rows


@dataclass(frozen=True, slots=True)
class Header:
    """What stands before the data: rows by name in the header's order, the file's metadata; how long the data are."""

    rows: dict[str, Row]
    metadata: dict[str, str]
    data_bytes: int

    @property
    def step(self) -> int | None:
        """The training step, where the metadata names one."""
        found = (self.metadata.get(key, "") for key in STEP_KEYS)
        return next((int(text) for text in found if text.isascii() and text.isdigit() and len(text) < 16), None)


def matches(file: File, head: bytes) -> bool:
    """Whether a header length that could be and an opening brace stand at the start."""
    return 2 <= int.from_bytes(head[:8], "little") <= MAX_HEADER_BYTES and head[8:].lstrip(b" ")[:1] == b"{"


def read(file: File, report: Report) -> Checkpoint:
    """Read the header. Raises CheckpointError where it can't be trusted at all; other faults go to `report`."""
    header = read_header(file, report)
    if "format" not in header.metadata:
        report.add(
            "no-format-tag", 'the metadata lacks {"format": "pt"}, which transformers before 5 insists on',
            where=file.name, hint="convert the file to safetensors again to add it",
        )
    weights, aliases = Stored(header.rows), removed_names(header)
    weights.tie(aliases)
    return Checkpoint(
        "safetensors", file.name, weights, aliases=aliases, step=header.step,
        facts={"container": "safetensors", "metadata": header.metadata},
    )


def removed_names(header: Header) -> dict[str, str]:
    """Tied names that `save_model` left out, which it notes as {removed: kept} in the metadata."""
    rows = header.rows
    return {
        removed: kept
        for removed, kept in header.metadata.items()
        if removed not in rows and kept in rows and removed != "format"
    }


def read_header(file: File, report: Report) -> Header:
    """Parse and check the header, in time and memory linear in its length."""
    where = file.name
    text = _header_text(file)
    repeated: list[str] = []
    document = json.parse(
        text, where=where, code="bad-header", max_depth=8, on_object=_compact, on_duplicate=repeated.append
    )
    if not isinstance(document, dict):
        raise fail("bad-header", "the header is no JSON object", where=where)
    one_reading = not repeated or _judge_repeated(text, repeated, where, report)
    if text[:1] == b" ":
        report.add("bad-header", "blanks stand before the header's brace", where=where, severity="warning")
    metadata = _metadata(document.pop("__metadata__", {}), where, report)
    rows = _rows(document, 8 + len(text), file, report)
    if one_reading and len(rows) == len(document):
        _check_tiling(rows, 8 + len(text), file, report)
    return Header(rows, metadata, file.size - 8 - len(text))


def _header_text(file: File) -> bytes:
    """The header's bytes, the length checked before anything is read."""
    if file.size < 8:
        raise cut_short(file.name, file.size, 0, 8)
    n = int.from_bytes(file.read(0, 8), "little")
    if n == 0:
        raise _zeros(file)
    if n > MAX_HEADER_BYTES:
        message = f"the header's length is given as {n:,} bytes; the limit is {MAX_HEADER_BYTES:,}"
        raise fail("header-too-large", message, where=file.name, hint=CUT_HINT)
    if 8 + n > file.size:
        raise cut_short(file.name, file.size, 8, 8 + n)
    return file.read(8, n)


def _zeros(file: File) -> Exception:
    """The word for a file that begins with zeros: preallocated and never written, or one that lost its first block."""
    block = 1 << 16
    ends = file.read(0, min(block, file.size)) + file.read(max(0, file.size - block), min(block, file.size))
    if not ends.strip(b"\0"):
        return fail(
            "zero-tail", f"holds zeros only, {file.size:,} of them: space was set aside, but nothing was written",
            where=file.name, hint=CUT_HINT,
        )
    return fail("zero-head", "begins with zeros: the first block was lost", where=file.name, hint=CUT_HINT)


def _compact(found: dict[str, Any]) -> Any:
    """An object that has a tensor's three fields as a tuple, which takes a quarter of the memory; others unchanged."""
    if len(found) == 3 and "data_offsets" in found:
        dtype, shape, offsets = found.get("dtype"), found.get("shape"), found["data_offsets"]
        if type(dtype) is str and type(shape) is list and type(offsets) is list and len(offsets) == 2:
            return (dtype, tuple(shape), offsets[0], offsets[1])
    return found


def _judge_repeated(text: bytes, repeated: list[str], where: str, report: Report) -> bool:
    """A key that repeats its own value is a flaw; with two values, readers disagree about what the file holds.

    Returns whether all of them agree.
    """
    agree = True
    values: dict[str, list[Any]] = {}
    for key, value in plain_json.loads(text, object_pairs_hook=list):
        values.setdefault(key, []).append(value)
    for key in dict.fromkeys(repeated):
        found = values.get(key, [])
        same = len(found) > 1 and all(value == found[0] for value in found)
        agree &= same
        report.add(
            "duplicate-key",
            f"'{printable(key)}' stands twice in the header" + ("" if same else ", and what it says differs"),
            where=where, severity="warning" if same else "error",
            hint="" if same else "readers take either; get the file from a source that you trust",
        )
    return agree


def _metadata(found: Any, where: str, report: Report) -> dict[str, str]:
    if isinstance(found, dict) and all(type(value) is str for value in found.values()):
        return found
    report.add("bad-header", "__metadata__ is not a table of text to text", where=where)
    return {}


def _rows(document: dict[str, Any], start: int, file: File, report: Report) -> dict[str, Row]:
    """The tensors whose own fields hold together; a finding for each of the others."""
    where = file.name
    rows: dict[str, Row] = {}
    known: dict[tuple[str, Shape], tuple[DType, Shape, int]] = {}
    for name, found in document.items():
        if type(found) is not tuple:
            found = _with_other_fields(found, name, where, report)
            if found is None:
                continue
        spelling, shape, begin, end = found
        if {*map(type, shape), type(begin), type(end)} != _WHOLE:  # True == 1 and 2.0 == 2, so types are compared
            report.add("bad-header", "sizes and offsets must be whole numbers", where=_at(where, name))
            continue
        kind = known.get((spelling, shape))
        if kind is None:
            kind = _kind(spelling, shape, _at(where, name), report)
            if kind is None:
                continue
            known[spelling, shape] = kind
        dtype, shape, n_bytes = kind
        if end - begin == n_bytes and 0 <= begin <= MAX_U64:
            rows[name] = (dtype, shape, file, start + begin)
            if not name or not name.isprintable():
                shown = printable(name, limit=100)
                report.add("bad-name", f"the tensor name '{shown}' is empty or holds control characters", where=where)
        elif begin < 0 or begin > end:
            report.add("negative-size", f"offsets run from {begin} to {end}", where=_at(where, name))
        elif end > MAX_U64:
            report.add("size-overflow", "an offset is beyond 2⁶⁴", where=_at(where, name))
        else:
            message = f"{dtype} of shape {list(shape)} takes {n_bytes:,} bytes, its offsets hold {end - begin:,}"
            report.add("size-mismatch", message, where=_at(where, name))
    return rows


def _with_other_fields(found: Any, name: str, where: str, report: Report) -> Any:
    """The fields of an entry that has others beside them; None where it lacks its own."""
    fields = ("dtype", "shape", "data_offsets")
    if isinstance(found, dict):
        compact = _compact({field: found[field] for field in fields if field in found})
        if type(compact) is tuple:
            others = ", ".join(printable(key, limit=40) for key in list(found)[:6] if key not in fields)
            report.add("unknown-field", f"has fields that the format does not know: {others}", where=_at(where, name))
            return compact
    report.add("bad-header", "is not an object of dtype, shape and data_offsets", where=_at(where, name))
    return None


def _kind(spelling: str, shape: Shape, where: str, report: Report) -> tuple[DType, Shape, int] | None:
    """dtype, shape and bytes of a kind of tensor; `shape` is known to hold ints."""
    dtype = BY_SAFETENSORS.get(spelling)
    if dtype is None:
        report.add("unknown-dtype", f"dtype '{printable(spelling, limit=40)}' is not in the format", where=where)
        return None
    if any(n < 0 for n in shape):
        report.add("negative-size", f"shape {list(shape)} has a negative size", where=where)
        return None
    n = prod(shape)
    if dtype.nbytes(n) > MAX_U64:
        report.add("size-overflow", f"shape {list(shape)} has more bytes than any file", where=where)
        return None
    if n % dtype.block:
        report.add("size-mismatch", f"{n:,} values of {spelling} do not fill whole bytes", where=where)
        return None
    return dtype, shape, dtype.nbytes(n)


def _check_tiling(rows: dict[str, Row], start: int, file: File, report: Report) -> None:
    """Check that the tensors cover the data exactly; says the first fault of each kind."""
    if _in_order(rows, start, file.size):
        return
    ranges = sorted(
        (offset - start, offset - start + dtype.nbytes(prod(shape)), name)
        for name, (dtype, shape, _, offset) in rows.items()
    )
    expected, before, told = 0, "", set()
    for begin, end, name in ranges:
        if begin != expected:
            code = "offset-hole" if begin > expected else "offset-overlap"
            if code not in told:
                told.add(code)
                what = "belong to no tensor" if begin > expected else f"also belong to {printable(before)}"
                low, high = sorted((begin, expected))
                report.add(code, f"bytes {low:,}-{high:,} of the data {what}", where=_at(file.name, name))
        if end > expected or begin > expected:
            expected, before = end, name
    data_bytes = file.size - start
    if expected > data_bytes:
        n_cut = sum(end > data_bytes for _, end, _ in ranges)
        begin, end, name = next(r for r in ranges if r[1] > data_bytes)
        more = f"; {n_cut - 1:,} more tensors are missing" if n_cut > 1 else ""
        finding = cut_short(_at(file.name, name), file.size, start + begin, start + end).finding
        report.add("truncated", finding.message + more, where=finding.where, hint=CUT_HINT)
    elif expected < data_bytes:
        message = f"{data_bytes - expected:,} bytes stand behind the last tensor"
        report.add("trailing-data", message, where=file.name, hint="they may be another file's; convert to drop them")


def _in_order(rows: dict[str, Row], start: int, stop: int) -> bool:
    """Whether the tensors, as the header lists them, follow each other from `start` to `stop`: all writers do that."""
    for dtype, shape, _, offset in rows.values():
        if offset != start:
            return False
        start += dtype.nbytes(prod(shape))
    return start == stop


def _at(where: str, name: str) -> str:
    return f"{where}, tensor {printable(name)}"


def verify(file: File, checkpoint: Checkpoint, report: Report) -> None:
    """Look for a second file inside the data: a zip whose end is this file's end is opened by whoever looks for one."""
    tail = file.read(max(0, file.size - (1 << 16) - 22), min(file.size, (1 << 16) + 22))
    at = tail.rfind(b"PK\x05\x06")
    while at >= 0:
        if len(tail) - at >= 22 and at + 22 + int.from_bytes(tail[at + 20 : at + 22], "little") == len(tail):
            report.add(
                "polyglot", "the tensors' bytes end in a zip directory: this file is also an archive", where=file.name,
                hint="convert it to safetensors again, with nothing but its tensors",
            )
            report.worsen("unknown")
            return
        at = tail.rfind(b"PK\x05\x06", 0, at)


# --- writing ---

_ORDER = """
BOOL F4 F6_E2M3 F6_E3M2 U8 I8 F8_E5M2 F8_E4M3 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ I16 U16 F16 BF16 I32 U32 F32 C64 F64 I64
U64
""".split()
RANK = {spelling: i for i, spelling in enumerate(_ORDER)}
"""The reference writer's order of types; it writes from the last to the first, so that every tensor is aligned."""


def write(checkpoint: Checkpoint, options: WriteOptions) -> list[FileLayout]:
    """One file with every weight, a tied one under each of its names, since entries can't share bytes.

    With `tied="drop"` it is written once, and {removed name: kept name} goes into the metadata, which `load_model` of
    safetensors reads. Raises UsageError for a tensor that the format can't hold.
    """
    dropped = dict(checkpoint.aliases) if options.tied == "drop" else {}
    weights = {name: tensor for name, tensor in checkpoint.weights.items() if name not in dropped}
    metadata: Mapping[str, str] = options.extra.get("metadata") or {}
    return [layout("", weights, {"format": "pt", **metadata, **dropped})]


def layout(name: str, weights: Mapping[str, Tensor], metadata: Mapping[str, str]) -> FileLayout:
    """Describe a file of these tensors: the same bytes as the reference writer's for at most one metadata entry."""
    spelled = {tensor_name: spelling(tensor, tensor_name) for tensor_name, tensor in weights.items()}
    ordered = sorted(weights, key=lambda n: (-RANK[spelled[n][0]], n))
    quote = plain_json.encoder.encode_basestring
    fields = [f'"__metadata__":{plain_json.dumps(dict(metadata), ensure_ascii=False, separators=(",", ":"))}']
    kinds: dict[tuple[str, Shape], str] = {}  # a model has few: their text is made once
    ends, offset = [], 0
    for tensor_name in ordered:
        kind = spelled[tensor_name]
        text = kinds.get(kind)
        if text is None:
            text = kinds[kind] = f'{{"dtype":"{kind[0]}","shape":[{",".join(map(str, kind[1]))}],"data_offsets":['
        end = offset + weights[tensor_name].nbytes
        fields.append(f"{quote(tensor_name)}:{text}{offset},{end}]}}")
        ends.append(end)
        offset = end
    header = ("{" + ",".join(fields) + "}").encode()
    header += b" " * (-len(header) % 8)
    if len(header) > MAX_HEADER_BYTES:
        raise UsageError(
            f"a header of {len(header):,} bytes is over the format's limit of {MAX_HEADER_BYTES:,}",
            hint="write shards: --to hf --max-shard-size 5GB",
        )
    start = 8 + len(header)
    parts = [Part(0, start, len(header).to_bytes(8, "little") + header)]
    begin = 0
    for tensor_name, end in zip(ordered, ends, strict=True):
        if end > begin:
            parts.append(Part(start + begin, end - begin, weights[tensor_name]))
        begin = end
    return FileLayout(name, start + begin, tuple(parts))


def spelling(tensor: Tensor, name: str) -> tuple[str, Shape]:
    """dtype and shape as the header writes them. Raises UsageError for a tensor that has no such form."""
    dtype = tensor.dtype
    if dtype.name == "float4_e2m1fn_x2" and tensor.shape:  # torch counts bytes, the header the two values in each
        return "F4", (*tensor.shape[:-1], 2 * tensor.shape[-1])
    if not dtype.safetensors:
        raise UsageError(
            f"{printable(name)} is {dtype.name}, which safetensors has no type for",
            hint=f"leave it out (--exclude '{printable(name)}'), or cast it (--dtype)",
        )
    if tensor.size % dtype.block:
        raise UsageError(f"{printable(name)} holds {tensor.size:,} values of {dtype.name}, which fill no whole bytes")
    if not tensor.is_stored:
        raise UsageError(f"the values of {printable(name)} were never saved", hint="leave it out with --exclude")
    return dtype.safetensors, tensor.shape
