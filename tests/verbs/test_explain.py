"""Every code of the table has a page, and there is no page of anything else."""

from __future__ import annotations

import pytest

from anyckpt.errors import UsageError
from anyckpt.finding import DEFAULT_SEVERITY
from anyckpt.verbs.explain import explain, pages


def test_every_code_has_a_page_and_every_page_a_code() -> None:
    assert set(pages()) == set(DEFAULT_SEVERITY)


@pytest.mark.parametrize("code", DEFAULT_SEVERITY)
def test_a_page_says_what_why_and_what_to_do(code: str) -> None:
    page = explain(code)
    for text in (page.meaning, page.why, page.do):
        assert text.endswith("."), text
        assert len(text) < 500


def test_spellings_and_a_wrong_word() -> None:
    assert explain("[zero_tail]").code == "zero-tail"
    with pytest.raises(UsageError) as caught:
        explain("trunkated")
    assert caught.value.hint == "did you mean truncated?"
