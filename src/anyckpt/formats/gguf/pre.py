"""The name of a byte-level tokenizer's way to cut text into words, `tokenizer.ggml.pre`, from its own definition.

The official converter encodes a fixed text and looks the hash of the ids up in a table of known vocabularies, so that
any new or extended vocabulary stops it. What the name stands for in llama.cpp is only a list of regular expressions and
two switches, and tokenizer.json says those outright: they are compared here. Source: `llama-vocab.cpp`, build 11434.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SUFFIX = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SUFFIX}|"
    rf"\p{{N}}{{1,3}}|{_REST}"
)
TEKKEN = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}|{_REST}"
DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"""
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTE_LEVEL = "ByteLevel"  # GPT-2's own expression, built into the step
DIGITS = "Digits"  # each digit by itself

Steps = tuple[str, ...]

KNOWN: tuple[tuple[str, Steps, bool | None], ...] = (
    # name, steps in order, ignore_merges (None: either)
    ("llama-bpe", (LLAMA3,), True),
    ("dbrx", (LLAMA3,), False),
    ("qwen2", (QWEN2,), None),
    ("qwen35", (QWEN35,), None),
    ("gpt-4o", (GPT4O,), None),
    ("tekken", (TEKKEN,), True),
    ("pixtral", (TEKKEN,), False),
    ("deepseek-v3", (r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+", DEEPSEEK3), None),
    ("deepseek-coder", ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", DIGITS), None),
    ("gpt-2", (BYTE_LEVEL,), None),
    ("starcoder", (DIGITS, BYTE_LEVEL), None),
    ("smollm", (DIGITS, BYTE_LEVEL), None),
)
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
ONLY_READ: Mapping[str, Steps] = MappingProxyType(
    {
        "default": (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
        "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]"),
        **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), (BLOOM,)), "viking": (BLOOM, r"\p{N}"),
    }
)  # fmt: skip
"""Names whose tokenizer.json spells its steps otherwise; these expressions cut as llama.cpp does."""
ALSO_CALLED: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys("llama3 llama-v3 falcon3 falcon-h1 midm-2.0 lfm2 jina-v5-nano glm4 glm5".split(), "llama-bpe"),
        **dict.fromkeys("smaug-bpe chatglm-bpe".split(), "dbrx"),
        **dict.fromkeys("hunyuan-dense joyai-llm hy_v4".split(), "deepseek-v3"),
        **dict.fromkeys("refact command-r codeshell exaone minerva-7b mellum2".split(), "starcoder"),
        **dict.fromkeys(
            "phi-2 jina-es jina-de jina-v1-en jina-v2-code jina-v2-es jina-v2-de gigachat a.x-4.0 mellum modern-bert "
            "mpt olmo jais trillion granite-docling roberta-bpe exaone4".split(),
            "gpt-2",
        ),
        **dict.fromkeys(
            "deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2".split(), "qwen2"
        ),
        **dict.fromkeys("llama4 kanana2 talkie minimax-m2".split(), "gpt-4o"),
    }
)
"""Names that cut as another does."""
ADDS_BOS = frozenset(("llama-bpe", "pixtral"))
"""Names with which llama.cpp begins a text with BOS where no key says otherwise."""
CHOICES = (*(name for name, _, _ in KNOWN), *ONLY_READ, *ALSO_CALLED)
WORDPIECE = "jina-v2-en"
"""What the converter's table gives for uncased BERT vocabularies; llama.cpp does not use it for WordPiece."""


def canonical(name: str) -> str:
    """The name in `KNOWN` or `ONLY_READ` that cuts as `name` does; "" where none of them does."""
    name = ALSO_CALLED.get(name, name)
    return name if name in ONLY_READ or any(name == known for known, _, _ in KNOWN) else ""


def steps_of(name: str) -> tuple[Steps, bool]:
    """(steps, ignore_merges) of a canonical name."""
    if name in ONLY_READ:
        return ONLY_READ[name], False
    return next((steps, bool(ignore)) for known, steps, ignore in KNOWN if known == name)


def name_of(tokenizer: Mapping[str, Any], *, cleans_spaces: bool = True) -> str:
    """The name for a tokenizer.json, "" where its steps are none of those known. `cleans_spaces`: the setting
    clean_up_tokenization_spaces, which tells two names apart that cut alike.

    >>> name_of({"model": {"type": "BPE"}, "pre_tokenizer": {"type": "ByteLevel", "use_regex": True}})
    'gpt-2'
    """
    model = tokenizer.get("model") or {}
    if model.get("type") == "WordPiece":
        return WORDPIECE
    steps = _steps(tokenizer.get("pre_tokenizer"))
    merges = bool(model.get("ignore_merges"))
    for name, wanted, ignore in KNOWN:
        if steps == wanted and ignore in (None, merges):
            return "smollm" if name == "starcoder" and not cleans_spaces else name
    return ""


def _steps(found: Any) -> Steps | None:
    """The expressions of a pre-tokenizer in order; None for a step of another kind."""
    if not isinstance(found, dict):
        return None
    kind = found.get("type")
    if kind == "Sequence":
        out: list[str] = []
        for step in found.get("pretokenizers") or []:
            inner = _steps(step)
            if inner is None:
                return None
            out += inner
        return tuple(out)
    if kind == "Split":
        pattern = found.get("pattern") or {}
        expression = pattern.get("Regex", pattern.get("String"))
        isolated = found.get("behavior") in ("Isolated", "Removed") and isinstance(expression, str)
        return (str(expression),) if isolated else None
    if kind == "ByteLevel":
        return (BYTE_LEVEL,) if found.get("use_regex", True) else ()
    if kind == "Digits":
        return (DIGITS,) if found.get("individual_digits") else None
    return None
