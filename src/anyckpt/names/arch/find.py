"""Which architecture a config means, and tensors from one family's names to the other's by its table."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cache
from importlib import import_module
from typing import Any

from anyckpt.core.tensor import Tensor
from anyckpt.errors import UsageError
from anyckpt.finding import fail
from anyckpt.io.paths import printable
from anyckpt.names.arch.table import Architecture, Rule

MODULES = (
    "llama", "mixtral", "qwen2", "qwen3", "qwen3moe", "gemma2", "gemma3", "phi3", "gpt2", "bert", "deepseek2",
)  # fmt: skip
"""One module each; a new architecture is one module and its name here."""

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


@cache
def architectures() -> tuple[Architecture, ...]:
    """All tables."""
    return tuple(import_module(f"anyckpt.names.arch.{name}").ARCHITECTURE for name in MODULES)


def of_config(config: Mapping[str, Any]) -> Architecture:
    """The table of a Hugging Face config, by its class, else its model type. Raises UsageError listing those there
    are.
    """
    classes = config.get("architectures")
    first = classes[0] if isinstance(classes, list) and classes else None
    kind = config.get("model_type")
    for found in architectures():
        if first in found.architectures:
            return found
    for found in architectures():
        if kind in found.model_types:
            return found
    known = ", ".join(a.name for a in architectures())
    raise UsageError(f"no table for the architecture {printable(str(first or kind))}", hint=f"there are: {known}")


def named(name: str) -> Architecture:
    """The table of that name. Raises UsageError listing those there are."""
    for found in architectures():
        if found.name == name:
            return found
    known = ", ".join(a.name for a in architectures())
    raise UsageError(f"no table for the architecture {printable(name)!r}", hint=f"there are: {known}")


def template_of(name: str) -> tuple[str, tuple[int, ...]]:
    """A name with its numbers taken out, and the numbers: the first is a layer's, the second an expert's."""
    numbers = tuple(int(n) for n in _NUMBER.findall(name))
    places = iter(("{layer}", "{expert}", "{other}", "{another}"))
    return _NUMBER.sub(lambda _: next(places, "{}"), name), numbers


@dataclass(frozen=True, slots=True)
class Mapped:
    """Tensors under the other names, in the order their last part came, and the names left out on purpose."""

    tensors: dict[str, Tensor]
    ignored: tuple[str, ...]


def forward(
    weights: Mapping[str, Tensor],
    architecture: Architecture,
    rules: Sequence[Rule],
    config: Mapping[str, Any],
    drop: Callable[[str], bool] = lambda _: False,
) -> Mapped:
    """From Hugging Face names to those of `rules`.

    `drop` says of a name that it is left out. Raises CheckpointError [unmapped-tensor] for a name that no rule knows,
    naming the nearest, and [missing-tensor] where a rule's tensors are not all there.
    """
    places: dict[str, list[tuple[int, int]]] = {}
    for r, rule in enumerate(rules):
        for i, pattern in enumerate(rule.hf):
            places.setdefault(pattern, []).append((r, i))
    # (rule, layer, expert where the rule makes one of each) -> (which of hf, expert among those it takes) -> name
    held: dict[tuple[int, int, int], dict[tuple[int, int], str]] = {}
    last: dict[tuple[str, int], int] = {}
    ignored: list[str] = []
    for position, name in enumerate(weights):
        found = next((c for c in _spellings(name, architecture) if template_of(c)[0] in places), None)
        if drop(name) or (found is None and _is_ignored(name, architecture)):
            ignored.append(name)
            continue
        if found is None:
            raise _unmapped(name, list(places))
        template, numbers = template_of(found)
        layer, expert = (*numbers, -1, -1)[:2]
        for r, i in places[template]:
            own, among = (expert, -1) if "{expert}" in rules[r].name else (-1, expert)
            held.setdefault((r, layer, own), {})[i, among] = name
            last[_group(rules, r), layer] = position
    order = sorted(held, key=lambda key: (last[_group(rules, key[0]), key[1]], key[0], key[2]))
    tensors: dict[str, Tensor] = {}
    for r, layer, own in order:
        rule, parts = rules[r], held[r, layer, own]
        _check_complete(rule, layer, own, parts)
        sources = [weights[parts[key]] for key in sorted(parts)]
        names = [_filled(n, layer, own) for n in (rule.name, *rule.also)]
        made = rule.parting.split(sources[0], config) if rule.parting else [rule.op.forward(sources, config)]
        tensors.update(zip(names, made, strict=True))
    return Mapped(tensors, tuple(ignored))


def inverse(weights: Mapping[str, Tensor], rules: Sequence[Rule], config: Mapping[str, Any]) -> Mapped:
    """From the names of `rules` back to Hugging Face's; the first rule of a name holds. Raises as `forward` does."""
    places: dict[str, Rule] = {}
    partners: dict[str, str] = {}
    for rule in rules:
        if rule.name not in places:
            places[rule.name] = rule
            partners.update(dict.fromkeys((n for n in rule.also if n not in places), rule.name))
    tensors: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        template, numbers = template_of(name)
        if template in partners and template not in places:
            continue
        found = places.get(template)
        if found is None:
            raise _unmapped(name, [*places])
        layer, expert = (*numbers, -1, -1)[:2]
        if found.parting:
            parts = [tensor, *(weights[_filled(n, layer, expert)] for n in found.also)]
            made = [found.parting.join(parts, config)]
        else:
            made = found.op.inverse(tensor, config)
        names = [_filled(n, layer, expert) for n in found.hf]
        if len(names) == 1 and "{expert}" in names[0]:
            names = [names[0].replace("{expert}", str(i)) for i in range(len(made))]
        tensors.update(zip(names, made, strict=True))
    return Mapped(tensors, ())


def _spellings(name: str, architecture: Architecture) -> list[str]:
    """The name, and as it would be in a model with its prefix, without it, or without the vision model around it."""
    prefix = architecture.prefix
    plain = name.replace("language_model.", "")
    return [name, prefix + name, name.removeprefix(prefix), plain, prefix + plain]


def _is_ignored(name: str, architecture: Architecture) -> bool:
    return any(fnmatchcase(c, glob) for glob in architecture.ignored for c in _spellings(name, architecture))


def _group(rules: Sequence[Rule], r: int) -> str:
    return rules[r].together or str(r)


def _check_complete(rule: Rule, layer: int, own: int, parts: Mapping[tuple[int, int], str]) -> None:
    """All tensors of a rule must be there, experts without a gap. `own`: the expert that the rule is for, -1: all."""
    n_experts = max(e for _, e in parts) + 1
    for i, pattern in enumerate(rule.hf):
        for expert in range(n_experts) if "{expert}" in pattern and own < 0 else (-1,):
            if (i, expert) not in parts:
                name = _filled(pattern, layer, max(own, expert))
                raise fail("missing-tensor", f"{name} is missing, beside {next(iter(parts.values()))}")


def _filled(pattern: str, layer: int, expert: int = -1) -> str:
    name = pattern.replace("{layer}", str(layer))
    return name.replace("{expert}", str(expert)) if expert >= 0 else name


def _unmapped(name: str, patterns: list[str]) -> Exception:
    near = get_close_matches(template_of(name)[0], patterns, 1, 0.3)
    return fail(
        "unmapped-tensor",
        f"no rule knows the tensor {printable(name)}" + (f"; the nearest is {near[0]}" if near else ""),
        hint=f"leave it out with --exclude '{printable(name)}' if it is no part of the model",
    )
