"""The cause first, its echoes left out."""

from __future__ import annotations

from anyckpt.finding import DEFAULT_SEVERITY, Finding
from anyckpt.verbs.telling import most_telling_first


def found(code: str, where: str = "a.pt") -> Finding:
    return Finding(code, DEFAULT_SEVERITY[code], "…", where)


def codes(*findings: Finding) -> list[str]:
    return [f.code for f in most_telling_first(findings)]


def test_errors_come_first_then_warnings_then_notes() -> None:
    assert codes(found("tied"), found("non-finite"), found("bad-index")) == ["bad-index", "non-finite", "tied"]


def test_a_cut_file_is_told_once() -> None:
    cut = found("truncated", "a.pt")
    assert codes(found("offset-out-of-bounds", "a.pt, tensor w"), cut, found("crc-mismatch", "a.pt!data/0")) == [
        "truncated"
    ]


def test_the_same_fault_of_another_file_is_no_echo() -> None:
    assert codes(found("truncated", "a.pt"), found("crc-mismatch", "b.pt")) == ["truncated", "crc-mismatch"]


def test_tensors_of_a_missing_shard_are_not_told_one_by_one() -> None:
    assert codes(found("missing-tensor", "index.json"), found("missing-shard", "m-2-of-3")) == ["missing-shard"]
