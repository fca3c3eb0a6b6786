"""Tokenizer files -> the tokenizer's keys, as the official converter writes them.

    tokenizer.model                   SentencePiece: pieces, scores, kinds; then added tokens over them
    tokenizer.json, BPE               tokens by id, kinds, merges                                 model `gpt2`
    tokenizer.json, BPE with bytes    a SentencePiece vocabulary that only tokenizer.json has     model `llama`
    tokenizer.json, WordPiece         `##x` becomes `x`, all else gets U+2581 in front            model `bert`

Kinds: 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte. Facts: `conversion/base.py` and
`gguf-py/gguf/vocab.py` of llama.cpp build 11434.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from anyckpt.errors import UsageError
from anyckpt.formats.gguf import kv, pre, special
from anyckpt.formats.gguf.files import Files
from anyckpt.formats.gguf.kv import F32, I32, STRING, Field
from anyckpt.formats.gguf.pieces import read_pieces

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)
SPACE = "\u2581"
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")

Config = Mapping[str, Any]


def tokenizer_keys(architecture: str, config: Config, files: Files, pre_name: str | None = None) -> dict[str, Field]:
    """All keys of the tokenizer; {} where the model comes without one.

    `architecture` is the table's name, `pre_name` overrides what the definition says. Raises UsageError where the
    pre-tokenizer is not known, naming the choices.
    """
    tokenizer = files.table("tokenizer.json")
    kind = (tokenizer.get("model") or {}).get("type")
    if architecture == "bert":
        if not tokenizer:
            return _unread(files, "vocab.txt")
        return _wordpiece(config, files, tokenizer, pre_name)
    wants_bpe = architecture in ("gpt2", "deepseek2", "qwen3moe") or (
        architecture == "phi3" and files.table("tokenizer_config.json").get("tokenizer_class") == "GPT2Tokenizer"
    )
    if "tokenizer.model" in files and not wants_bpe:
        out = _sentencepiece(architecture, config, files)
    elif not tokenizer:
        return _unread(files, "vocab.json", "tokenizer.model", "tekken.json")
    elif kind == "BPE" and _has_bytes(tokenizer) and architecture in ("llama", "mixtral"):
        out = _pieces_of_json(config, files, tokenizer)
    elif kind == "BPE":
        out = _byte_level(config, files, tokenizer, pre_name)
    else:
        raise UsageError(
            f"a {kind} tokenizer is not written for {architecture}", hint="leave the tokenizer out of the source"
        )
    return _quirks(architecture, config, files, out)


def _unread(files: Files, *names: str) -> dict[str, Field]:
    """No tokenizer at all is fine; one in a form that is not read is not to be lost in silence."""
    found = [name for name in names if name in files]
    if found:
        raise UsageError(
            f"the tokenizer is only there as {found[0]}, which is not read",
            hint="save it as tokenizer.json: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)",
        )
    return {}


def _quirks(architecture: str, config: Config, files: Files, out: dict[str, Field]) -> dict[str, Field]:
    """What single model families get on top."""
    if architecture in ("gemma2", "gemma3") and "tokenizer.model" in files:
        out["tokenizer.ggml.add_space_prefix"] = kv.boolean(False)
    if architecture in ("llama", "mixtral"):
        prefix = files.table("tokenizer_config.json").get("add_prefix_space")
        if isinstance(prefix, bool):
            out = {"tokenizer.ggml.add_space_prefix": kv.boolean(prefix), **out}
        if config.get("vocab_size") == 32016:  # Code Llama
            for name, token in (("prefix", 32007), ("suffix", 32008), ("middle", 32009), ("eot", 32010)):
                out[f"tokenizer.ggml.{name}_token_id"] = kv.u32(token)
        if config.get("vocab_size") == 49152:  # small Granite models
            out["tokenizer.ggml.add_bos_token"] = kv.boolean(False)
    return out


def looks_special(token: str) -> bool:
    """Whether a token that is not marked so is one of control all the same.

    >>> looks_special("<|im_end|>"), looks_special("hello")
    (True, False)
    """
    return (
        token in ("<pad>", "<mask>", "<2mass>", "[@BOS@]")
        or (token.startswith("<|") and token.endswith("|>"))
        or (token.startswith("<｜") and token.endswith("｜>"))
        or (token.startswith("<unused") and token.endswith(">"))
    )


def _head(model: str, pre_name: str, tokens: Sequence[str | bytes]) -> dict[str, Field]:
    return {
        "tokenizer.ggml.model": kv.text(model), "tokenizer.ggml.pre": kv.text(pre_name),
        "tokenizer.ggml.tokens": kv.array(STRING, tokens),
    }  # fmt: skip


def _sentencepiece(architecture: str, config: Config, files: Files) -> dict[str, Field]:
    pieces = read_pieces(files.data("tokenizer.model"), "tokenizer.model")
    size = int(config.get("vocab_size") or len(pieces))
    tokens: list[bytes] = [f"[PAD{i}]".encode() for i in range(size)]
    scores, kinds = [-10000.0] * size, [UNUSED] * size
    for i, piece in enumerate(pieces[:size]):
        tokens[i], scores[i] = piece.text, piece.score
        kinds[i] = piece.kind if piece.kind in (UNKNOWN, CONTROL, UNUSED, BYTE) else NORMAL
    for text, i in files.table("added_tokens.json").items():
        if isinstance(i, int) and 0 <= i < size:
            tokens[i], scores[i], kinds[i] = text.encode(), -1000.0, USER
    is_phi = architecture == "phi3"
    for i, token in _added(files.table("tokenizer_config.json").get("added_tokens_decoder"), size):
        _put(i, token, is_phi, tokens, scores, kinds)
    if is_phi:
        for token in files.table("tokenizer.json").get("added_tokens") or []:
            if isinstance(token, dict) and isinstance(token.get("id"), int) and 0 <= token["id"] < size:
                _put(token["id"], token, True, tokens, scores, kinds)
    out = _head("llama", "default", tokens)
    out["tokenizer.ggml.scores"] = kv.array(F32, scores)
    out["tokenizer.ggml.token_type"] = kv.array(I32, kinds)
    return {**out, **special.keys(files, n_vocab=size)}


def _added(found: Any, size: int) -> list[tuple[int, dict[str, Any]]]:
    """`added_tokens_decoder`: {"id": {"content": …, "special": …}}."""
    rows = found.items() if isinstance(found, dict) else ()
    return [
        (int(i), t) for i, t in rows if str(i).isdigit() and int(i) < size and isinstance(t, dict) and "content" in t
    ]


def _put(
    i: int, token: Mapping[str, Any], is_phi: bool, tokens: list[bytes], scores: list[float], kinds: list[int]
) -> None:
    """An added token over a piece. Phi-3 goes by the mark alone, and keeps the text as it is."""
    content = str(token["content"])
    if token.get("special") or (not is_phi and looks_special(content)):
        kinds[i] = CONTROL
    else:
        kinds[i] = USER
        content = content if is_phi else content.replace(SPACE, " ")
    tokens[i], scores[i] = content.encode("utf-8", "surrogatepass"), -1000.0


def _has_bytes(tokenizer: Config) -> bool:
    """Whether this is a SentencePiece vocabulary in tokenizer.json's form."""
    model, decoder = tokenizer["model"], tokenizer.get("decoder") or {}
    return bool(model.get("byte_fallback")) and decoder.get("type") == "Sequence"


def _vocabulary(tokenizer: Config, files: Files) -> tuple[dict[int, str], dict[int, dict[str, Any]]]:
    """Token by id, and what is known of the added ones. Tokens that only tokenizer_config.json adds count too."""
    model = tokenizer["model"]
    by_id: dict[int, str] = {i: token for token, i in (model.get("vocab") or {}).items()}
    added: dict[int, dict[str, Any]] = {}
    for token in tokenizer.get("added_tokens") or []:
        if isinstance(token, dict) and isinstance(token.get("id"), int):
            added[token["id"]] = token
    for i, token in _added(files.table("tokenizer_config.json").get("added_tokens_decoder"), 1 << 31):
        added.setdefault(i, token)
    by_id.update({i: str(token["content"]) for i, token in added.items()})
    return by_id, added


def _tokens(config: Config, tokenizer: Config, files: Files) -> tuple[list[str], list[int]]:
    by_id, added = _vocabulary(tokenizer, files)
    size = int(config.get("vocab_size") or len(by_id))
    if by_id and max(by_id) >= size:
        raise UsageError(
            f"the tokenizer has token {max(by_id):,}, the model a vocabulary of {size:,}",
            hint="tokenizer and model do not belong together, or the embedding was not resized",
        )
    tokens, kinds = [], []
    for i in range(size):
        token = by_id.get(i)
        kind = UNUSED if token is None else NORMAL
        if token is None:
            token = f"[PAD{i}]"
        elif i in added:
            kind = CONTROL if added[i].get("special") or looks_special(token) else USER
            if kind == USER:
                token = token.replace(SPACE, " ")
        tokens.append(token)
        kinds.append(kind)
    return tokens, kinds


def _pre(files: Files, tokenizer: Config, pre_name: str | None) -> str:
    cleans = files.table("tokenizer_config.json").get("clean_up_tokenization_spaces") is not False
    found = pre_name or pre.name_of(tokenizer, cleans_spaces=cleans)
    if not found:
        raise UsageError(
            "how this tokenizer cuts text into words is none of the ways that are known",
            hint=f"say which with --pre; llama.cpp has {', '.join(pre.CHOICES)} and more",
        )
    return found


def _byte_level(config: Config, files: Files, tokenizer: Config, pre_name: str | None) -> dict[str, Field]:
    tokens, kinds = _tokens(config, tokenizer, files)
    out = _head("gpt2", _pre(files, tokenizer, pre_name), tokens)
    out["tokenizer.ggml.token_type"] = kv.array(I32, kinds)
    return {**out, **special.keys(files, with_merges=True)}


def _wordpiece(config: Config, files: Files, tokenizer: Config, pre_name: str | None) -> dict[str, Field]:
    tokens, kinds = _tokens(config, tokenizer, files)
    spelled = [
        token if kind == CONTROL else token[2:] if token.startswith("##") else SPACE + token
        for token, kind in zip(tokens, kinds)
    ]
    out = {"tokenizer.ggml.token_type_count": kv.u32(config.get("type_vocab_size", 1))}
    out |= _head("bert", _pre(files, tokenizer, pre_name), spelled)
    out["tokenizer.ggml.token_type"] = kv.array(I32, kinds)
    return {**out, **special.keys(files, n_vocab=len(tokens))}


def _pieces_of_json(config: Config, files: Files, tokenizer: Config) -> dict[str, Field]:
    """A SentencePiece vocabulary whose scores are lost: its merges are not written, llama.cpp goes by the scores
    alone.
    """
    by_id, added = _vocabulary(tokenizer, files)
    specials = {i for i, token in added.items() if token.get("special")}
    base = len(tokenizer["model"].get("vocab") or {})
    tokens, kinds = [], []
    for i in sorted(by_id):
        token = by_id[i]
        if i >= base and i not in specials:
            kind = USER
        else:
            kind = BYTE if _BYTE.fullmatch(token) else CONTROL if i in specials else NORMAL
        tokens.append(token)
        kinds.append(kind)
    out = _head("llama", "default", tokens)
    out["tokenizer.ggml.scores"] = kv.array(F32, [-1000.0] * len(tokens))
    out["tokenizer.ggml.token_type"] = kv.array(I32, kinds)
    return {**out, **special.keys(files, n_vocab=len(tokens))}
