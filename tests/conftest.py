"""What every test may ask for: the folders of files to read, and which tests run where."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
from hypothesis import settings

TESTS = Path(__file__).resolve().parent
CORPUS = TESTS.parent.parent / "shared" / "corpus"
JUDGES = ("torch", "safetensors", "transformers", "peft")


@pytest.fixture(scope="session")
def data() -> Path:
    """The project's own files, tests/data: a small real training run in the shapes people save (see its README.md)."""
    return TESTS / "data"


@pytest.fixture(scope="session")
def corpus() -> Path:
    """The wider corpus of files that the real frameworks wrote; it lies beside the repository and is not part of it."""
    if not CORPUS.is_dir():
        pytest.skip("the corpus of framework-made files is not beside this checkout (../shared/corpus)")
    return CORPUS


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked `frameworks` run only when the marker expression names them (`-m frameworks`)."""
    if "frameworks" in (config.option.markexpr or ""):
        return
    judged = [item for item in items if item.get_closest_marker("frameworks")]
    if judged:
        config.hook.pytest_deselected(items=judged)
        items[:] = [item for item in items if not item.get_closest_marker("frameworks")]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A judge that was asked for and is not there is a failure, not a skip."""
    if item.get_closest_marker("frameworks"):
        missing = [name for name in JUDGES if importlib.util.find_spec(name) is None]
        if missing:
            pytest.fail(f"needs {', '.join(missing)}: pip install -e '.[test,frameworks]'", pytrace=False)


# CI tries the same cases each time, so that a red run is a change's doing; everybody else's runs look for new ones.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")
