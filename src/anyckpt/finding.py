"""Findings: what is wrong with, or worth knowing about, a checkpoint, and the one table of their codes.

A reader reports into a `Report` and goes on; where it cannot go on it raises `report.fail(...)`, which is the same
finding as an exception. Codes are stable words; `anyckpt explain CODE` prints a page for each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from anyckpt.errors import CheckpointError, NotACheckpoint

Severity = Literal["error", "warning", "note"]
Verdict = Literal["safe", "unknown", "dangerous"]

SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
VERDICTS: tuple[Verdict, ...] = ("safe", "unknown", "dangerous")

ERROR_CODES = """
truncated empty-file not-a-checkpoint lfs-pointer html-page compressed-wrapper special-file broken-link path-escape
bad-header header-too-large bad-utf8 duplicate-key duplicate-member too-deep limit-exceeded bomb unsupported-version
unsupported-compression unsupported-opcode unsupported unknown-dtype negative-size size-overflow size-mismatch
offset-out-of-bounds offset-overlap offset-hole offset-unaligned trailing-data missing-record missing-shard
missing-tensor wrong-shard mixed-steps incomplete bad-index bad-tracker malformed-pickle malformed-hdf5 malformed-item
zip-inconsistent zip-encrypted crc-mismatch checksum-mismatch bad-signature extra-file zero-head zero-tail bad-yaml
inconsistent unmapped-tensor shape-mismatch wrong-topology external-reference dangerous-code replica-mismatch
""".split()
WARNING_CODES = """
all-zero non-finite mixed-dtype extra-shard unlisted-tensor duplicate-tensor duplicate-shard total-size-mismatch
missing-index wrong-extension polyglot unexpected-member ambiguous unknown-field bad-name contains-code leftover
bad-manifest extra-tensor unlisted-file unknown-byteorder dtype-mismatch master-mismatch twin-moments
negative-second-moment lossy missing-config missing-tokenizer unknown-code
""".split()
NOTE_CODES = """
tied inferred prefixed no-checksums hardlink not-looked-at other-state dead-storage older-spelling device privacy
no-format-tag
""".split()

DEFAULT_SEVERITY: dict[str, Severity] = {
    **dict.fromkeys(ERROR_CODES, "error"),
    **dict.fromkeys(WARNING_CODES, "warning"),
    **dict.fromkeys(NOTE_CODES, "note"),
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One fact about a checkpoint. `where` is a file, and a tensor or byte position in it; `hint` the next step."""

    code: str
    severity: Severity
    message: str
    where: str = ""
    hint: str = ""

    def __post_init__(self) -> None:
        if self.code not in DEFAULT_SEVERITY:
            raise KeyError(f"{self.code!r} is not in the table of finding codes")

    def as_dict(self) -> dict[str, str]:
        """The finding as `--json` prints it."""
        return {
            "code": self.code, "severity": self.severity, "where": self.where,
            "message": self.message, "hint": self.hint,
        }


@dataclass(slots=True)
class Report:
    """Collects findings and the worst verdict while a checkpoint is read or verified.

    `limit` findings of one code are kept; the rest are counted in `suppressed`, so that a file of a million faults
    stays readable and bounded.
    """

    findings: list[Finding] = field(default_factory=list)
    verdict: Verdict = "safe"
    limit: int = 20
    suppressed: dict[str, int] = field(default_factory=dict)
    _counts: dict[str, int] = field(default_factory=dict)

    def add(
        self, code: str, message: str, *, where: str = "", hint: str = "", severity: Severity | None = None
    ) -> None:
        """Record a finding; its severity is the table's unless a reader knows better."""
        self.extend([Finding(code, severity or DEFAULT_SEVERITY[code], message, where, hint)])

    def extend(self, findings: Iterable[Finding]) -> None:
        """Record findings, each exact repetition once."""
        for finding in findings:
            n = self._counts.get(finding.code, 0)
            if n >= self.limit:
                self.suppressed[finding.code] = self.suppressed.get(finding.code, 0) + 1
            elif finding not in self.findings:
                self.findings.append(finding)
                self._counts[finding.code] = n + 1

    def worsen(self, verdict: Verdict) -> None:
        """Lower the verdict to `verdict` if that is worse; a verdict never improves."""
        self.verdict = max(self.verdict, verdict, key=VERDICTS.index)

    @property
    def errors(self) -> list[Finding]:
        """The findings that refuse a conversion."""
        return [f for f in self.findings if f.severity == "error"]

    def ordered(self) -> list[Finding]:
        """Worst first; within one severity in the order found."""
        return sorted(self.findings, key=lambda f: SEVERITIES.index(f.severity))


def fail(code: str, message: str, *, where: str = "", hint: str = "") -> CheckpointError:
    """Make the exception for a fault that ends the reading: `raise fail("truncated", ...)`."""
    kind = NotACheckpoint if code == "not-a-checkpoint" else CheckpointError
    return kind(Finding(code, "error", message, where, hint))


def located(error: CheckpointError, where: str) -> CheckpointError:
    """The same fault with its place filled in, for code that knows the place only one level up."""
    finding = error.finding
    return type(error)(replace(finding, where=f"{where}, {finding.where}" if finding.where else where))


def worst(findings: Iterable[Finding]) -> Severity | None:
    """The worst severity among `findings`, None where there are none."""
    found: Iterator[Severity] = (f.severity for f in findings)
    return min(found, key=SEVERITIES.index, default=None)
