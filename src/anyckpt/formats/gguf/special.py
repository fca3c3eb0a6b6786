"""Special tokens, merges, chat template: what stands in tokenizer.json, tokenizer_config.json and config.json about
them.

A token's id is that of the first place that names it: tokenizer_config's `bos_token` and so on, looked up among the
added tokens of tokenizer.json, then config.json's `bos_token_id`. Whether one is put before or behind a text is what
the post-processor does with a text, else what tokenizer_config says. Facts: `SpecialVocab` of gguf-py 0.19.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from anyckpt.formats.gguf import kv
from anyckpt.formats.gguf.files import Files
from anyckpt.formats.gguf.kv import STRING, Field

TYPES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
KEYS = {
    "bos": "bos", "eos": "eos", "unk": "unknown", "sep": "seperator", "pad": "padding", "mask": "mask",
    "eot": "eot", "eom": "eom",
}  # fmt: skip
"""Type -> how the key spells it; `cls` has no key any more, its id is the beginning's."""
ADDED = ("bos", "eos", "sep")


@dataclass(slots=True)
class _Found:
    types: tuple[str, ...] = TYPES
    ids: dict[str, int] = field(default_factory=dict)
    add: dict[str, bool] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)


def keys(files: Files, *, with_merges: bool = False, n_vocab: int | None = None) -> dict[str, Field]:
    """The keys in the converter's order: merges, ids, what is added, template, normalizer."""
    tokenizer = files.table("tokenizer.json")
    found = _Found(config=dict(files.table("tokenizer_config.json")))
    has_config = "tokenizer_config.json" in files
    if tokenizer:
        _from_post_processor(tokenizer, found, has_config)
    if has_config:
        _from_config(tokenizer.get("added_tokens") or [], found, n_vocab)
    _from_model_config(files.table("config.json"), found, n_vocab)
    out: dict[str, Field] = {}
    merges = _merges(tokenizer, files) if with_merges else []
    if merges:
        out["tokenizer.ggml.merges"] = kv.array(STRING, merges)
    for kind, token in found.ids.items():
        if kind in KEYS:
            out[f"tokenizer.ggml.{KEYS[kind]}_token_id"] = kv.u32(token)
    for kind, value in found.add.items():
        if kind in ADDED:
            out[f"tokenizer.ggml.add_{kind}_token"] = kv.boolean(value)
    if has_config:
        out.update(_templates(found.config, files))
    out.update(_normalizer(tokenizer.get("normalizer")))
    return out


def _merges(tokenizer: dict[str, Any], files: Files) -> list[str]:
    """`left right`; a space inside of a part is written U+0120. merges.txt where tokenizer.json has none."""
    found = (tokenizer.get("model") or {}).get("merges")
    if isinstance(found, list) and found:
        if isinstance(found[0], str):
            return [str(m) for m in found]
        return [" ".join(str(part).replace(" ", "\u0120") for part in pair) for pair in found]
    lines = (files.text("merges.txt") or "").splitlines()
    rows = [line.split() for line in lines[lines[:1] != [] and lines[0].startswith("#") :]]
    return [f"{row[0]} {row[1]}" for row in rows if len(row) == 2]


def _content(entry: Any) -> str | None:
    """A token in tokenizer_config: its text, or an object that holds it."""
    if isinstance(entry, dict):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else None


def _from_post_processor(tokenizer: dict[str, Any], found: _Found, has_config: bool) -> None:
    config = found.config
    if has_config:
        if not config.get("bos_token") and config.get("cls_token"):
            config["bos_token"] = config["cls_token"]
        if not config.get("eos_token") and config.get("sep_token"):
            config["eos_token"] = config["sep_token"]
    processor = tokenizer.get("post_processor")
    if not isinstance(processor, dict):
        return
    for step in processor.get("processors", [processor]):
        kind = step.get("type")
        if kind == "ByteLevel":
            found.add.setdefault("bos", False)
            found.add.setdefault("eos", False)
        elif kind == "RobertaProcessing":
            found.add.update(bos=True, eos=True, sep=True)
            if has_config:
                config["cls_token"] = config.get("cls_token") or step.get("cls", [config.get("bos_token")])[0]
                config["sep_token"] = config.get("sep_token") or step.get("sep", [config.get("eos_token")])[0]
        elif kind == "TemplateProcessing":
            _from_template(step, found, has_config)


def _special(step: Any) -> str | None:
    found = step.get("SpecialToken") if isinstance(step, dict) else None
    token = found.get("id") if isinstance(found, dict) else None
    return token if isinstance(token, str) and token else None


def _from_template(step: dict[str, Any], found: _Found, has_config: bool) -> None:
    """The first and last token of the template for one text, and whether two texts get a separator."""
    config, single, pair = found.config, step.get("single") or [], step.get("pair") or []
    bos, cls, eos, sep = (config.get(f"{kind}_token") for kind in ("bos", "cls", "eos", "sep"))
    first = last = None
    if len(single) > 1:
        first, last = _special(single[0]), _special(single[-1])
        if first:
            if not has_config:
                bos = first
            elif first not in (bos, cls):
                if not bos:
                    config["bos_token"] = bos = first
                if not cls:
                    config["cls_token"] = cls = first
            found.add["bos"] = first in (bos, cls)
        if last:
            if not has_config:
                eos = last
            elif last != eos:
                spare = next((kind for kind in ("eot", "eom") if kind not in found.types), None)
                if spare:
                    found.types = (*found.types, spare)
                    config[f"{spare}_token"] = eos
                config["eos_token"] = eos = last
            found.add["eos"] = last == eos
    if not pair:
        return
    start = 1 if first and _special(pair[0]) == first else 0
    stop = len(pair) - 1 if last and _special(pair[-1]) == last else len(pair)
    inner = pair[start:stop]
    if len(inner) > 2 and _sequence(inner[0]) == "A" and _sequence(inner[-1]) == "B":
        between = [_special(s) for s in inner[1:-1]]
        add = between[0] is not None and between[0] in (sep, eos) and not last
        if len(between) == 2 and between[1] is not None and between[1] in (sep, eos):
            add = True
        found.add["sep"] = add
        if add and not sep and has_config:
            config["sep_token"] = eos


def _sequence(step: Any) -> str | None:
    found = step.get("Sequence") if isinstance(step, dict) else None
    return found.get("id") if isinstance(found, dict) else None


def _set(found: _Found, kind: str, token: Any, n_vocab: int | None) -> None:
    if isinstance(token, int) and not isinstance(token, bool) and token >= 0 and (n_vocab is None or token < n_vocab):
        found.ids.setdefault(kind, token)


def _from_config(added: list[Any], found: _Found, n_vocab: int | None) -> None:
    ids: dict[str, Any] = {}
    for token in added:
        if isinstance(token, dict):
            ids.setdefault(str(token.get("content")), token.get("id"))
    for kind in found.types:
        entry = found.config.get(f"add_{kind}_token")
        if isinstance(entry, bool):
            found.add.setdefault(kind, entry)
        content = _content(found.config.get(f"{kind}_token"))
        if content is not None:
            _set(found, kind, ids.get(content), n_vocab)


def _from_model_config(config: dict[str, Any], found: _Found, n_vocab: int | None) -> None:
    text = config.get("text_config")
    for kind in found.types:
        token = config.get(f"{kind}_token_id")
        if token is None and isinstance(text, dict):
            token = text.get(f"{kind}_token_id")
        _set(found, kind, token, n_vocab)


def _templates(config: dict[str, Any], files: Files) -> dict[str, Field]:
    """One template, or several by name, of which `default` has the plain key."""
    template = config.get("chat_template")
    if "chat_template" not in config:
        template = files.text("chat_template.jinja")
        more = files.named(r"additional_chat_templates/.+\.jinja")
        if template is not None and more:
            named = [{"name": n.rpartition("/")[2].removesuffix(".jinja"), "template": files.text(n)} for n in more]
            template = [{"name": "default", "template": template}, *named]
        if template is None:
            template = files.table("chat_template.json").get("chat_template")
    if isinstance(template, str):
        return {"tokenizer.chat_template": kv.text(template)} if template else {}
    out: dict[str, Field] = {}
    if isinstance(template, list):
        names, default = [], None
        for entry in template:
            if not isinstance(entry, dict) or not isinstance(entry.get("template"), str):
                continue
            name = "".join(c if c.isascii() and c.isalnum() else "_" for c in str(entry.get("name", "")))
            if name == "default":
                default = entry["template"]
            elif name:
                names.append(name)
                out[f"tokenizer.chat_template.{name}"] = kv.text(entry["template"])
        if names:
            out["tokenizer.chat_templates"] = kv.array(STRING, names)
        if default:
            out["tokenizer.chat_template"] = kv.text(default)
    return out


def _normalizer(found: Any) -> dict[str, Field]:
    """Lower-casing and accents, as WordPiece tokenizers have them."""
    out: dict[str, Field] = {}
    if not isinstance(found, dict):
        return out
    kind = found.get("type")
    flags: dict[str, Any] = {}
    if kind == "Lowercase":
        flags["lowercase"] = True
    elif kind == "StripAccents":
        flags["strip_accents"] = True
    elif kind == "BertNormalizer":
        flags = {name: found.get(name) for name in ("lowercase", "strip_accents")}
    elif kind == "Sequence":
        for step in found.get("normalizers") or []:
            out.update(_normalizer(step))
    out.update({f"tokenizer.ggml.normalizer.{n}": kv.boolean(v) for n, v in flags.items() if isinstance(v, bool)})
    return out
