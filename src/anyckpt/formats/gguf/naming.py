"""Names and origin of a model, `general.*`: from the model card, config.json and the folder's name.

A model's name in the Hub's manner has parts, `Llama-3.1-8B-Instruct`: base name, size, fine-tune, version. Rules are
those of gguf-py 0.19 (`metadata.py`), which every converted file follows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from anyckpt.core.box import Shape
from anyckpt.errors import AnyckptError
from anyckpt.formats.gguf import kv
from anyckpt.formats.gguf.files import Files
from anyckpt.formats.gguf.kv import STRING, Field

_VERSION = re.compile(r"(v|iter)?\d+([.]\d+)*", re.IGNORECASE)
_TYPE = re.compile(r"i?q\d(_\w)*|b?fp?(16|32)", re.IGNORECASE)
_SIZE = re.compile(r"(([A]|\d+[x])?\d+([._]\d+)?[KMBT][\d]?|small|mini|medium|large|x?xl)", re.IGNORECASE)
_FINETUNE = re.compile(r"chat|instruct|vision|lora", re.IGNORECASE)
_STAYS = re.compile(r"(v\d+(?:\.\d+)*|\d.*)")
SIZES = " KMBT"


@dataclass(frozen=True, slots=True)
class Parts:
    """What a model's name says."""

    name: str | None = None
    organization: str | None = None
    basename: str | None = None
    finetune: str | None = None
    version: str | None = None
    size_label: str | None = None


@dataclass(slots=True)
class _Word:
    text: str
    kinds: set[str] = field(default_factory=set)


def parts_of(model: str | None, n_parameters: int = 0) -> Parts:
    """Take a model's name apart. `n_parameters` tells a size from a context length.

    >>> parts_of("meta-llama/Llama-3-8B-Instruct", 8_000_000_000).size_label
    '8B'
    """
    if model is None or " " in model:
        return Parts(name=model)
    organization, slash, rest = model.partition("/")
    if not slash:
        organization, rest = "", model
    words = [_Word(part) for part in rest.split("-") if part]
    for i, word in enumerate(words):
        _judge_word(i, word, n_parameters)
    if any(c.isdecimal() for w in words if "size_label" in w.kinds for c in w.text):
        for word in words:
            if "size_label" in word.kinds and word.text.isalpha():
                word.kinds.discard("size_label")
    at_start = True
    for word in words:
        if at_start and ((not word.kinds and word.text[0].isalpha()) or "version" in word.kinds):
            word.kinds.add("basename")
        else:
            at_start = False
            if not word.kinds:
                word.kinds.add("finetune")
    for word in reversed(words):  # a version at the end is no part of the base name
        if "basename" not in word.kinds or len(word.kinds) < 2:
            break
        word.kinds.discard("basename")
    found = {
        kind: "-".join(w.text for w in words if kind in w.kinds) or None for kind in ("basename", "finetune")
    }  # fmt: skip
    size = "-".join(dict.fromkeys(w.text for w in words if "size_label" in w.kinds)) or None
    version = "-".join(w.text for w in words if "version" in w.kinds and "basename" not in w.kinds) or None
    basename = found["basename"] if size or found["finetune"] or version else None
    owner = organization if organization and organization[0] != "." else None
    return Parts(rest, owner, basename, found["finetune"], version, size)


def _judge_word(i: int, word: _Word, n_parameters: int) -> None:
    if _VERSION.fullmatch(word.text):
        word.kinds.add("version")
    elif _TYPE.fullmatch(word.text):
        word.kinds.add("type")
        word.text = word.text.upper()
    elif i > 0 and _SIZE.fullmatch(word.text):
        _judge_size(word, n_parameters)
    elif i > 0 and _FINETUNE.fullmatch(word.text):
        is_adapter = n_parameters < 0 and word.text.lower() == "lora"
        word.kinds.add("type" if is_adapter else "finetune")


def _judge_size(word: _Word, n_parameters: int) -> None:
    text = word.text.replace("_", ".")
    if text[-1].isdecimal():  # bloom-7b1
        text = text[:-2] + "." + text[-1] + text[-2]
    if len(text) > 1 and text[-2].isdecimal() and text[-1] in "kmbt":
        text = text[:-1] + text[-1].upper()
    if n_parameters:
        try:
            claimed = float(text[:-1]) * 1000 ** SIZES.find(text[-1])
        except ValueError:
            claimed = None
        if claimed is not None and (
            (n_parameters < 0 and claimed < abs(n_parameters) // 8)
            or (n_parameters > 0 and abs(claimed - n_parameters) > 7 * n_parameters // 8)
        ):
            word.kinds.add("finetune")  # a context length
            text = text[:-1] + text[-1].lower()
    if not word.kinds:
        word.kinds.add("size_label")
    word.text = text


def title(name: str) -> str:
    """`llama-3-chat` as people write it.

    >>> title("tiny-llama-v2")
    'Tiny Llama v2'
    """
    words = name.strip().replace("-", " ").split()
    return " ".join(w.title() if w.islower() and not _STAYS.fullmatch(w) else w for w in words)


def rounded(n: int) -> str:
    """A count of parameters in a few letters.

    >>> rounded(36_480), rounded(7_241_732_096)
    ('36K', '7.2B')
    """
    scale, suffix = next(((10**-e, s) for e, s in ((12, "T"), (9, "B"), (6, "M")) if n > 10**e), (1e-3, "K"))
    value = n * scale
    digits = max(2 - len(str(round(value)).lstrip("0")), 0)
    return f"{value:.{digits}f}{suffix}"


def count_parameters(shapes: Iterable[tuple[str, Shape]]) -> tuple[int, str]:
    """All parameters (negative for an adapter), and the size label: `7B`, `8x7B` for experts.

    Expert tensors are those with `_exps.` in the name; an adapter's B counts with A's width, as the weight it stands
    for.
    """
    total = shared = per_expert = experts = n_expert_tensors = 0
    last_a: tuple[str, Shape] | None = None
    for name, shape in shapes:
        if name.endswith(".lora_a"):
            last_a = (name, shape)
            continue
        if name.endswith(".lora_b"):
            if last_a is None or last_a[0] != name[:-1] + "a":
                return 0, ""
            shape = (*shape[:-1], last_a[1][-1])
        size = prod(shape)
        if "_exps." in name and len(shape) >= 3:
            n = shape[-2 if ".bias" in name else -3]
            per_expert += size // n
            experts += n
            n_expert_tensors += 1
        else:
            shared += size
        total += size
    if not total:
        return 0, ""
    count = experts // n_expert_tensors if n_expert_tensors else 0
    label = f"{count}x{rounded(shared + per_expert)}" if count else rounded(total)
    return (-total if last_a else total), label


# --- keys ---

CARD_KEYS = (
    ("name", ("name", "model_name", "model-name")), ("author", ("author", "model_author")),
    ("version", ("version", "model_version")), ("organization", ("organization", "model_organization",
    "model_creator")),
    ("description", ("description", "model_description")), ("finetune", ("finetune", "model_finetune")),
    ("basename", ("basename", "model_basename", "model_type")), ("size_label", ("size_label", "model_size_label")),
    ("quantized_by", ("quantized_by",)), ("license", ("license",)), ("license.name", ("license_name",)),
    ("license.link", ("license_link",)),
)  # fmt: skip
SAMPLING = (
    ("sequence", ("sequence",), "text"), ("top_k", ("top_k",), "i32"), ("top_p", ("top_p",), "f32"),
    ("min_p", ("min_p",), "f32"), ("xtc_probability", ("xtc_probability",), "f32"),
    ("xtc_threshold", ("xtc_threshold",), "f32"), ("temp", ("temperature",), "f32"),
    ("penalty_last_n", ("penalty_last_n",), "i32"), ("penalty_repeat", ("penalty_repeat", "repetition_penalty"), "f32"),
    ("mirostat", ("mirostat",), "i32"), ("mirostat_tau", ("mirostat_tau",), "f32"), ("mirostat_eta",
    ("mirostat_eta",), "f32"),
)  # fmt: skip
_MAKE = {
    "text": lambda v: kv.text(str(v)),
    "i32": lambda v: kv.field(kv.I32, int(v)),
    "f32": lambda v: kv.f32(float(v)),
}


def general_keys(
    files: Files, folder: str, shapes: Iterable[tuple[str, Shape]], name: str | None = None
) -> dict[str, Field]:
    """`general.*` between the type and the model's keys, in the converter's order. `folder`: its name; `name` wins."""
    n_parameters, label = count_parameters(shapes)
    card = _card(files)
    found: dict[str, Any] = {}
    for key, names in CARD_KEYS:
        value = next((card[n] for n in names if card.get(n) is not None), None)
        if value is not None:
            found[key] = value
    for model in (files.table("config.json").get("_name_or_path"), folder):
        if isinstance(model, str) and model and model.count("/") <= 1:
            parts = parts_of(model, n_parameters)
            guesses = {
                "name": title(parts.name) if parts.name else None,
                "organization": title(parts.organization) if parts.organization else None, "basename": parts.basename,
                "finetune": parts.finetune, "version": parts.version, "size_label": parts.size_label,
            }  # fmt: skip
            for key, value in guesses.items():
                if value is not None:
                    found.setdefault(key, value)
    if name is not None:
        found["name"] = name
    found.setdefault("name", folder)
    if label:
        found.setdefault("size_label", label)
    out = _sampling(files.table("generation_config.json"))
    order = ("name", "author", "version", "organization", "finetune", "basename", "description", "quantized_by",
    "size_label",
             "license", "license.name", "license.link")  # fmt: skip
    for key in order:
        value = found.get(key)
        value = ",".join(map(str, value)) if isinstance(value, list) else value
        if value not in (None, ""):
            out[f"general.{key}"] = kv.text(str(value))
    out.update(_base_models(card, n_parameters))
    tags = [*_listed(card.get("tags")), *_listed(card.get("pipeline_tag"))]
    languages = [*_listed(card.get("languages")), *_listed(card.get("language"))]
    for key, values in (("tags", tags), ("languages", languages)):
        if values:
            out[f"general.{key}"] = kv.array(STRING, values)
    return out


def _listed(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else [str(v) for v in value] if isinstance(value, list) else []


def _sampling(config: Mapping[str, Any]) -> dict[str, Field]:
    out: dict[str, Field] = {}
    for key, names, kind in SAMPLING:
        value = next((config[n] for n in names if config.get(n) is not None), None)
        if value is not None:
            out[f"general.sampling.{key}"] = _MAKE[kind](value)
    return out


def _base_models(card: Mapping[str, Any], n_parameters: int) -> dict[str, Field]:
    """`base_model` and `datasets` of the card, numbered."""
    out: dict[str, Field] = {}
    for key, names in (
        ("base_model", ("base_model", "base_models", "base_model_sources")),
        ("dataset", ("datasets", "dataset", "dataset_sources")),
    ):
        values = next((_listed(card[n]) for n in names if card.get(n) is not None), [])
        if not values:
            continue
        out[f"general.{key}.count"] = kv.u32(len(values))
        for i, value in enumerate(values):
            parts = parts_of(value, n_parameters)
            rows = {
                "name": title(parts.name) if parts.name else None, "version": parts.version,
                "organization": title(parts.organization) if parts.organization else None,
                "repo_url": f"https://huggingface.co/{parts.organization}/{parts.name}" if parts.organization else None,
            }  # fmt: skip
            out.update({f"general.{key}.{i}.{k}": kv.text(v) for k, v in rows.items() if v})
    return out


def _card(files: Files) -> Mapping[str, Any]:
    """The front matter of README.md; {} where there is none, or no reader of YAML is installed."""
    text = files.text("README.md") or ""
    lines = text.splitlines()
    if not lines or lines[0] != "---" or "---" not in lines[1:]:
        return {}
    body = "\n".join(lines[1 : lines.index("---", 1)]) + "\n"
    from anyckpt.io import yaml

    try:
        found = yaml.parse(body.replace("\t", "  ").encode(), where="README.md").value
    except AnyckptError:
        return {}
    return found if isinstance(found, dict) else {}
