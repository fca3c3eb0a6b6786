"""Which tensor gets which type: llama.cpp's own choice for every file type, as rules in its order.

A file type (`q4_k_m`) is a default type and exceptions: the output, values, the down projection of some layers. The
rules are `llama_tensor_get_type_impl` of build 11434 and were held against 11739's answers for eleven real models,
every type, with and without an importance matrix.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from anyckpt.core.box import Shape
from anyckpt.core.ggml.types import BLOCK_TYPES, ID_OF
from anyckpt.errors import UsageError
from anyckpt.formats.gguf.kv import Metadata

FLOATS = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
FILE_TYPES: Mapping[str, tuple[int, str]] = MappingProxyType(
    {
        "f32": (0, "float32"), "f16": (1, "float16"), "q4_0": (2, "q4_0"), "q4_1": (3, "q4_1"), "q8_0": (7, "q8_0"),
        "q5_0": (8, "q5_0"), "q5_1": (9, "q5_1"), "q2_k": (10, "q2_k"), "q3_k_s": (11, "q3_k"), "q3_k_m": (12, "q3_k"),
        "q3_k_l": (13, "q3_k"), "q4_k_s": (14, "q4_k"), "q4_k_m": (15, "q4_k"), "q5_k_s": (16, "q5_k"),
        "q5_k_m": (17, "q5_k"), "q6_k": (18, "q6_k"), "iq2_xxs": (19, "iq2_xxs"), "iq2_xs": (20, "iq2_xs"),
        "q2_k_s": (21, "q2_k"), "iq3_xs": (22, "iq3_s"), "iq3_xxs": (23, "iq3_xxs"), "iq1_s": (24, "iq1_s"),
        "iq4_nl": (25, "iq4_nl"), "iq3_s": (26, "iq3_s"), "iq3_m": (27, "iq3_s"), "iq2_s": (28, "iq2_xs"),
        "iq2_m": (29, "iq2_s"), "iq4_xs": (30, "iq4_xs"), "iq1_m": (31, "iq1_m"), "bf16": (32, "bfloat16"),
        "tq1_0": (36, "tq1_0"), "tq2_0": (37, "tq2_0"), "mxfp4_moe": (38, "mxfp4"), "q1_0": (40, "q1_0"), "q2_0": (41,
        "q2_0"),
    }
)  # fmt: skip
"""What --quant takes -> (general.file_type, the default type)."""
ALIASES = {"q3_k": "q3_k_m", "q4_k": "q4_k_m", "q5_k": "q5_k_m", "mxfp4": "mxfp4_moe", "fp16": "f16", "fp32": "f32"}

FALLBACK = {
    **dict.fromkeys(("iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "iq4_xs"), "iq4_nl"),
    **dict.fromkeys(("q2_0", "q2_k", "q3_k", "tq1_0", "tq2_0"), "q4_0"), "q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0",
}  # fmt: skip
"""Type of 256 (or 64) values a block -> what takes its place where rows are not whole blocks."""
NEEDS_IMPORTANCE = ("iq3_xxs", "iq2_xxs", "iq2_xs", "iq2_s", "iq1_m", "iq1_s")
KEPT = re.compile(
    r"_norm\.weight|ffn_gate_inp\.weight|ffn_gate_tid2eid\.weight|altup|laurel|per_layer_model_proj|^position_embd\.weight$|"
    r"^token_types\.weight$|ssm_conv1d|shortconv\.conv\.weight|indexer\.[kq]_proj\.weight|time_mix_(first|w[012]|v[012]|a[012]|"
    r"g[12]|decay_w[12]|lerp_fused)\.weight|attn_rel_b\.weight|\.position_embd|sam\.pos_embd|sam\.neck\.|sam\.net_|\.rel_pos|"
    r"\.patch_embd|\.patch_merger|a\.rvq\.codebook|mm\.a\.code_embd"
)
"""Names that are never quantized: small, or too delicate."""
_BLOCK = re.compile(r"blk\.(\d+)\.")
_PARTS = (
    ("attn_qkv.weight", "values"), ("attn_kv_b.weight", "values"), ("attn_v.weight", "values"), ("attn_k.weight",
    "keys"),
    ("attn_q.weight", "queries"), ("attn_output.weight", "attention output"), ("ffn_up", "up"), ("ffn_gate", "gate"),
    ("ffn_down", "down"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Model:
    """What the rules look at."""

    architecture: str
    n_layers: int
    n_heads: int
    n_heads_kv: int
    n_experts: int = 0

    @property
    def group(self) -> int:
        """Queries that share a key; 0 where there are no keys."""
        return self.n_heads // self.n_heads_kv if self.n_heads_kv else 0

    @property
    def is_70b(self) -> bool:
        """Llama with 80 layers and shared keys."""
        return self.architecture == "llama" and self.n_layers == 80 and self.n_heads != self.n_heads_kv

    @staticmethod
    def of(metadata: Metadata) -> Model:
        """From a file's keys."""

        def first(key: str, default: int) -> int:
            found = metadata.of_model(key)
            if found is None:
                return default
            return int(found) if isinstance(found, int | float) else int(found[0])

        n_heads = first("attention.head_count", 0)
        return Model(
            metadata.architecture, first("block_count", 0), n_heads, first("attention.head_count_kv", n_heads),
            first("expert_count", 0),
        )  # fmt: skip


def file_type(name: str) -> tuple[str, int, str]:
    """(name, general.file_type, default type) of what --quant was given. Raises UsageError listing the names."""
    lower = name.lower().replace("-", "_")
    lower = ALIASES.get(lower, lower)
    if lower not in FILE_TYPES:
        raise UsageError(f"no file type is called {name!r}", hint="there are: " + ", ".join(FILE_TYPES))
    return (lower, *FILE_TYPES[lower])


def in_order(names: Sequence[str]) -> list[str]:
    """As the quantizer writes them: tensors of no block first, then block by block, names by their bytes."""

    def key(name: str) -> tuple[int, bytes]:
        match = _BLOCK.match(name)
        return (int(match[1]) if match else -1, name.encode("utf-8", "surrogateescape"))

    return sorted(names, key=key)


def is_quantized(name: str, shape: Shape) -> bool:
    """Whether a tensor takes part at all: weights of two axes or more that are not on the list."""
    dims = list(reversed(shape))
    while dims and dims[-1] == 1:
        dims.pop()
    return len(dims) >= 2 and name.endswith("weight") and not KEPT.search(name)


@dataclass(slots=True)
class _State:
    """Running counts: rules go by how many tensors of a kind came before."""

    ftype: str
    model: Model
    has_importance: bool
    is_tied: bool
    n_values: int
    at: dict[str, int] = field(default_factory=dict)

    def next(self, part: str) -> int:
        n = self.at.get(part, 0)
        self.at[part] = n + 1
        return n


def plan(
    tensors: Mapping[str, tuple[Shape, str]],
    ftype: str,
    model: Model,
    *,
    has_importance: bool = False,
    overrides: Sequence[tuple[str, str]] = (),
) -> dict[str, str]:
    """name -> type for every tensor, in the quantizer's order.

    `tensors`: name -> (shape, current type). `overrides`: (regular expression, type); the first that is found in a name
    wins. Raises UsageError for rows that nothing fits.
    """
    default = FILE_TYPES[ftype][1]
    names = in_order(list(tensors))
    state = _State(
        ftype, model, has_importance, "output.weight" not in tensors, sum(part_of(n) == "values" for n in names)
    )
    patterns = [(re.compile(pattern), kind) for pattern, kind in overrides]
    out: dict[str, str] = {}
    for name in names:
        shape, current = tensors[name]
        if not is_quantized(name, shape):
            out[name] = current
        elif default not in BLOCK_TYPES:
            out[name] = default
        else:
            chosen = next((kind for pattern, kind in patterns if pattern.search(name)), None)
            out[name] = fitting(name, shape, chosen or _chosen(name, shape, default, state))
    return out


def part_of(name: str) -> str:
    """What a tensor is for the rules, "" for the rest."""
    if name == "output.weight":
        return "output"
    if name in ("token_embd.weight", "per_layer_token_embd.weight"):
        return "embedding"
    return next((part for text, part in _PARTS if text in name), "")


def fitting(name: str, shape: Shape, kind: str) -> str:
    """The type, or what takes its place where rows are not whole blocks. Raises UsageError where nothing does."""
    row = shape[-1]
    block = BLOCK_TYPES[kind].block if kind in BLOCK_TYPES else 1
    if row % block == 0:
        return kind
    if kind not in FALLBACK and block > 32:
        raise UsageError(f"rows of {name} hold {row:,} values, no whole blocks of {block} as {kind} needs")
    other = FALLBACK.get(kind, kind)
    return other if row % BLOCK_TYPES[other].block == 0 else "float16"


def more_bits(i: int, n: int) -> bool:
    """The first and last eighth of the layers, and every third between."""
    return i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2


VERY_LOW = ("iq2_xxs", "iq2_xs", "iq1_s", "iq2_s", "iq2_m", "iq1_m")


def _chosen(name: str, shape: Shape, default: str, s: _State) -> str:
    part, ftype = part_of(name), s.ftype
    if part == "output" or (s.is_tied and part == "embedding"):
        if ftype == "mxfp4_moe" or s.model.architecture == "falcon" or shape[-1] % BLOCK_TYPES[default].block:
            return "q8_0"
        if ftype in (*VERY_LOW, "iq3_xxs"):
            return "q5_k"
        return default if default == "q8_0" else "q6_k"
    if ftype == "mxfp4_moe":
        return "mxfp4" if len(shape) > 2 and shape[-3] > 1 else "q8_0"
    if part == "embedding":
        other = {
            **dict.fromkeys(("iq2_xxs", "iq2_xs", "iq1_s", "iq1_m"), "q2_k"),
            **dict.fromkeys(("iq2_s", "iq2_m", "iq3_xxs"), "iq3_s"), **dict.fromkeys(("tq1_0", "tq2_0", "q2_0"),
            "q4_k"),
        }  # fmt: skip
        return other.get(ftype, default)
    if ftype in VERY_LOW:
        return _very_low(part, default, s)
    rule = _RULES.get(part)
    return rule(name, default, s) if rule else default


def _very_low(part: str, default: str, s: _State) -> str:
    finer = "iq3_s" if s.ftype in ("iq2_s", "iq2_m") else "q2_k"
    if part == "values":
        s.next(part)
        return "q4_k" if s.model.group >= 4 or s.model.n_experts >= 4 else finer
    if part == "keys" and s.model.n_experts == 8:
        return "q4_k"
    if part == "down":
        return finer if s.next(part) < s.model.n_layers // 8 else default
    if part == "attention output":
        if s.model.n_experts == 8:
            return "q5_k"
        if s.ftype in ("iq1_s", "iq1_m"):
            return "iq2_xxs"
        return "iq3_s" if s.ftype in ("iq2_s", "iq2_m") else default
    return default


def _values(name: str, default: str, s: _State) -> str:
    i, ftype, shared = s.next("values"), s.ftype, s.model.group >= 4
    kind = default
    if ftype == "q2_k":
        kind = "q4_k" if shared else "q3_k"
    elif ftype in ("q2_k_s", "iq3_xs", "iq3_s"):
        kind = "q4_k" if shared else default
    elif ftype == "iq3_xxs":
        kind = "q4_k" if shared else "iq3_xxs" if s.has_importance else "iq3_s"
    elif ftype == "iq3_m":
        kind = "q4_k"
    elif ftype == "q3_k_m":
        kind = "q5_k" if i < 2 else "q4_k"
    elif ftype == "q3_k_l":
        kind = "q5_k"
    elif ftype in ("iq4_nl", "iq4_xs"):
        kind = "q5_k" if shared else default
    elif ftype in ("q4_k_m", "q5_k_m"):
        kind = "q6_k" if more_bits(i, s.n_values) else default
    elif ftype == "q4_k_s":
        kind = "q5_k" if i < 4 else default
    if s.model.is_70b and kind in ("q3_k", "q4_k"):
        kind = "q5_k"
    return "q8_0" if s.model.n_experts == 8 else kind


def _keys(name: str, default: str, s: _State) -> str:
    return "q8_0" if s.model.n_experts == 8 else _queries(name, default, s)


def _queries(name: str, default: str, s: _State) -> str:
    return {"iq3_xs": "iq3_xxs", "iq3_xxs": "iq2_s"}.get(s.ftype, default)


def _layer(name: str, part: str, s: _State) -> int:
    """The running number, or with experts the layer in the name."""
    i = s.next(part)
    if s.model.n_experts > 1:
        match = _BLOCK.match(name)
        if match is None or int(match[1]) >= s.model.n_layers:
            raise UsageError(f"{name} is in no layer of this model")
        return int(match[1])
    return i


def _down(name: str, default: str, s: _State) -> str:
    i, n, ftype, falcon = _layer(name, "down", s), s.model.n_layers, s.ftype, s.model.architecture == "falcon"
    early = i < n // 8
    if ftype == "q2_k":
        return "q3_k"
    if ftype == "q2_k_s":
        return "q4_k" if early else default
    if ftype == "iq3_xxs" and not s.has_importance:
        return "q4_k" if early else "q3_k"
    if ftype == "q3_k_m":
        return "q5_k" if i < n // 16 else "q4_k" if not falcon or more_bits(i, n) else "q3_k"
    if ftype == "iq3_m" and (early or (s.model.n_experts == 8 and more_bits(i, n))):
        return "q4_k"
    if ftype == "q3_k_l":
        return "q4_k" if falcon else "q5_k"
    if ftype == "q4_k_m":
        if falcon:
            return "q6_k" if i < n // 16 else "q5_k" if more_bits(i, n) else "q4_k"
        return "q6_k" if more_bits(i, n) else default
    if early and ftype in ("iq4_nl", "iq4_xs") and not s.has_importance:
        return "q5_k"
    if ftype == "q5_k_m" and more_bits(i, n):
        return "q6_k"
    if ftype == "q4_k_s" and not falcon and early:
        return "q5_k"
    if ftype in ("q4_0", "q5_0") and s.has_importance and early:
        return "q4_1" if ftype == "q4_0" else "q5_1"
    return default


def _attention_output(name: str, default: str, s: _State) -> str:
    if s.model.architecture == "falcon":
        return "q4_k" if s.ftype == "q3_k_l" else default
    if s.model.n_experts == 8:
        finer = (
            "q2_k",
            "iq3_xs",
            "iq3_xxs",
            "q3_k_s",
            "q3_k_m",
            "iq4_nl",
            "q4_k_s",
            "q4_k_m",
            "iq3_s",
            "iq3_m",
            "iq4_xs",
        )
        return "q5_k" if s.ftype in finer else default
    other = {"q2_k": "q3_k", "iq3_xxs": "iq3_s", "q3_k_m": "q4_k", "q3_k_l": "q5_k", "iq3_m": "q4_k"}
    return other.get(s.ftype, default)


def _gate_or_up(part: str, name: str, default: str, s: _State) -> str:
    i, n = _layer(name, part, s), s.model.n_layers
    return "iq3_xxs" if s.ftype == "iq3_xs" and n // 8 <= i < 7 * n // 8 else default


_Rule = Callable[[str, str, _State], str]
_RULES: Mapping[str, _Rule] = {
    "values": _values, "keys": _keys, "queries": _queries, "down": _down, "attention output": _attention_output,
    "gate": lambda name, default, s: _gate_or_up("gate", name, default, s),
    "up": lambda name, default, s: _gate_or_up("up", name, default, s),
}  # fmt: skip


def needs_importance(name: str, kind: str, ftype: str) -> bool:
    """Whether a type is worthless for this tensor without an importance matrix."""
    if part_of(name) in ("output", "embedding"):
        return False
    return kind in NEEDS_IMPORTANCE or (kind == "q2_k" and ftype == "q2_k_s")


def type_named(name: str) -> str:
    """A tensor type as --tensor-type gives it. Raises UsageError for an unknown one."""
    lower = name.lower()
    kind = FLOATS.get(lower, lower)
    if kind not in ID_OF:
        raise UsageError(
            f"no tensor type is called {name!r}", hint="there are: f32, f16, bf16, " + ", ".join(BLOCK_TYPES)
        )
    return kind
