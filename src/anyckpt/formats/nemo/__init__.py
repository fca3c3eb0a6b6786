"""NeMo 1: a `.nemo` file, read in place.

    tar, plain or gzip; member names may begin with "./"
        model_config.yaml                            sizes, kind of model; `target` names its class
        model_weights.ckpt                           a state dict: torch file; names begin with "model."
        mp_rank_TT/model_weights.ckpt                one a tensor rank
        tp_rank_TT_pp_rank_PPP/model_weights.ckpt    one a tensor and pipeline rank
        model_weights/{metadata.json, .metadata, …}  a torch_dist checkpoint
        <hex>_tokenizer.model …                      named by the config as nemo:<file>

The config is data: nothing in it is imported, and what Hydra would call (`_target_`) is judged. Names are Megatron's
with "model." (and under megatron_amp_O2 "module.") before them, which are taken off. Source: NeMo 1.23 and 2.0
`core/connectors/save_restore_connector.py`, `nlp_model.py`; compared with a file made by hand after them.
"""

from __future__ import annotations

import re
import zlib
from pathlib import Path

from anyckpt.core.checkpoint import Asset, Checkpoint
from anyckpt.core.source import File
from anyckpt.errors import CheckpointError
from anyckpt.finding import Report
from anyckpt.formats.nemo.config import read_config
from anyckpt.formats.nemo.weights import CONFIG, is_weights, read_weights
from anyckpt.io.inflate import decoded_unsized
from anyckpt.io.place import Place
from anyckpt.io.tar import TarArchive, read_tar

GZIP = b"\x1f\x8b"
_PICKLED = (".ckpt", ".pt", ".pth", ".bin", ".pkl", ".pickle")
_ASSET = re.compile(r"(?:[0-9a-f]{32}_)?(.*(?:tokenizer|vocab|merges|sentencepiece|spm|\.tiktoken).*)", re.IGNORECASE)


def matches(file: File, head: bytes) -> bool:
    """A tar, plain or in gzip, with a model_config.yaml or the weights of a model in it."""
    if head[:2] == GZIP:
        return _gzip_is_nemo(file, head)
    if head[257:262] != b"ustar":
        return False
    try:
        members = read_tar(file, Report()).members
    except CheckpointError:
        return file.name.lower().endswith(".nemo")
    return CONFIG in members or any(is_weights(name) for name in members)


def _gzip_is_nemo(file: File, head: bytes) -> bool:
    """By the first member's name, or the file's own: the whole is not decoded for a look."""
    try:
        inner = zlib.decompressobj(31).decompress(head, 512)
    except zlib.error:
        return False
    if inner[257:262] != b"ustar":
        return False
    first = inner[:100].split(b"\0")[0].decode("utf-8", "replace").removeprefix("./")
    return file.name.lower().endswith(".nemo") or first == CONFIG or is_weights(first)


def read(file: File, report: Report) -> Checkpoint:
    """Describe the model. Raises CheckpointError where there are no weights, or the tar can't be walked."""
    archive = open_archive(file, report)
    members = _openable(archive, report)
    place = Place.inside(Path(file.name), members)
    config = read_config(place, CONFIG, report)
    for member in archive.shadowed:
        _judge(archive.open(member), report)
    checkpoint = read_weights(place, config, report)
    _judge_others(place, checkpoint, report)
    return Checkpoint(
        "nemo", file.name, checkpoint.weights, aliases=checkpoint.aliases, optimizer=checkpoint.optimizer,
        step=checkpoint.step, state=checkpoint.state, config=config, topology=checkpoint.topology,
        assets=_assets(place),
        facts={**checkpoint.facts, "container": "tar" if file.read(0, 2) != GZIP else "tar in gzip",
               "branch": "NeMo 1"},
    )  # fmt: skip


def open_archive(file: File, report: Report) -> TarArchive:
    """The tar, through gzip where it is in one."""
    inner = decoded_unsized(file, "gzip", name=file.name) if file.read(0, min(2, file.size)) == GZIP else file
    return read_tar(inner, report)


def _openable(archive: TarArchive, report: Report) -> dict[str, File]:
    """The members that have bytes; a link that leads nowhere was told."""
    found: dict[str, File] = {}
    for name in archive.members:
        try:
            found[name] = archive.open(name)
        except CheckpointError as error:
            report.extend([error.finding])
    return found


def _judge(file: File, report: Report) -> None:
    """What a loader of another member would have to import."""
    from anyckpt.formats.torch.saved import saved_object

    try:
        saved_object(file, report)
    except CheckpointError as error:
        report.extend([error.finding])


def _judge_others(place: Place, checkpoint: Checkpoint, report: Report) -> None:
    read_already = frozenset(checkpoint.facts.get("files", ()))
    for name in place.names:
        if name.endswith(_PICKLED) and name not in read_already and not name.endswith(".distcp"):
            _judge(place.open(name), report)


def _assets(place: Place) -> tuple[Asset, ...]:
    """Tokenizer files, without the hash that NeMo puts before their names."""
    found: dict[str, Asset] = {}
    for name in place.names:
        match = _ASSET.fullmatch(name) if "/" not in name else None
        if match is not None:
            found.setdefault(match[1], Asset(match[1], place.open(name)))
    return tuple(found.values())


def verify(file: File, checkpoint: Checkpoint, report: Report) -> None:
    """Deep: the checksums of the torch files in it."""
    from anyckpt.formats.torch import zip as torch_zip

    archive = open_archive(file, Report())
    for name in checkpoint.facts.get("files", ()):
        if name not in archive.members:
            continue
        member = archive.open(name)
        if member.read(0, min(4, member.size)) == b"PK\3\4":
            torch_zip.verify(member, checkpoint, report)

