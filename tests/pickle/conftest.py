"""Hostile pickles of the wider corpus, and a small storage to make tensors over."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from anyckpt.core.source import Inline
from anyckpt.pickle.storage import Storage, storage_id


@pytest.fixture(scope="session")
def hostile(corpus: Path) -> list[tuple[str, dict[str, Any], bytes]]:
    """(name, expectation, bytes) of every hostile case that is one bare pickle."""
    folders = sorted((corpus / "hostile").glob("pkl_*"))
    if not folders:
        pytest.skip("the corpus beside this checkout has no hostile pickles")
    cases = [(folder, json.loads((folder / "case.json").read_text())) for folder in folders]
    return [(folder.name, case["expect"], (folder / case["path"]).read_bytes()) for folder, case in cases]


@pytest.fixture
def persistent() -> Callable[[Any], Any]:
    """Storages of counted bytes: byte i of each is i % 251."""

    def load(pid: Any) -> Storage:
        found = storage_id(pid)
        data = bytes(i % 251 for i in range(found.n_bytes))
        return Storage(Inline(data), found.dtype, found.key, found.location, found.n_bytes, found.n_elements)

    return load
