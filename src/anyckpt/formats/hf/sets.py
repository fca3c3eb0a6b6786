"""Which files of a folder are its weights, by their names alone.

    model.safetensors                       one file                 pytorch_model.bin
    model-00001-of-00003.safetensors        shards, and an index:    model.safetensors.index.json
    model.fp16.safetensors                  a variant                model.safetensors.index.fp16.json
    model.fp16-00001-of-00003.safetensors   its shards               model-00001-of-00003.fp16.safetensors (older)
    shard-00001-model-00001-of-00001.safetensors                     boxes by rank (torch.distributed.checkpoint)

transformers 5.24 takes the first that is there of: safetensors in one file, safetensors with an index, .bin in one
file, .bin with an index (`modeling_utils.py`, `_get_resolved_checkpoint_files`); diffusers the same under other stems.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_SHARD = re.compile(r"(?P<stem>.+?)-(?P<i>\d{4,})-of-(?P<n>\d{4,})(?P<variant>\.\w+)?\.(?P<ending>safetensors|bin)")
RANK_FILE = re.compile(r"shard-(?P<rank>\d{4,})-model-(?P<i>\d{4,})-of-(?P<n>\d{4,})\.safetensors")
_INDEX = re.compile(r"(?P<stem>.+?)(?P<variant>)\.(?P<ending>safetensors|bin)\.index(?P<variant2>\.\w+)?\.json")
_SINGLE = re.compile(
    r"(?P<stem>[^.]+(?:\.[^.]+)*?)(?P<variant>\.(?:fp16|bf16|fp32|fp8|ema|non_ema|int8|int4))?\.(?P<ending>safetensors|bin)"
)

STEMS = (
    "model", "pytorch_model", "diffusion_pytorch_model", "open_clip_model", "open_clip_pytorch_model",
    "pytorch_model_fsdp", "adapter_model", "pytorch_lora_weights", "consolidated",
)
"""Names that mean weights, the preferred one first. Files of other names are weights too where they are safetensors."""

NOT_WEIGHTS = re.compile(
    r"(optimizer|scheduler|scaler|sampler|dl_state_dict|training_args|random_states|rng_state|custom_checkpoint|"
    r"trainer_state)([_.\-].*)?"
)
"""Stems that the Trainer of transformers and Accelerate give to what is not weights."""


@dataclass(frozen=True, slots=True)
class WeightSet:
    """One set of weights. `shards` maps number to file, 0 for a set in one file. `total` is the N of -of-N, or 0."""

    stem: str
    variant: str
    ending: str
    total: int
    shards: dict[int, str]
    index: str = ""

    @property
    def title(self) -> str:
        """What to call it in a message."""
        name = f"{self.stem}{self.variant}.{self.ending}"
        if self.total:
            return f"{name} in {self.total:,} shards"
        return next(iter(self.shards.values()), self.index or name)

    @property
    def missing(self) -> list[str]:
        """The names of numbered shards that are not there."""
        any_name = next(iter(self.shards.values()), "")
        match = _SHARD.fullmatch(any_name)
        if match is None:
            return []
        head, tail = any_name[: match.start("i")], any_name[match.end("i") :]
        width = len(match["i"])
        return [f"{head}{i:0{width}d}{tail}" for i in range(1, min(self.total, 100_000) + 1) if i not in self.shards]

    @property
    def rank(self) -> tuple[bool, bool, int, bool, int, str]:
        """Order of preference, least first."""
        known = STEMS.index(self.stem) if self.stem in STEMS else len(STEMS)
        sharded = bool(self.total or self.index)
        ending = self.ending != "safetensors"
        return (self.variant != "", ending, known, sharded, -self.total, self.stem)


def find_sets(names: Iterable[str]) -> list[WeightSet]:
    """The sets of weights among the names of a folder's own files, the preferred one first."""
    found: dict[tuple[str, str, str, int], dict[int, str]] = {}
    indexes: dict[tuple[str, str, str], str] = {}
    for name in sorted(n for n in names if "/" not in n):
        if match := _INDEX.fullmatch(name):
            stem, variant = _split_variant(match["stem"], match["variant2"] or "")
            indexes[stem, variant, match["ending"]] = name
        elif RANK_FILE.fullmatch(name):
            continue  # parts of tensors, one file a rank: `dcp.hf_storage`
        elif match := _SHARD.fullmatch(name):
            stem, variant = _split_variant(match["stem"], match["variant"] or "")
            found.setdefault((stem, variant, match["ending"], int(match["n"])), {})[int(match["i"])] = name
        elif (match := _SINGLE.fullmatch(name)) and _may_be_weights(match["stem"], match["ending"]):
            found.setdefault((match["stem"], match["variant"] or "", match["ending"], 0), {})[0] = name
    sets = [
        WeightSet(stem, variant, ending, total, shards, indexes.pop((stem, variant, ending), "") if total else "")
        for (stem, variant, ending, total), shards in sorted(found.items(), key=lambda item: -item[0][3])
    ]
    sets += [WeightSet(*key, 0, {}, index) for key, index in indexes.items()]
    return sorted(sets, key=lambda s: s.rank)


def _split_variant(stem: str, variant: str) -> tuple[str, str]:
    """`model.fp16` is the stem `model` and the variant `.fp16`."""
    match = re.fullmatch(r"([^.]+)(\.\w+)", stem)
    return (match[1], match[2]) if match and not variant else (stem, variant)


def _may_be_weights(stem: str, ending: str) -> bool:
    if ending == "safetensors":
        return NOT_WEIGHTS.fullmatch(stem) is None
    return stem in STEMS or stem.startswith("pytorch_model")
