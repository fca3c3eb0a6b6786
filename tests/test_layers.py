"""The import order of DESIGN: a module imports from its own level and those below, wherever the import stands."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parent.parent / "src"
PACKAGE = SOURCE / "anyckpt"

# Lowest first. Packages of one level may import each other, except as FORBIDDEN says.
LEVELS = [
    {"errors", "finding", "core"},
    {"io", "pickle"},
    {"formats", "sharding", "names"},
    {"plan"},
    {"verbs"},
    {"cli", "web"},
]
FORBIDDEN = {("formats", "names")}  # what models are called is no format's business
ANYWHERE = {"", "testing", "__main__"}  # the lazy front (`anyckpt/__init__.py`), the shipped test suite, `python -m`

# Convenience methods that go up (`Tensor.torch()`, `Checkpoint.view()`, `Checkpoint.save()`): only inside a function,
# only from these modules to these packages.
UPWARD = {
    ("core.tensor", "verbs"),
    ("core.checkpoint", "verbs"),
}

Import = tuple[str, int, bool]  # what is imported, below the package; the line; whether inside a function


def level_of(part: str) -> int:
    for level, parts in enumerate(LEVELS):
        if part in parts:
            return level
    raise AssertionError(f"anyckpt.{part} has no place in the import order: add it to DESIGN and to LEVELS")


def module_name(path: Path) -> str:
    """`core.tensor` for src/anyckpt/core/tensor.py, "" for the package itself."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(tree: ast.AST, package: str) -> Iterator[Import]:
    """Every import of our own modules in a file whose package is `package` ("anyckpt.core"), TYPE_CHECKING included."""
    inside: dict[ast.AST, bool] = {tree: False}
    for node in ast.walk(tree):  # parents come before their children
        here = inside[node] or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for child in ast.iter_child_nodes(node):
            inside[child] = here
        targets: list[str] = []
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                up = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*up, *([base] if base else [])])
            # `from anyckpt import core` names a package; `from anyckpt.core import box` is settled by its base.
            targets = [f"anyckpt.{alias.name}" for alias in node.names] if base == "anyckpt" else [base]
        for target in targets:
            if target == "anyckpt" or target.startswith("anyckpt."):
                yield target.partition(".")[2], node.lineno, inside[node]


def faults(path: Path, text: str) -> list[str]:
    """Each import of the file that goes up, or across where it may not."""
    name = module_name(path)
    part = name.partition(".")[0]
    if part in ANYWHERE:
        return []
    level = level_of(part)
    package = f"anyckpt.{name}" if path.name == "__init__.py" else f"anyckpt.{name}".rpartition(".")[0]
    found = []
    for target, line, in_function in imports(ast.parse(text), package):
        other = target.partition(".")[0]
        public = not (PACKAGE / f"{other}.py").exists() and not (PACKAGE / other).is_dir()
        if other == "" or public:  # `import anyckpt`, or a name that its lazy front serves, such as __version__
            if other not in ("", "__version__"):
                found.append(f"{path}:{line}: {name} imports anyckpt.{other} from the public front: name its module")
            continue
        if other in ANYWHERE:
            found.append(f"{path}:{line}: {name} imports anyckpt.{other}, which nothing may")
        elif (part, other) in FORBIDDEN:
            found.append(f"{path}:{line}: {part} never imports {other}")
        elif level_of(other) > level and not (in_function and (name, other) in UPWARD):
            found.append(f"{path}:{line}: {name} imports anyckpt.{target}, which is above it")
    return found


def modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if "__pycache__" not in path.parts)


@pytest.mark.parametrize("path", modules(), ids=lambda path: module_name(path) or "anyckpt")
def test_imports_go_down(path: Path) -> None:
    assert not faults(path, path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("module", "text", "n_faults"),
    [
        ("core/box.py", "from anyckpt.io import ranges", 1),
        ("core/box.py", "from anyckpt import io", 1),
        ("core/box.py", "from ..io import ranges", 1),
        ("core/box.py", "from . import dtypes", 0),
        ("core/box.py", "if TYPE_CHECKING:\n    from anyckpt.plan import plan", 1),
        ("core/tensor.py", "from anyckpt.verbs import save", 1),
        ("core/tensor.py", "def save():\n    from anyckpt.verbs import save", 0),
        ("core/box.py", "def save():\n    from anyckpt.verbs import save", 1),
        ("formats/__init__.py", "from anyckpt.names import ties", 1),
        ("formats/hf.py", "from anyckpt.sharding import tp", 0),
        ("formats/deepspeed/zero.py", "from ... import plan", 1),
        ("verbs/diff.py", "import anyckpt.cli.sink", 1),
        ("cli/main.py", "import numpy, anyckpt.verbs.diff", 0),
        ("cli/main.py", "from anyckpt import __version__", 0),
        ("verbs/diff.py", "from anyckpt import convert", 1),
    ],
)
def test_the_rule_itself(module: str, text: str, n_faults: int) -> None:
    assert len(faults(PACKAGE / module, text)) == n_faults


def imported_by(*arguments: str) -> set[str]:
    """The top-level packages that `python -m anyckpt ARGUMENTS` imports."""
    command = [sys.executable, "-X", "importtime", "-m", "anyckpt", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = (line for line in done.stderr.splitlines() if line.startswith("import time:"))
    return {row.rpartition("|")[2].strip().partition(".")[0] for row in rows}


@pytest.mark.parametrize("arguments", [["--version"], ["--help"]], ids=" ".join)
def test_starting_up_imports_no_numpy(arguments: list[str]) -> None:
    heavy = {"numpy", "torch", "ml_dtypes", "safetensors", "h5py", "fsspec"}
    assert not imported_by(*arguments) & heavy


def test_importing_the_library_imports_no_numpy() -> None:
    code = "import sys, anyckpt; print(sorted({'numpy', 'torch', 'click', 'rich'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
