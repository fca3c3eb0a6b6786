"""Views: the same checkpoint seen otherwise, lazily. One table, view name -> function; a new view is one row here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from types import MappingProxyType

from anyckpt.core.checkpoint import Checkpoint
from anyckpt.errors import UsageError

VIEWS: Mapping[str, str] = MappingProxyType(
    {
        "stripped": "anyckpt.names.prefixes:stripped",
        "modernised": "anyckpt.names.versions:modernised",
        "dense": "anyckpt.verbs.dense:dense",
        "merged": "anyckpt.verbs.views:merged",
        "hf": "anyckpt.verbs.hub:hub",
    }
)
"""Loaded on first use. Each takes a Checkpoint and gives one, or raises UsageError where the view does not apply."""


def apply_view(checkpoint: Checkpoint, name: str) -> Checkpoint:
    """The checkpoint as `name` shows it. Raises UsageError for an unknown view, listing those there are."""
    where = VIEWS.get(name)
    if where is None:
        raise UsageError(f"there is no view {name!r}; there are: {', '.join(VIEWS)}")
    module, _, function = where.partition(":")
    view: Callable[[Checkpoint], Checkpoint] = getattr(import_module(module), function)
    return view(checkpoint)


def merged(checkpoint: Checkpoint) -> Checkpoint:
    """An adapter put into its base model, where the adapter's config names one that lies beside or below the adapter.

    A path in a file is a stranger's, so no other place is opened unasked: `formats.peft.merged(base, adapter)` takes
    any base. Raises UsageError where there is no adapter or no such base.
    """
    if checkpoint.format != "peft":
        raise UsageError("only an adapter can be merged into its base")
    named = (checkpoint.config or {}).get("base_model_name_or_path")
    folder = Path(checkpoint.path).resolve()
    found = [folder / named, folder.parent / Path(named).name] if isinstance(named, str) and named else []
    base = next((p.resolve() for p in found if _is_near(p.resolve(), folder)), None)
    if base is None:
        raise UsageError(
            f"the adapter's base model ({named or 'not named'}) is not beside it",
            hint="name the base model: anyckpt convert BASE OUT --merge-adapter ADAPTER",
        )
    from anyckpt.formats.peft import merged as merge
    from anyckpt.verbs.open import open

    result: Checkpoint = merge(open(base), checkpoint)
    return result


def _is_near(path: Path, folder: Path) -> bool:
    return path.exists() and path != folder and folder.parent in path.parents
