"""Say in sentences what a pickle would have done, and what stands between it and `torch.load(weights_only=True)`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from anyckpt.finding import Verdict
from anyckpt.pickle.result import Import, Result
from anyckpt.pickle.weights_only import SINCE_TORCH

_VERDICTS: dict[Verdict, str] = {
    "safe": "Every name in it is known to be harmless, and is used as saved objects use it.",
    "unknown": "It names classes or functions that are not known to be harmless. Nothing was imported to find out.",
    "dangerous": "Loading it with pickle or torch.load(weights_only=False) would run code. Do not.",
}
_MAX_NAMES = 20


def explain(results: Result | Sequence[Result]) -> list[str]:
    """Sentences about one or more streams: the verdict, the names behind it, faults, and how torch would take it."""
    streams = [results] if isinstance(results, Result) else list(results)
    imports = distinct(item for stream in streams for item in stream.imports)
    verdict: Verdict = max((s.verdict for s in streams), key=list(_VERDICTS).index, default="safe")
    lines = [_VERDICTS[verdict]]
    for word in ("dangerous", "unknown"):
        named = [item for item in imports if item.verdict == word]
        lines += [f"{item.path} {item.reason}{_where(item)}." for item in named[:_MAX_NAMES]]
        if len(named) > _MAX_NAMES:
            lines.append(f"{len(named) - _MAX_NAMES} more {word} names are left out.")
    # Uses that are worse than the names themselves, such as the call of a call's result.
    used = {f.message for s in streams for f in s.findings if f.code in ("dangerous-code", "unknown-code")}
    lines += sorted(f"{m[0].upper()}{m[1:]}." for m in used if not m.startswith(("the pickle names", "behind the")))
    lines += [
        f"The pickle breaks at byte {s.end:,}; what a loader executes before that byte still counts."
        for s in streams
        if not s.complete
    ]
    return lines + weights_only(imports)


def weights_only(imports: Iterable[Import]) -> list[str]:
    """What `torch.load(weights_only=True)` refuses in it, and the oldest torch that knows its rebuild functions."""
    named = distinct(imports)
    refused = [item.path for item in named if not item.weights_only]
    lines = []
    if refused:
        shown = ", ".join(refused[:_MAX_NAMES])
        if len(refused) > _MAX_NAMES:
            shown += f" and {len(refused) - _MAX_NAMES} more"
        lines.append(f"torch.load(weights_only=True) refuses it because of {shown}.")
        harmless = [item.path for item in named if not item.weights_only and item.verdict == "safe"]
        if len(harmless) == len(refused):
            lines.append("All of these are harmless: torch.serialization.add_safe_globals with them would load it.")
    since = [(_release(SINCE_TORCH[item.path]), item) for item in named if item.path in SINCE_TORCH]
    if since:
        newest, item = max(since, key=lambda pair: pair[0])
        if newest > (1, 0):
            lines.append(f"It needs torch {SINCE_TORCH[item.path]} or later, for {item.path}.")
    return lines


def distinct(imports: Iterable[Import]) -> list[Import]:
    """Each name once, in order of first appearance; the one that was called where any was."""
    out: dict[str, Import] = {}
    for item in imports:
        if item.path not in out or (item.called and not out[item.path].called):
            out[item.path] = item
    return list(out.values())


def _where(item: Import) -> str:
    how = "called" if item.called else "named"
    written = "" if (item.module, item.name) == (item.resolved_module, item.resolved_name) else (
        f", written as {item.module}.{item.name}"
    )
    return f" ({how}, first at byte {item.position:,}{written})"


def _release(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))
