"""Digests that a folder carries of its own files, and whether they hold.

    SHA256SUMS, *.sha256 …         "<hex>  name", "<hex> *name", "SHA256 (name) = <hex>"; a lone <hex> in NAME.sha256
    .cache/huggingface/download/   NAME.metadata: commit, etag, time; an etag of 64 hex digits is the file's SHA-256,
                                   one of 40 the SHA-1 of its git blob ("blob <size>\\0" before the bytes)
    snapshots/REV/NAME             in a Hub cache a link to blobs/ETAG, the same two kinds
    model.sig                      OpenSSF model signing: a Sigstore bundle whose payload, an in-toto Statement v1,
                                   lists every file

Names are checked when the folder is read; files are hashed by `verify`, each once. A signature is checked as far as
that goes without its key: the digests, the set of files, and that the statement's own digest is theirs.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from anyckpt.core.source import File
from anyckpt.errors import CheckpointError
from anyckpt.finding import Report
from anyckpt.io import json
from anyckpt.io.paths import name_fault, printable
from anyckpt.io.place import Place

MAX_BYTES = 64 << 20
CHUNK_BYTES = 4 << 20
_SUMS = re.compile(r"(?i)(.*/)?(sha(1|256|512)sums?(\.txt)?|checksums?(\.txt)?|.+\.sha(1|256|512)(sums?)?)")
_GNU = re.compile(r"\\?([0-9a-fA-F]{40}|[0-9a-fA-F]{64}|[0-9a-fA-F]{128})(?: [ *]|\s+)(.+)")
_BSD = re.compile(r"SHA(?:1|256|512) \((.+)\) = ([0-9a-fA-F]+)")
_HEX = re.compile(r"[0-9a-fA-F]{40}|[0-9a-fA-F]{64}|[0-9a-fA-F]{128}")
_ALGORITHMS = {40: "sha1", 64: "sha256", 128: "sha512"}
_HUB_RECORDS = ".cache/huggingface/download/"
_SIGNATURE = "model.sig"
_STATEMENT = "https://in-toto.io/Statement/v1"


@dataclass(frozen=True, slots=True)
class Expected:
    """One digest: of the file `name`, in hex, as `source` says. `algorithm`: sha1, sha256, sha512 or git-blob."""

    name: str
    algorithm: str
    digest: str
    source: str


def check_names(place: Place, report: Report) -> None:
    """Report names in manifests that lead out of the folder, and files that they list and that are not there."""
    for expected in _all(place, report):
        if not place.exists(expected.name) and not expected.source.startswith(_HUB_RECORDS):
            report.add(
                "missing-shard", f"{printable(expected.source)} lists it, and it is not there",
                where=printable(expected.name), hint="download the file again",
            )


def verify(place: Place, report: Report) -> None:
    """Hash every file that a manifest lists, and compare."""
    ignored = Report()  # names were reported on reading
    wanted: dict[str, list[Expected]] = {}
    for expected in (*_all(place, ignored), *_hub_blobs(place)):
        if expected.name in place.names:
            wanted.setdefault(expected.name, []).append(expected)
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        jobs = [(expected, pool.submit(_digests, place, expected)) for expected in wanted.values()]
        for listed, job in jobs:
            try:
                found = job.result()
            except CheckpointError as error:
                report.extend([error.finding])
                continue
            for expected in listed:
                if found[expected.algorithm] != expected.digest:
                    report.add(
                        "checksum-mismatch",
                        f"its {expected.algorithm} is {found[expected.algorithm][:16]}…, {printable(expected.source)} "
                        f"says {expected.digest[:16]}…",
                        where=printable(expected.name),
                        hint="download the file again; it is not the one that was listed",
                    )


def _digests(place: Place, listed: Iterable[Expected]) -> dict[str, str]:
    """Every digest that is wanted of one file, in one pass."""
    listed = list(listed)
    file = place.open(listed[0].name)
    return digests(file, {expected.algorithm for expected in listed})


def digests(file: File, algorithms: Iterable[str]) -> dict[str, str]:
    """Hex digests of a file by algorithm; `git-blob` is the SHA-1 of git's form of it."""
    hashes = {name: hashlib.new("sha1" if name == "git-blob" else name) for name in algorithms}
    if "git-blob" in hashes:
        hashes["git-blob"].update(b"blob %d\0" % file.size)
    buffer = memoryview(bytearray(min(CHUNK_BYTES, file.size)))
    for offset in range(0, file.size, CHUNK_BYTES):
        part = buffer[: min(CHUNK_BYTES, file.size - offset)]
        file.readinto(offset, part)
        for one in hashes.values():
            one.update(part)
    return {name: one.hexdigest() for name, one in hashes.items()}


def _all(place: Place, report: Report) -> Iterator[Expected]:
    """What the manifests in the folder say, names that may not be used left out."""
    readers: list[tuple[str, Callable[[str, bytes, Place, Report], Iterator[Expected]]]] = []
    for name in place.names:
        if name.startswith(_HUB_RECORDS) and name.endswith(".metadata"):
            readers.append((name, _hub_record))
        elif "/" not in name and name == _SIGNATURE:
            readers.append((name, _signature))
        elif "/" not in name and _SUMS.fullmatch(name):
            readers.append((name, _sums))
    for name, reader in readers:
        try:
            file = place.open(name)
            data = file.read(0, min(file.size, MAX_BYTES))
        except CheckpointError as error:
            report.extend([error.finding])
            continue
        for expected in reader(name, data, place, report):
            if fault := name_fault(expected.name):
                report.add("path-escape", f"the name '{printable(expected.name)}' {fault}", where=printable(name))
            else:
                yield expected


def _sums(name: str, data: bytes, place: Place, report: Report) -> Iterator[Expected]:
    """Lines of sha256sum and its kin, either style."""
    n_strange = 0
    for line in data.decode("utf-8", "surrogateescape").splitlines():
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        if match := _GNU.fullmatch(line):
            digest, target = match[1], match[2]
        elif match := _BSD.fullmatch(line):
            target, digest = match[1], match[2]
        elif _HEX.fullmatch(line) and name.rpartition(".")[0] in place.names:
            digest, target = line, name.rpartition(".")[0]
        else:
            n_strange += 1
            continue
        if len(digest) in _ALGORITHMS:
            yield Expected(target.removeprefix("./"), _ALGORITHMS[len(digest)], digest.lower(), name)
    if n_strange:
        report.add("bad-manifest", f"{n_strange:,} lines are not a digest and a name", where=printable(name))


def _hub_record(name: str, data: bytes, place: Place, report: Report) -> Iterator[Expected]:
    """A download record of huggingface_hub (`_local_folder.py`)."""
    lines = data.decode("utf-8", "replace").split("\n")
    target = name[len(_HUB_RECORDS) : -len(".metadata")]
    if len(lines) < 3:
        report.add("bad-manifest", "is no download record of commit, etag and time", where=printable(name))
    elif expected := _of_etag(target, lines[1].strip(), name):
        yield expected


def _of_etag(target: str, etag: str, source: str) -> Expected | None:
    algorithm = {40: "git-blob", 64: "sha256"}.get(len(etag))
    return Expected(target, algorithm, etag.lower(), source) if algorithm and _HEX.fullmatch(etag) else None


def _hub_blobs(place: Place) -> Iterator[Expected]:
    """In a Hub cache the name of the file that a link leads to is its digest."""
    for name in place.names:
        path = place.path / name
        if path.is_symlink():
            real = os.path.realpath(path)
            if os.path.basename(os.path.dirname(real)) == "blobs":
                expected = _of_etag(name, os.path.basename(real), "the name of its blob")
                if expected:
                    yield expected


def _signature(name: str, data: bytes, place: Place, report: Report) -> Iterator[Expected]:
    """The statement inside of model.sig: its files, the set of them, and the digest of their digests."""

    def fault(message: str) -> None:
        report.add("bad-signature", message, where=name, hint="take the model from its source again")

    try:
        statement = _statement(data, name)
        predicate = statement["predicate"]
        resources = [(str(r["name"]), str(r["digest"]), str(r["algorithm"])) for r in predicate["resources"]]
        serialization = predicate.get("serialization") or {}
        ignored = {str(path).strip("/") for path in serialization.get("ignore_paths") or ()} | {name}
        subject = statement["subject"][0]["digest"]["sha256"]
        raw = b"".join(bytes.fromhex(digest) for _, digest, _ in resources)
    except CheckpointError as error:
        report.extend([error.finding])
        return
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, binascii.Error):
        fault("is no signature that is known: a Sigstore bundle with a list of files was expected")
        return
    if hashlib.sha256(raw).hexdigest() != subject:
        fault("the digest that was signed is not that of the files it lists: the list was changed")
        return
    if serialization.get("method", "files") != "files":
        report.add("not-looked-at", "the signature lists parts of files; these are not checked", where=name)
        return
    message = "the list of files agrees with itself; whose signature it is was not checked, for want of a key"
    report.add("not-looked-at", message, where=name)
    listed = {target for target, _, _ in resources}
    for other in place.names:
        skipped = any(other == path or other.startswith(path + "/") for path in ignored)
        if other not in listed and not skipped and not other.startswith(".cache/"):
            report.add("extra-file", "was not there when the folder was signed", where=printable(other))
    for target, digest, algorithm in resources:
        if algorithm in ("sha256", "sha512", "sha1"):
            yield Expected(target, algorithm, digest.lower(), name)
        else:
            message = f"its digest is of a kind that is not known: {printable(algorithm, limit=40)}"
            report.add("not-looked-at", message, where=printable(target))


def _statement(data: bytes, name: str) -> dict[str, Any]:
    """The in-toto statement in a Sigstore bundle. Raises KeyError and its kin for another form."""
    bundle = json.parse(data, where=name, code="bad-signature")
    payload = base64.b64decode(bundle["dsseEnvelope"]["payload"], validate=True)
    statement = json.parse(payload, where=name, code="bad-signature")
    if statement["_type"] != _STATEMENT:
        raise ValueError("another kind of statement")
    found: dict[str, Any] = statement
    return found
