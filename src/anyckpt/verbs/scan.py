"""What would a loader have to import? The verdict on every file under a path, each by its content.

A file of a kind that can't carry code is safe; one that names classes nobody vouches for, or was not understood, is
unknown; one that would run code is dangerous. "Not looked at" is never safe. Nothing is imported or executed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from anyckpt import formats
from anyckpt.core.source import File
from anyckpt.errors import CheckpointError, MissingDependency, NotACheckpoint
from anyckpt.finding import VERDICTS, Finding, Report, Verdict
from anyckpt.formats import table
from anyckpt.io.place import Place
from anyckpt.io.sniff import HEAD_BYTES, sniff

if TYPE_CHECKING:
    from anyckpt.pickle.result import Import

TEXT_LIMIT = 16 << 20  # bytes of a text file that are looked at
PROGRAMS = (".py", ".pyc", ".so", ".dll", ".dylib", ".sh", ".exe", ".ps1", ".bat", ".js", ".pth.py")
YAML = (".yaml", ".yml")
MEDIA = (  # kinds of file that no loader takes code from
    (b"\x89PNG\r\n\x1a\n", "PNG image"),
    (b"\xff\xd8\xff", "JPEG image"),
    (b"GIF8", "GIF image"),
    (b"RIFF", "RIFF media"),
    (b"%PDF-", "PDF document"),
    (b"OggS", "Ogg media"),
    (b"fLaC", "FLAC audio"),
)
_CONTROL = re.compile(rb"[\x00-\x08\x0e-\x1a\x1c-\x1f]")
_PYTHON_TAG = re.compile(rb"!!python|tag:yaml\.org,2002:python|!python|^%TAG", re.MULTILINE)
_REMOTE_CODE = re.compile(rb'"auto_map"\s*:')


@dataclass(frozen=True, slots=True)
class Scanned:
    """One file: what it is, the verdict, and what a loader would look up for it.

    `imports` are (module.name, verdict, reason), the worst first; `why` says in a few words what the verdict rests on.
    """

    name: str
    what: str
    verdict: Verdict
    why: str = ""
    imports: tuple[tuple[str, Verdict, str], ...] = ()
    findings: tuple[Finding, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The file as `--json` prints it."""
        return {
            "name": self.name,
            "what": self.what,
            "verdict": self.verdict,
            "why": self.why,
            "imports": [{"name": n, "verdict": v, "reason": r} for n, v, r in self.imports],
            "findings": [f.as_dict() for f in self.findings],
        }


@dataclass(frozen=True, slots=True)
class Scan:
    """The verdicts of all files, in the order of their names; `verdict` is the worst."""

    path: str
    verdict: Verdict
    files: tuple[Scanned, ...]

    def as_dict(self) -> dict[str, Any]:
        """The record as `--json` prints it."""
        counts = {word: sum(f.verdict == word for f in self.files) for word in VERDICTS}
        files = [f.as_dict() for f in self.files]
        return {"path": self.path, "verdict": self.verdict, "counts": counts, "files": files}


def scan(path: str | os.PathLike[str]) -> Scan:
    """Judge every file at or under `path` by its content. Folder links are not followed.

    Raises UsageError where there is no such path; faults of a file are its findings.
    """
    shown = os.fspath(path)
    try:
        place = Place.at(path)
    except CheckpointError as error:
        return Scan(shown, "unknown", (_unreadable(shown, error.finding),))
    files = tuple(_scan_place(place))
    worst: Verdict = max((f.verdict for f in files), key=VERDICTS.index, default="safe")
    return Scan(shown, worst, files)


def _scan_place(place: Place) -> Iterator[Scanned]:
    for name in place.names:
        try:
            file = place.open(name)
        except CheckpointError as error:
            yield _unreadable(name, error.finding)
            continue
        yield scan_file(file, name)
    for name, kind in place.kinds.items():
        if kind not in ("folder", "folder-link"):
            yield Scanned(name, kind.replace("-", " "), "unknown", "not looked at")
        elif kind == "folder-link":
            yield Scanned(name, "link to a folder", "unknown", "not followed; scan it by its own path")


def scan_file(file: File, name: str) -> Scanned:
    """Judge one file by its content; the name only tells programs and YAML from other text."""
    if file.size == 0:
        return Scanned(name, "empty", "safe", "no bytes")
    report = Report()
    imports: tuple[Import, ...] = ()
    title = "not looked at"
    try:
        checkpoint = formats.read_file(file, report)
        imports = tuple(checkpoint.facts.get("imports", ()))
        title = table.formats()[checkpoint.format].title
    except NotACheckpoint:
        return _scan_other(file, name)
    except MissingDependency as error:
        return Scanned(name, title, "unknown", str(error))
    except CheckpointError as error:
        report.extend([error.finding])
        title = error.finding.code.replace("-", " ")
    if report.errors:
        report.worsen("unknown")  # what lies behind a fault was not looked at
    verdict: Verdict = report.verdict
    found: dict[str, tuple[str, Verdict, str]] = {}
    for one in imports:
        found.setdefault(one.path, (one.path, one.verdict, one.reason))
    ordered = sorted(found.values(), key=lambda row: -VERDICTS.index(row[1]))
    errors = tuple(f for f in report.ordered() if f.severity != "note")
    return Scanned(name, title, verdict, _why(verdict, len(found)), tuple(ordered), errors)


def _why(verdict: Verdict, n_imports: int) -> str:
    if verdict == "safe":
        return f"{n_imports} names, all known to be harmless" if n_imports else "no code can be in it"
    return "would run code" if verdict == "dangerous" else "not all of it is known to be harmless"


def _scan_other(file: File, name: str) -> Scanned:
    """A file that is no checkpoint: text and media are safe, programs and the rest are not known to be."""
    head = file.read(0, min(HEAD_BYTES, file.size))
    lower = name.lower()
    if lower.endswith(PROGRAMS) or head.startswith((b"#!", b"\x7fELF", b"MZ")):
        return Scanned(name, "program", "unknown", "code; read it before you let anything run it")
    for magic, what in MEDIA:
        if head.startswith(magic):
            return Scanned(name, what, "safe", "no loader takes code from it")
    if _is_sentencepiece(head):
        return Scanned(name, "SentencePiece model", "safe", "no code can be in it")
    finding = sniff(head, file.size, name)
    if finding is not None and finding.code != "not-a-checkpoint":
        return Scanned(name, finding.code.replace("-", " "), "unknown", finding.message, (), (finding,))
    text = file.read(0, min(TEXT_LIMIT, file.size))
    if not _is_text(text) or file.size > TEXT_LIMIT:
        return Scanned(name, "unknown form", "unknown", "not looked at: no known format")
    if lower.endswith(YAML) and _PYTHON_TAG.search(text):
        return Scanned(name, "YAML", "dangerous", "asks a careless loader to make Python objects")
    if lower.endswith(".json") and _REMOTE_CODE.search(text):
        return Scanned(name, "JSON", "unknown", "auto_map: with trust_remote_code its model runs code of the folder")
    return Scanned(name, "text", "safe", "plain text")


def _is_text(data: bytes) -> bool:
    """UTF-8 without control characters other than those of layout and of terminals' colours."""
    if _CONTROL.search(data):
        return False
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        return error.start >= len(data) - 3  # a character cut by the limit
    return True


def _is_sentencepiece(head: bytes) -> bool:
    """A run of protobuf records {1: {1: piece, 2: float score}} (sentencepiece_model.proto, ModelProto.pieces)."""
    at = 0
    for _ in range(8):
        if at + 4 > len(head) or head[at] != 0x0A or head[at + 1] >= 0x80 or head[at + 2] != 0x0A:
            return False
        length, n_piece = head[at + 1], head[at + 3]
        score = at + 4 + n_piece
        if n_piece >= length or score >= len(head) or head[score] != 0x15:
            return False
        at += 2 + length
    return True


def _unreadable(name: str, finding: Finding) -> Scanned:
    return Scanned(name, "not looked at", "unknown", finding.message, (), (finding,))
