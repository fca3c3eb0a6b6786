"""PEFT adapter folders, and an adapter merged into its base model.

    adapter_config.json               peft_type, r, lora_alpha, target_modules, base_model_name_or_path …
    adapter_model.safetensors         base_model.model.<module>.lora_A.weight [r, in], .lora_B.weight [out, r]
                     (or .bin)        .lora_embedding_A [r, n], .lora_embedding_B [width, r], .lora_magnitude_vector
                                      base_model.model.<module>.weight for modules_to_save, .bias for trained biases

Facts from peft 0.21.2 `tuners/lora/layer.py`, `dora.py`, `utils/other.py`. Merging follows `merge_and_unload`; in half
precision the sum is rounded once, where peft may round the product first.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from anyckpt.core.checkpoint import Checkpoint
from anyckpt.core.dtypes import DTYPES
from anyckpt.core.ops import Lora, reshape
from anyckpt.core.tensor import Tensor, filled
from anyckpt.errors import UsageError
from anyckpt.finding import Finding, Report
from anyckpt.formats import hf
from anyckpt.formats.hf.sets import find_sets
from anyckpt.io.paths import printable
from anyckpt.io.place import Place

CONFIG = "adapter_config.json"
PREFIX = "base_model.model."
_PART = re.compile(
    r"(?P<module>.*)\.(?P<part>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)(\.default)?"
    r"(\.(?P<kind>weight|bias))?"
)
_PLAIN_PATTERN = re.compile(r"(?:[\w.\-^$|()]|\\[.d]|[\w.](?:\*|\+)){1,300}")
_WRAPPED = re.compile(r"\.(modules_to_save(\.default)?|original_module|base_layer)(?=\.)")

NOT_MERGEABLE = (
    "alora_invocation_tokens", "arrow_config", "layer_replication", "megatron_config", "monteclora_config",
    "target_parameters", "trainable_token_indices", "use_bdlora", "use_qalora", "velora_config",
)
"""Options under which an adapter is more than B·A, or other than it; each makes merging mean something else."""

CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga", "mica")
"""Initialisations that also change the base model's weights: the adapter fits only a base changed alike."""


def matches(place: Place) -> bool:
    """Whether an adapter's config and its weights lie in the folder."""
    return CONFIG in place.names and bool(_adapter_sets(place))


def _adapter_sets(place: Place) -> list[Any]:
    own = [name for name in (*place.names, *place.kinds) if "/" not in name]
    return [s for s in find_sets(own) if s.stem == "adapter_model"]


def read(place: Place, report: Report) -> Checkpoint:
    """The adapter's tensors under the file's names; `config` is the adapter's. The base model need not be there."""
    config = hf.read_config(place, CONFIG, report) or {}
    checkpoint = hf.read_sets(place, _adapter_sets(place), report, format="peft")
    base = config.get("base_model_name_or_path")
    facts = {**checkpoint.facts, "base": base if isinstance(base, str) else None}
    return replace(checkpoint, config=config, aliases={}, facts=facts)


verify = hf.verify


@dataclass(slots=True)
class Factors:
    """What an adapter holds for one module, by the names peft gives the parts."""

    parts: dict[str, Tensor] = field(default_factory=dict)

    @property
    def is_embedding(self) -> bool:
        return "lora_embedding_A" in self.parts

    def pair(self, module: str) -> tuple[Tensor, Tensor]:
        """A and B; raises UsageError where one is missing or they do not fit together."""
        stem = "lora_embedding_" if self.is_embedding else "lora_"
        a, b = self.parts.get(f"{stem}A"), self.parts.get(f"{stem}B")
        if a is None or b is None or a.ndim < 2 or b.ndim < 2 or a.shape[0] != b.shape[1]:
            message = f"the adapter's factors for {printable(module)} are not a pair"
            raise UsageError(message, hint="get the adapter again")
        return a, b


def merged(base: Checkpoint, adapter: Checkpoint) -> Checkpoint:
    """The base model with the adapter's changes in its weights, lazily; training state and the adapter itself left out.

    Raises UsageError for an adapter of another kind, for options under which its product can't be merged, and where its
    modules are not in `base` or differ in shape. Nothing of the adapter is left unused in silence.
    """
    if adapter.format != "peft":
        raise UsageError(f"{printable(adapter.path)} is no PEFT adapter", hint=f"a folder with {CONFIG} is wanted")
    config = dict(adapter.config or {})
    _refuse(config)
    factors, whole = _parts(adapter.weights)
    prefix = _prefix(base.weights, [f"{module}.weight" for module in factors])
    weights: dict[str, Tensor] = dict(base.weights)
    aliases = dict(base.aliases)
    for name, tensor in whole.items():
        target = _target(prefix + name, weights, "saves")
        aliases.pop(target, None)
        weights[target] = tensor
    for module, found in factors.items():
        target = aliases.get(t := _target(f"{prefix}{module}.weight", weights, "changes"), t)
        weights[target] = _apply(weights[target], found, module, config)
        if "lora_B.bias" in found.parts:
            bias = _target(f"{prefix}{module}.bias", weights, "changes")
            weights[bias] = _with_bias(weights[bias], found.parts["lora_B.bias"], scaling(config, module, found))
    for name, stored in aliases.items():
        weights[name] = weights[stored]
    untied = sorted(set(base.aliases) - set(aliases))
    findings = [f for f in base.findings if f.code != "tied" or not untied]
    if untied:
        message = f"the adapter trained {', '.join(map(printable, untied))} apart from the tensor it was tied to"
        findings.append(Finding("tied", "note", message, where=adapter.path))
    return replace(
        base, weights=weights, aliases=aliases, optimizer=None, scheduler=None, rng=None, state={},
        config=_config(base.config, bool(untied)), findings=tuple(findings),
        assets=tuple(a for a in base.assets if not untied or a.name != "config.json"),
        facts={**base.facts, "adapter": adapter.path},
    )  # fmt: skip


def _refuse(config: Mapping[str, Any]) -> None:
    """Raise UsageError for adapters that merging by B·A would get wrong."""
    kind = config.get("peft_type")
    if kind != "LORA":
        raise UsageError(f"adapters of type {kind!r} can't be merged; LORA can", hint="merge it with peft itself")
    for option in NOT_MERGEABLE:
        if config.get(option):
            raise UsageError(f"an adapter with {option} can't be merged", hint="merge it with peft itself")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(CHANGES_BASE):
        raise UsageError(
            f"the adapter was started with {printable(start)}, which changes the base model too: merged into the plain "
            "base it would be wrong",
            hint="convert it to a plain LoRA with peft first (path_initial_model_for_weight_conversion)",
        )


def _parts(weights: Mapping[str, Tensor]) -> tuple[dict[str, Factors], dict[str, Tensor]]:
    """The low-rank factors by module, and the tensors that replace the base's by name."""
    factors: dict[str, Factors] = {}
    whole: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        plain = name.removeprefix(PREFIX)
        match = _PART.fullmatch(plain)
        if match is None:
            whole[_WRAPPED.sub("", plain)] = tensor
            continue
        part = match["part"] + (".bias" if match["kind"] == "bias" else "")
        factors.setdefault(_WRAPPED.sub("", match["module"] + ".")[:-1], Factors()).parts[part] = tensor
    return factors, whole


def _prefix(weights: Mapping[str, Tensor], wanted: Iterable[str]) -> str:
    """What stands before the adapter's names in the base: a base may hold a model inside of the one adapted."""
    wanted = list(wanted)
    if not wanted or all(name in weights for name in wanted):
        return ""
    ends = [name[: -len(wanted[0])] for name in weights if name.endswith("." + wanted[0])]
    return next((p for p in ends if all(p + name in weights for name in wanted)), "")


def _target(name: str, weights: Mapping[str, Tensor], does: str) -> str:
    if name not in weights:
        raise UsageError(
            f"the adapter {does} {printable(name)}, which the base does not have",
            hint="it was trained on another model; its adapter_config.json names it",
        )
    return name


def scaling(config: Mapping[str, Any], module: str, found: Factors) -> float:
    """lora_alpha / r, or lora_alpha / √r with rsLoRA; patterns override both for the modules they match.

    Raises UsageError where the rank of the file is not that of the config: the scale would then be wrong.
    """
    rank = found.pair(module)[0].shape[0]
    r = _by_pattern(config.get("rank_pattern"), module, config.get("r"))
    alpha = _by_pattern(config.get("alpha_pattern"), module, config.get("lora_alpha"))
    if r != rank or not isinstance(alpha, int | float):
        raise UsageError(f"{printable(module)} has rank {rank}, {CONFIG} says {r} with lora_alpha {alpha}")
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _by_pattern(patterns: Any, module: str, default: Any) -> Any:
    """The value of the first pattern that the module's name ends with, as peft finds it: a regular expression.

    Only plain ones are followed, since a crafted expression may take for ever.
    """
    for pattern, value in (patterns if isinstance(patterns, dict) else {}).items():
        try:
            if not _PLAIN_PATTERN.fullmatch(pattern) or pattern.count("*") + pattern.count("+") > 3:
                raise re.error("too intricate")
            if re.match(rf"(.*\.)?({pattern})$", module):
                return value
        except re.error as error:
            shown = printable(str(pattern), limit=60)
            raise UsageError(f"the pattern '{shown}' in {CONFIG} can't be followed: {error}") from error
    return default


def _apply(base: Tensor, found: Factors, module: str, config: Mapping[str, Any]) -> Tensor:
    """W + scaling · B·A for a linear layer, a convolution or an embedding."""
    a, b = found.pair(module)
    scale = scaling(config, module, found)
    if base.dtype.kind != "float" or base.dtype.itemsize < 2:
        hint = "merge into the base before it was quantized"
        raise UsageError(f"{printable(module)} is {base.dtype} in the base", hint=hint)
    magnitude = found.parts.get("lora_magnitude_vector")
    if bool(config.get("use_dora")) != (magnitude is not None):
        raise UsageError(f"{CONFIG} and the adapter's tensors disagree about DoRA for {printable(module)}")
    if found.is_embedding:
        if magnitude is not None:
            raise UsageError("DoRA on an embedding can't be merged", hint="merge it with peft itself")
        return _lora(base, a, b, scale, True, None, module)
    if base.ndim > 2:  # a convolution's kernel is a matrix [out, in · height · width]
        flat_a, flat_b = reshape(a, (a.shape[0], prod(a.shape[1:]))), reshape(b, (b.shape[0], prod(b.shape[1:])))
        flat = reshape(base, (base.shape[0], prod(base.shape[1:])))
        return reshape(_lora(flat, flat_a, flat_b, scale, False, magnitude, module), base.shape)
    n_out, n_in = b.shape[0], a.shape[1]
    transposed = base.shape == (n_in, n_out) and (n_in != n_out or bool(config.get("fan_in_fan_out")))
    return _lora(base, a, b, scale, transposed, magnitude, module)


def _lora(
    base: Tensor, a: Tensor, b: Tensor, scale: float, transposed: bool, magnitude: Tensor | None, module: str
) -> Tensor:
    shape = (a.shape[1], b.shape[0]) if transposed else (b.shape[0], a.shape[1])
    if base.shape != shape or a.ndim != 2 or b.ndim != 2:
        raise UsageError(f"{printable(module)} is {list(base.shape)} in the base, the adapter is for {list(shape)}")
    if magnitude is not None:
        magnitude = reshape(magnitude, (magnitude.size,))
        if magnitude.size != b.shape[0]:
            raise UsageError(f"the magnitudes of {printable(module)} are {magnitude.size}, not {b.shape[0]}")
    return Tensor(base.dtype, base.shape, op=Lora(base, a, b, scale, transposed, magnitude))


def _with_bias(base: Tensor, bias: Tensor, scale: float) -> Tensor:
    """base + scale · bias, as a product of rank one."""
    if base.shape != bias.shape:
        raise UsageError(f"a trained bias is {list(bias.shape)}, the base's {list(base.shape)}")
    one = filled(DTYPES["float32"], (1, 1), b"\0\0\x80\x3f")
    column = reshape(base, (base.size, 1))
    product = Lora(column, one, reshape(bias, (bias.size, 1)), scale)
    return reshape(Tensor(base.dtype, column.shape, op=product), base.shape)


def _config(config: Mapping[str, Any] | None, untied: bool) -> Mapping[str, Any] | None:
    return {**config, "tie_word_embeddings": False} if config is not None and untied else config
