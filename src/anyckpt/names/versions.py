"""Older spellings of the same parameters, and names that only some versions of a model save.

Everything here is told, and changed only on request: `modernised` gives the newer spelling, `older` the former one, and
`materialised` computes a weight-normed weight from its two parts. Sources: torch.nn.utils (weight_norm, spectral_norm
and their parametrized forms, torch >= 2.0 and >= 1.9), transformers `modeling_utils` (`gamma`/`beta`, base-model
prefixes, `_keys_to_ignore_on_load_unexpected`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from anyckpt.core.box import Shape
from anyckpt.core.checkpoint import Checkpoint
from anyckpt.core.tensor import Tensor
from anyckpt.errors import Refused
from anyckpt.finding import DEFAULT_SEVERITY, Finding
from anyckpt.names.prefixes import rename_optimizer


def _any_shapes(_: Mapping[str, Shape]) -> bool:
    return True


def _norm_per_slice(shapes: Mapping[str, Shape]) -> bool:
    """weight_norm's g has v's length on one axis and 1 on the others."""
    return norm_axis(shapes["{p}_g"], shapes["{p}_v"]) is not None


@dataclass(frozen=True, slots=True)
class Spelling:
    """One row: names of one module's tensors then and now; `{p}` is the parametrized name (`weight`).

    All of `renames` must be there together, except where `each` is set. `module` is a pattern that the name of the
    module must match, for words that other modules use with another meaning.
    """

    title: str
    renames: Mapping[str, str]
    since: str
    module: str = ""
    each: bool = False
    fits: Callable[[Mapping[str, Shape]], bool] = _any_shapes


SPELLINGS: tuple[Spelling, ...] = (
    # `gamma` alone is a layer scale (ConvNeXt, CaiT) under its real name, so the module must be a norm by name.
    Spelling(
        "norm weights called gamma and beta",
        {"gamma": "weight", "beta": "bias"},
        "models ported from TensorFlow, as the first BERT files",
        module=r"(?i)(^|\.)[a-z0-9_]*(norm|ln|bn)[a-z0-9_]*$",
        each=True,
    ),
    Spelling(
        "weight norm",
        {"{p}_g": "parametrizations.{p}.original0", "{p}_v": "parametrizations.{p}.original1"},
        "torch.nn.utils.weight_norm; parametrizations.weight_norm since torch 2.0",
        fits=_norm_per_slice,
    ),
    Spelling(
        "spectral norm",
        {
            "{p}_orig": "parametrizations.{p}.original",
            "{p}_u": "parametrizations.{p}.0._u",
            "{p}_v": "parametrizations.{p}.0._v",
        },
        "torch.nn.utils.spectral_norm; parametrizations.spectral_norm since torch 1.9",
    ),
)


_OLDER = re.compile(r"(_[gvu]|_orig|gamma|beta)$")  # how any older name of the table ends: a quick no for the others
_NEWER = re.compile(r"(^|\.)parametrizations\.")


@dataclass(frozen=True, slots=True)
class Obsolete:
    """A buffer that older versions saved and newer ones compute. `n_axes`: what tells it from a parameter."""

    pattern: str
    why: str
    n_axes: tuple[int, ...]


OBSOLETE: tuple[Obsolete, ...] = (
    Obsolete(r"(^|\.)(attn|attention)\.masked_bias$", "a constant of masked attention", (0,)),
    Obsolete(r"(^|\.)(attn|attention)\.bias$", "a causal mask", (4,)),
    Obsolete(r"(^|\.)rotary_emb\.(inv_freq|cos_cached|sin_cached)$", "rotary frequencies, computed", (1, 2, 4)),
    Obsolete(r"(^|\.)(position_ids|token_type_ids)$", "a counting buffer", (2,)),
    Obsolete(r"(^|\.)attention\.rotary_emb\.scale$", "rotary scale, computed", (0, 1)),
)

_OBSOLETE_ENDS = (
    "attn.masked_bias", "attention.masked_bias", "attn.bias", "attention.bias", "inv_freq", "_cached", "_ids", ".scale",
)  # fmt: skip

# What transformers (5.24) calls `base_model_prefix`: the attribute under which a model with a head keeps the model
# without one. Model types whose prefix is their own name are in OWN_NAME; the table has the others.
BASE_PREFIXES: Mapping[str, tuple[str, ...]] = {
    "model": tuple(
        """llama mistral mixtral qwen2 qwen2_moe qwen3 qwen3_moe qwen3_next gemma gemma2 gemma3 gemma3_text phi phi3
        phimoe opt bart mbart pegasus whisper olmo olmo2 olmo3 olmoe cohere cohere2 deepseek_v2 deepseek_v3
        starcoder2 stablelm granite granitemoe persimmon nemotron glm glm4 glm4_moe smollm3 gpt_oss marian m2m_100
        blenderbot plbart xglm ernie4_5 exaone4 helium hunyuan_v1_dense jamba minimax ministral mimo modernbert
        seed_oss zamba zamba2""".split()
    ),
    "transformer": tuple(
        """gpt2 gptj gpt_neo gpt_bigcode bloom falcon mpt ctrl xlnet dbrx codegen xlm openai-gpt squeezebert t5 mt5 umt5
        longt5 flaubert imagegpt""".split()
    ),
    "bert": ("bert", "bert-generation", "big_bird", "megatron-bert"),
    "roberta": ("roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "xmod"),
    "deberta": ("deberta", "deberta-v2"),
    "vit": ("vit", "vit_msn"),
    "backbone": ("mamba", "mamba2", "falcon_mamba", "xlstm"),
    "language_model": ("llama4", "llama4_text", "mllama"),
}
OWN_NAME = frozenset(
    """albert beit biogpt bit clip convbert convnext convnextv2 deit dinov2 distilbert electra ernie esm fnet funnel
    gpt_neox ibert layoutlm longformer luke mobilebert mpnet nystromformer perceiver reformer regnet rembert resnet
    roformer rwkv segformer siglip swin swinv2 wav2vec2 hubert wavlm""".split()
)


def base_prefixes(config: Mapping[str, object] | None = None) -> list[str]:
    """Prefixes (`"transformer."`) that names may lack or have; only the model's own where the config tells it."""
    known = config.get("model_type") if config else None
    if known in OWN_NAME:
        return [f"{known}."]
    own = [f"{prefix}." for prefix, kinds in BASE_PREFIXES.items() if known in kinds]
    return own or [f"{prefix}." for prefix in (*BASE_PREFIXES, *sorted(OWN_NAME))]


def norm_axis(g: Shape, v: Shape) -> int | None:
    """The axis along which weight norm's `g` scales `v`, None where the shapes don't fit. The first of equals: all
    others have one element on it, so the result is the same.
    """
    if len(g) != len(v):
        return None
    return next((a for a in range(len(v)) if g == tuple(n if b == a else 1 for b, n in enumerate(v))), None)


@dataclass(frozen=True, slots=True)
class Respelled:
    """Names that are spelled in an older (or newer) way: `new_of[name]` the other spelling, by title of the row."""

    new_of: Mapping[str, str]
    n_by_title: Mapping[str, int] = field(default_factory=dict)
    since: Mapping[str, str] = field(default_factory=dict)


def older_names(shapes: Mapping[str, Shape], *, backwards: bool = False) -> Respelled:
    """Find names in an older spelling; with `backwards`, names in the newer one and what they used to be."""
    modules: dict[str, dict[str, str]] = {}
    mark = _NEWER if backwards else _OLDER
    for name in shapes:
        if mark.search(name):
            for row_module, leaf in _splits(name, backwards):
                modules.setdefault(row_module, {})[leaf] = name
    new_of: dict[str, str] = {}
    counts: dict[str, int] = {}
    for row in SPELLINGS if modules else ():
        before, after = (row.renames.values(), row.renames.keys()) if backwards else (row.renames, row.renames.values())
        pairs = list(zip(before, after, row.renames, strict=True))
        if backwards and row.each:
            continue  # a norm's `weight` and `bias` were gamma and beta in very few files: never offered by itself
        for module, leaves in modules.items():
            if row.module and not re.search(row.module, module):
                continue
            for p in _parametrized(leaves, pairs[0][0]) if not row.each else ("",):
                found = {old: new for old, new, _ in pairs if old.format(p=p) in leaves}
                if not found or (len(found) < len(pairs) and not row.each):
                    continue
                if not row.fits({key: shapes[leaves[old.format(p=p)]] for old, _, key in pairs if old in found}):
                    continue
                for old, new in found.items():
                    name = leaves[old.format(p=p)]
                    target = f"{module}.{new.format(p=p)}" if module else new.format(p=p)
                    if name not in new_of and target not in shapes:
                        new_of[name] = target
                        counts[row.title] = counts.get(row.title, 0) + 1
    return Respelled(new_of, counts, {row.title: row.since for row in SPELLINGS if row.title in counts})


def _splits(name: str, backwards: bool) -> list[tuple[str, str]]:
    """The module and the leaf of a name; backwards, the leaf begins at `parametrizations`."""
    if not backwards:
        module, _, leaf = name.rpartition(".")
        return [(module, leaf)]
    head, mark, tail = name.rpartition("parametrizations.")
    return [(head.rstrip("."), mark + tail)] if mark and (not head or head.endswith(".")) else []


def _parametrized(leaves: Collection[str], template: str) -> list[str]:
    """The parameter names `p` for which `template` is among the leaves."""
    pattern = re.compile("^" + re.escape(template).replace(r"\{p\}", "(.+)") + "$")
    return [match[1] for leaf in leaves if (match := pattern.match(leaf))]


def obsolete_names(shapes: Mapping[str, Shape]) -> dict[str, str]:
    """Buffers that newer versions of their models no longer save: name -> what it is."""
    found = {}
    for name, shape in shapes.items():
        if name.endswith(_OBSOLETE_ENDS):
            for row in OBSOLETE:
                if len(shape) in row.n_axes and re.search(row.pattern, name):
                    found[name] = row.why
                    break
    return found


def shapes_of(weights: Mapping[str, Tensor]) -> dict[str, Shape]:
    """Name -> shape."""
    return {name: tensor.shape for name, tensor in weights.items()}


def note(weights: Mapping[str, Tensor]) -> list[Finding]:
    """The `older-spelling` notes for names in older spellings and obsolete buffers."""
    shapes = shapes_of(weights)
    older, obsolete = older_names(shapes), obsolete_names(shapes)
    found = [
        Finding(
            "older-spelling", DEFAULT_SEVERITY["older-spelling"], f"{n:,} names: {title} ({older.since[title]})",
            where=next(iter(older.new_of)),
            hint=f"the newer name of {next(iter(older.new_of))} is {next(iter(older.new_of.values()))}",
        )
        for title, n in older.n_by_title.items()
    ]
    for why in dict.fromkeys(obsolete.values()):
        names = [name for name in obsolete if obsolete[name] == why]
        found.append(
            Finding(
                "older-spelling", DEFAULT_SEVERITY["older-spelling"],
                f"{len(names):,} buffers that newer versions don't save: {why}", where=names[0],
            )
        )
    return found


def modernised(checkpoint: Checkpoint, *, drop_obsolete: bool = False) -> Checkpoint:
    """The checkpoint in the newer spelling, optimizer and aliases in step; obsolete buffers dropped where asked."""
    shapes = shapes_of(checkpoint.weights)
    gone = set(obsolete_names(shapes)) if drop_obsolete else set()
    return _renamed(checkpoint, older_names(shapes).new_of, gone)


def older(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint in the older spelling of weight and spectral norm, for code that still has it."""
    return _renamed(checkpoint, older_names(shapes_of(checkpoint.weights), backwards=True).new_of, set())


def materialised(checkpoint: Checkpoint) -> Checkpoint:
    """Weight-normed pairs computed into the one weight they stand for (torch's `remove_weight_norm`), lazily.

    Moments belong to the two parts and have no meaning for the product: raises Refused where the checkpoint has any.
    """
    from anyckpt.core.ops import WeightNorm  # names are looked at without numpy

    newer = modernised(checkpoint)
    weights = dict(newer.weights)
    for name in newer.weights:
        module, mark, p = name.removesuffix(".original0").rpartition("parametrizations.")
        g, v = newer.weights[name], newer.weights.get(f"{module}{mark}{p}.original1")
        if not name.endswith(".original0") or not mark or v is None:
            continue
        axis = norm_axis(g.shape, v.shape)
        if axis is None:
            continue
        if newer.optimizer and any(name in slot for slot in newer.optimizer.slots.values()):
            raise Refused(
                f"{name} has optimizer moments, which a computed weight can't carry",
                hint="convert the weights alone: --only weights",
            )
        del weights[name], weights[f"{module}{mark}{p}.original1"]
        weights[module + p] = Tensor(v.dtype, v.shape, op=WeightNorm(g, v, axis))
    return newer.with_weights(weights)


def _renamed(checkpoint: Checkpoint, new_of: Mapping[str, str], gone: Collection[str]) -> Checkpoint:
    if not new_of and not gone:
        return checkpoint
    kept: Iterable[str] = (name for name in checkpoint.weights if name not in gone)
    weights = {new_of.get(name, name): checkpoint.weights[name] for name in kept}
    aliases = {
        new_of.get(a, a): new_of.get(b, b) for a, b in checkpoint.aliases.items() if a not in gone and b not in gone
    }
    optimizer = checkpoint.optimizer and rename_optimizer(checkpoint.optimizer, new_of)
    return replace(checkpoint, weights=weights, aliases=aliases, optimizer=optimizer)
