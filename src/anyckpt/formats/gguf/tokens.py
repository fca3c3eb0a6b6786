"""The tokenizer's keys -> tokenizer.json and tokenizer_config.json, as transformers loads them.

What GGUF keeps only the name of, how text is cut into words, is put back from the table that gave the name (`pre.py`).
Merges of a SentencePiece vocabulary are found again from the scores, the way transformers does it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import Any

from anyckpt.formats.gguf import pre
from anyckpt.formats.gguf.kv import Metadata
from anyckpt.formats.gguf.vocab import BYTE, CONTROL, SPACE, UNKNOWN, UNUSED, USER

SPECIAL = (
    ("bos", "bos"),
    ("eos", "eos"),
    ("unknown", "unk"),
    ("seperator", "sep"),
    ("padding", "pad"),
    ("mask", "mask"),
)


def tokenizer_files(metadata: Metadata) -> dict[str, bytes]:
    """name -> bytes of the tokenizer's files; {} where the file has no vocabulary, or one of a kind that is not
    restored.
    """
    model = metadata.get("tokenizer.ggml.model")
    makers = {"llama": _sentencepiece, "gpt2": _byte_level, "bert": _wordpiece}
    if model not in makers or "tokenizer.ggml.tokens" not in metadata or (model == "gpt2" and not _pre_name(metadata)):
        return {}
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    found = metadata.get("tokenizer.ggml.token_type")
    kinds = found.tolist() if found is not None else [1] * len(tokens)
    last = _last_used(tokens, kinds)
    tokens, kinds = tokens[:last], kinds[:last]
    document, spelled = makers[model](metadata, tokens, kinds)
    document["added_tokens"] = [
        {
            "id": i, "content": token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
            "special": kind != USER,
        }
        for i, (token, kind) in enumerate(zip(spelled, kinds)) if kind in (CONTROL, USER, UNKNOWN)
    ]  # fmt: skip
    order = (
        "version",
        "truncation",
        "padding",
        "added_tokens",
        "normalizer",
        "pre_tokenizer",
        "post_processor",
        "decoder",
        "model",
    )
    files = {
        "tokenizer.json": _dump({key: document.get(key) for key in order}),
        "tokenizer_config.json": _dump(_config(metadata, spelled, str(model))),
    }
    if model == "llama":
        files["tokenizer.model"] = _pieces(metadata, tokens, kinds)
    return files


def _dump(value: Any) -> bytes:
    return (json.dumps(value, ensure_ascii=False, indent=2) + "\n").encode("utf-8", "surrogateescape")


def _last_used(tokens: Sequence[str], kinds: Sequence[int]) -> int:
    """The length without the [PADn] entries at the end, which stand for rows of the embedding without a token."""
    n = len(tokens)
    while n and kinds[n - 1] == UNUSED and tokens[n - 1].startswith("[PAD"):
        n -= 1
    return n


def _special(metadata: Metadata, tokens: Sequence[str]) -> dict[str, str]:
    """`bos` and so on -> the token."""
    found = {}
    for key, name in SPECIAL:
        i = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(i, int) and 0 <= i < len(tokens):
            found[name] = tokens[i]
    return found


def _config(metadata: Metadata, tokens: Sequence[str], model: str) -> dict[str, Any]:
    classes = {"llama": "LlamaTokenizer", "gpt2": "GPT2Tokenizer", "bert": "BertTokenizer"}
    if model == "llama" and metadata.architecture.startswith("gemma"):
        classes["llama"] = "GemmaTokenizer"
    if model == "gpt2":
        classes["gpt2"] = "PreTrainedTokenizerFast"
    out: dict[str, Any] = {"tokenizer_class": classes[model]}
    if model == "gpt2" and _pre_name(metadata) == "smollm":
        out["clean_up_tokenization_spaces"] = False
    special = _special(metadata, tokens)
    if model == "bert":
        special["cls"] = special.pop("bos", "[CLS]")
        special["sep"] = special.get("sep", special.pop("eos", "[SEP]"))
        special.pop("eos", None)
        out["do_lower_case"] = bool(metadata.get("tokenizer.ggml.normalizer.lowercase", True))
    out |= {f"{name}_token": token for name, token in special.items()}
    for name in ("bos", "eos"):
        if (value := metadata.get(f"tokenizer.ggml.add_{name}_token")) is not None and model != "bert":
            out[f"add_{name}_token"] = bool(value)
    if (prefix := metadata.get("tokenizer.ggml.add_space_prefix")) is not None and not metadata.architecture.startswith(
        "gemma"
    ):
        out["add_prefix_space"] = bool(prefix)
    if template := metadata.get("tokenizer.chat_template"):
        out["chat_template"] = template
    if (length := metadata.of_model("context_length")) is not None:
        out["model_max_length"] = int(length)
    return out


def _pre_name(metadata: Metadata) -> str:
    return pre.canonical(str(metadata.get("tokenizer.ggml.pre", "default")))


def _adds_bos(metadata: Metadata, model: str) -> bool:
    """What llama.cpp does where no key says."""
    return model == "llama" or (model == "gpt2" and _pre_name(metadata) in pre.ADDS_BOS)


def _template(metadata: Metadata, tokens: Sequence[str], model: str) -> dict[str, Any] | None:
    """What is put before and behind a text."""
    special = _special(metadata, tokens)
    before = special.get("bos") if metadata.get("tokenizer.ggml.add_bos_token", _adds_bos(metadata, model)) else None
    after = special.get("sep", special.get("eos")) if model == "bert" else special.get("eos")
    after = after if metadata.get("tokenizer.ggml.add_eos_token") or model == "bert" else None
    if model == "bert":
        before = special.get("bos")
    if before is None and after is None:
        return None
    ids = {token: i for i, token in enumerate(tokens)}

    def steps(sequence: str, kind: int, first: bool) -> list[dict[str, Any]]:
        out: list[dict[str, Any]] = [{"SpecialToken": {"id": before, "type_id": kind}}] if before and first else []
        out.append({"Sequence": {"id": sequence, "type_id": kind}})
        return [*out, {"SpecialToken": {"id": after, "type_id": kind}}] if after else out

    names = [t for t in (before, after) if t]
    return {
        "type": "TemplateProcessing", "single": steps("A", 0, True),
        "pair": [*steps("A", 0, True), *steps("B", 1, model != "bert")],
        "special_tokens": {t: {"id": t, "ids": [ids[t]], "tokens": [t]} for t in names},
    }  # fmt: skip


def _byte_level(metadata: Metadata, tokens: list[str], kinds: list[int]) -> tuple[dict[str, Any], list[str]]:
    name = _pre_name(metadata)
    steps, ignore = pre.steps_of(name)
    parts: list[dict[str, Any]] = []
    for step in steps:
        if step == pre.DIGITS:
            parts.append({"type": "Digits", "individual_digits": True})
        elif step != pre.BYTE_LEVEL:
            parts.append({"type": "Split", "pattern": {"Regex": step}, "behavior": "Isolated", "invert": False})
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": pre.BYTE_LEVEL in steps}
    byte_level = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    vocabulary = {token: i for i, (token, kind) in enumerate(zip(tokens, kinds)) if kind not in (CONTROL, USER)}
    merges = [m.split(" ", 1) for m in metadata.get("tokenizer.ggml.merges", [])]
    template = _template(metadata, tokens, "gpt2")
    return {
        "version": "1.0", "normalizer": {"type": "NFC"} if name in ("qwen2", "qwen35") else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*parts, level]} if parts else level,
        "post_processor": template or {**byte_level, "trim_offsets": False}, "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False, "byte_fallback": False, "ignore_merges": ignore, "vocab": vocabulary,
            "merges": merges,
        },
    }, tokens  # fmt: skip


def _wordpiece(metadata: Metadata, tokens: list[str], kinds: list[int]) -> tuple[dict[str, Any], list[str]]:
    spelled = [
        token if kind in (CONTROL, UNUSED) else token[1:] if token.startswith(SPACE) else "##" + token
        for token, kind in zip(tokens, kinds)
    ]
    lower = metadata.get("tokenizer.ggml.normalizer.lowercase", True)
    accents = metadata.get("tokenizer.ggml.normalizer.strip_accents")
    return {
        "version": "1.0",
        "normalizer": {
            "type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": accents,
            "lowercase": bool(lower),
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"}, "post_processor": _template(metadata, spelled, "bert"),
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece", "unk_token": _special(metadata, spelled).get("unk", "[UNK]"),
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100, "vocab": {token: i for i, token in enumerate(spelled)},
        },
    }, spelled  # fmt: skip


def _sentencepiece(metadata: Metadata, tokens: list[str], kinds: list[int]) -> tuple[dict[str, Any], list[str]]:
    scores = (
        metadata["tokenizer.ggml.scores"][: len(tokens)].tolist()
        if "tokenizer.ggml.scores" in metadata
        else [0.0] * len(tokens)
    )
    vocabulary = {token: i for i, token in enumerate(tokens)}
    has_prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    normal = {t: s for t, s, k in zip(tokens, scores, kinds) if k not in (CONTROL, BYTE, UNKNOWN, UNUSED)}
    unknown = next((t for t, k in zip(tokens, kinds) if k == UNKNOWN), _special(metadata, tokens).get("unk", "<unk>"))
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    prepend = [{"type": "Prepend", "prepend": SPACE}] if has_prefix else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if has_prefix else []
    return {
        "version": "1.0", "normalizer": {"type": "Sequence", "normalizers": [*prepend, replace]}, "pre_tokenizer": None,
        "post_processor": _template(metadata, tokens, "llama"),
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}, {"type": "ByteFallback"},
                {"type": "Fuse"},
                *strip,
            ],
        },
        "model": {
            "type": "BPE", "dropout": None, "unk_token": unknown, "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True, "byte_fallback": True, "ignore_merges": False, "vocab": vocabulary,
            "merges": _merges(normal, vocabulary),
        },
    }, tokens  # fmt: skip


def _merges(scores: dict[str, float], vocabulary: dict[str, int]) -> list[list[str]]:
    """Every way to make a piece of two others, the best scores first."""
    found: list[tuple[float, int, int, str, str]] = []
    for token, score in scores.items():
        for i in range(1, len(token)):
            left, right = token[:i], token[i:]
            if left in scores and right in scores:
                found.append((-score, vocabulary[left], vocabulary[right], left, right))
    return [[left, right] for *_, left, right in sorted(found, key=lambda row: row[:3])]


def _varint(n: int) -> bytes:
    out = bytearray()
    while n > 0x7F:
        out.append(n & 0x7F | 0x80)
        n >>= 7
    out.append(n)
    return bytes(out)


def _pieces(metadata: Metadata, tokens: list[str], kinds: list[int]) -> bytes:
    """tokenizer.model: the pieces, and that they are of BPE with bytes to fall back on."""
    scores = metadata["tokenizer.ggml.scores"].tolist() if "tokenizer.ggml.scores" in metadata else [0.0] * len(tokens)
    out = bytearray()
    for token, score, kind in zip(tokens, scores, kinds):
        raw = token.encode("utf-8", "surrogateescape")
        piece = b"\x0a" + _varint(len(raw)) + raw + b"\x15" + struct.pack("<f", score)
        if kind != 1:
            piece += b"\x18" + _varint(kind)
        out += b"\x0a" + _varint(len(piece)) + piece
    special = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for key, name in SPECIAL}
    trainer = b"\x18\x02" + b"\x20" + _varint(len(tokens)) + b"\x98\x02\x01"  # BPE, size, byte_fallback
    for number, name, default in ((40, "unk", 0), (41, "bos", 1), (42, "eos", 2)):
        value = special.get(name)
        trainer += _varint(number << 3) + _varint(default if value is None else int(value))
    has_prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    normalizer = b"\x0a\x08identity" + b"\x18" + (b"\x01" if has_prefix else b"\x00") + b"\x20\x00" + b"\x28\x01"
    return bytes(out + b"\x12" + _varint(len(trainer)) + trainer + b"\x1a" + _varint(len(normalizer)) + normalizer)
