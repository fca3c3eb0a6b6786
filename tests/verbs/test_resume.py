"""Whether training can go on at a size, and the command that makes it possible where not."""

from __future__ import annotations

from pathlib import Path

import pytest

import anyckpt
from anyckpt.errors import UsageError
from anyckpt.verbs.resume import judge, own, parse
from anyckpt.verbs.verify import verify

DCP, RANKS = "torch/dcp_fsdp2_w2/ckpt", "torch/fsdp2_rank_files_w2/ckpt"


def test_dcp_resumes_anywhere_and_says_what_is_lost(corpus: Path) -> None:
    checkpoint = anyckpt.open(corpus / DCP)
    assert judge(checkpoint, "fsdp world=2").lost == ()
    answer = judge(checkpoint, "fsdp world=8")
    assert answer.can
    assert "2 processes" in answer.lost[0]


def test_rank_files_resume_at_their_own_world_only(corpus: Path) -> None:
    checkpoint = anyckpt.open(corpus / RANKS)
    assert judge(checkpoint, "fsdp world=2").can
    answer = judge(checkpoint, "fsdp world=8")
    assert not answer.can
    assert answer.command == f"anyckpt convert {corpus / RANKS} OUT --to dcp --world 8"
    mine = own(checkpoint)
    assert mine is not None
    assert mine.can


def test_verify_fails_with_the_command_as_hint(corpus: Path) -> None:
    found = verify(corpus / RANKS, resume="fsdp world=8")
    assert not found.ok
    error = next(f for f in found.findings if f.severity == "error")
    assert (error.code, error.hint.startswith("run: anyckpt convert")) == ("wrong-topology", True)
    assert found.as_dict()["resume"]["resumes"] is False


@pytest.mark.parametrize("text", ["horovod", "fsdp world=x", "fsdp wrld=8", "fsdp 8"])
def test_what_is_not_known_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse(text)


def test_weights_alone_do_not_resume(corpus: Path) -> None:
    assert "no optimizer" in judge(anyckpt.open(corpus / "torch/dcp_hf_sharded_w2/ckpt"), "fsdp world=2").why
