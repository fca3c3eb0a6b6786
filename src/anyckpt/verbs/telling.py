"""Order findings so that the cause comes first and its echoes are left out.

One fault is often seen twice: a file that is cut short also has tensors out of bounds and checksums that do not fit.
A user (and a script) wants the cause.
"""

from __future__ import annotations

from collections.abc import Iterable

from anyckpt.finding import SEVERITIES, Finding

# A cause -> what it makes other checks say of the same file.
ECHOES: dict[str, frozenset[str]] = {
    "truncated": frozenset(
        "offset-out-of-bounds crc-mismatch missing-record size-mismatch offset-hole zip-inconsistent trailing-data "
        "malformed-pickle missing-tensor zero-tail".split()
    ),
    "zero-tail": frozenset("all-zero crc-mismatch".split()),
    "zero-head": frozenset("bad-header not-a-checkpoint".split()),
    "lfs-pointer": frozenset("not-a-checkpoint missing-tensor size-mismatch".split()),
    "html-page": frozenset("not-a-checkpoint missing-tensor".split()),
    "empty-file": frozenset("not-a-checkpoint truncated missing-tensor".split()),
    "missing-shard": frozenset("missing-tensor".split()),
    "path-escape": frozenset("missing-shard missing-tensor".split()),
    "size-overflow": frozenset("size-mismatch offset-out-of-bounds".split()),
    "offset-overlap": frozenset("offset-hole size-mismatch".split()),
}
ANYWHERE = frozenset("missing-tensor".split())  # echoes that name another place than their cause


def most_telling_first(findings: Iterable[Finding]) -> list[Finding]:
    """The findings without echoes, errors first; within a severity causes come before the rest, then as found."""
    kept = list(findings)
    places: dict[str, set[str]] = {}
    for finding in kept:
        if finding.code in ECHOES:
            places.setdefault(finding.code, set()).add(_file(finding))
    kept = [finding for finding in kept if not _is_echo(finding, places)]
    return sorted(kept, key=lambda f: (SEVERITIES.index(f.severity), f.code not in ECHOES))


def _is_echo(finding: Finding, places: dict[str, set[str]]) -> bool:
    for cause, files in places.items():
        if finding.code in ECHOES[cause] and (finding.code in ANYWHERE or _file(finding) in files):
            return True
    return False


def _file(finding: Finding) -> str:
    """The file a finding is about: `where` up to the first comma or member mark."""
    return finding.where.partition(",")[0].partition("!")[0]
