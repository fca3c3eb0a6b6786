"""Hugging Face folders: weights in one file or in shards with an index, a config, a tokenizer, training state beside.

    sets      which files are weights            join    shards into one set, held against the index
    beside    everything else in the folder      ties    names that the config ties
    order     parameters in the model's order    write   the folder to be

Covers what transformers, diffusers (one component), Accelerate's save_state and transformers' Trainer write.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from anyckpt.core.checkpoint import Checkpoint
from anyckpt.errors import CheckpointError
from anyckpt.finding import Report, fail
from anyckpt.formats import manifests, of_file
from anyckpt.formats.hf import beside as others
from anyckpt.formats.hf.join import Joined, join
from anyckpt.formats.hf.order import order_of
from anyckpt.formats.hf.sets import STEMS, WeightSet, find_sets
from anyckpt.formats.hf.ties import declared_ties
from anyckpt.formats.hf.write import write
from anyckpt.io.paths import printable
from anyckpt.io.place import Place

__all__ = ["matches", "read", "verify", "write"]

_TRAINER_FOLDER = re.compile(r"checkpoint-\d+")
OPENED = (".safetensors", ".bin", ".pt", ".pth", ".pkl", ".ckpt", ".json")
"""Endings of entries that a loader opens: one that is a pipe, a device or a bad link is told as what it is."""


def matches(place: Place) -> bool:
    """Whether the folder itself holds weights under the names that this family uses."""
    names = _own_names(place)
    sets = find_sets(names)
    usual = [s for s in sets if s.stem in STEMS or s.total or s.index]
    return bool(usual) or ("config.json" in names and len(sets) == 1)


def _own_names(place: Place) -> list[str]:
    """Names of this folder, not of folders in it; entries that are no files too, for they stand where files should."""
    return [name for name in (*place.names, *place.kinds) if "/" not in name]


def read(place: Place, report: Report) -> Checkpoint:
    """Read the folder. Raises the first error where it leaves no weight at all to describe."""
    return read_sets(place, find_sets(_own_names(place)), report)


def read_like(place: Place, report: Report, like: Checkpoint) -> Checkpoint:
    """As `read`; the order of parameters, which names an optimizer's numbers, is that of another checkpoint."""
    return read_sets(place, find_sets(_own_names(place)), report, order=order_of(like))


def read_sets(
    place: Place, sets: list[WeightSet], report: Report, *, format: str = "hf", order: Sequence[str] = ()
) -> Checkpoint:
    """Read the first of `sets`, tell of the others, and take up what lies beside."""
    report.extend(place.unreadable(OPENED))
    config = read_config(place, "config.json", report)
    manifests.check_names(place, report)
    chosen = sets[0]
    joined = join(place, chosen, report)
    read = set(joined.read)
    beside = others.look_beside(place, read, report)
    _tell_of_others(chosen, [s for s in sets[1:] if not s.shards or not set(s.shards.values()) <= read], report)
    others.check_code(place, _configs(place, config, report), report)
    if not joined.rows:
        raise _nothing_read(place, report)
    weights = joined.weights
    aliases = {**joined.aliases, **declared_ties(weights, config, report)}
    weights.tie({name: stored for name, stored in aliases.items() if name not in weights})
    listed = chosen.ending == "bin"  # state dicts are saved in the model's order, and cut into shards in that order
    optimizer = others.optimizer_of(beside, weights, aliases, config, listed, report, order)
    step, epoch = others.step_of(beside, optimizer, report)
    if format == "hf":
        _check_whole(place, config, beside, report)
    state: dict[str, Any] = beside.of("other")
    if beside.trainer_state is not None:
        state["trainer_state.json"] = beside.trainer_state
    return Checkpoint(
        format, str(place.path), weights, aliases=aliases, optimizer=optimizer,
        step=step if step is not None else next(iter(joined.steps.values()), None), epoch=epoch,
        scheduler=_one(beside.of("scheduler")), rng=_one(beside.of("rng")), state=state, config=config,
        assets=others.assets_of(place, config), facts=_facts(chosen, joined, beside),
    )  # fmt: skip


def read_config(place: Place, name: str, report: Report) -> Mapping[str, Any] | None:
    """A JSON object, None where it is not there or is none."""
    if name not in place.names:
        return None
    try:
        config = place.read_json(name, report, code="bad-header")
        if not isinstance(config, dict):
            raise fail("bad-header", "is no JSON object", where=name)
    except CheckpointError as error:
        report.extend([error.finding])
        return None
    return config


def _configs(place: Place, config: Mapping[str, Any] | None, report: Report) -> list[tuple[str, Any]]:
    return [("config.json", config), ("tokenizer_config.json", read_config(place, "tokenizer_config.json", report))]


def _tell_of_others(chosen: WeightSet, rest: list[WeightSet], report: Report) -> None:
    """Other sets of weights in the folder: a loader takes one of them, and which one is easily missed."""
    for other in rest:
        variant = other.stem == chosen.stem and other.variant != chosen.variant
        what = f"is a variant of the same weights; {chosen.title} is read" if variant else (
            f"also holds weights, perhaps others; {chosen.title} is read, as loaders do"
        )  # fmt: skip
        report.add("ambiguous", what, where=printable(other.title), severity="note" if variant else "warning")


def _nothing_read(place: Place, report: Report) -> CheckpointError:
    errors = report.errors
    if errors:
        return CheckpointError(errors[0])
    return fail("missing-tensor", "the weights' files hold no tensors", where=printable(str(place.path)))


def _check_whole(place: Place, config: Mapping[str, Any] | None, beside: others.Beside, report: Report) -> None:
    """What a loader will miss that is no weight."""
    names = set(place.names)
    if config is None and "config.json" not in names:
        report.add(
            "missing-config", "there is no config.json: from_pretrained can't tell what model these weights are",
            where=printable(str(place.path)), hint="copy config.json from the base model",
            severity="note" if beside.objects else "warning",
        )
    if config is not None and "vocab_size" in config and not any(others.TOKENIZER.fullmatch(n) for n in names):
        report.add(
            "missing-tokenizer", "there are no tokenizer files: text can't be turned into this model's tokens",
            where=printable(str(place.path)), hint="copy the tokenizer files from the base model",
            severity="note" if beside.objects else "warning",
        )
    if "trainer_state.json" not in names and ("optimizer.pt" in names or _TRAINER_FOLDER.fullmatch(place.path.name)):
        report.add(
            "incomplete", "there is no trainer_state.json, which the Trainer writes last: the save was cut short",
            where=printable(str(place.path)), severity="warning",
            hint="its weights may be whole, but training can't go on from here; use an earlier one",
        )


def _facts(chosen: WeightSet, joined: Joined, beside: others.Beside) -> dict[str, Any]:
    """What is known of the container, those of the shards' pickles among it."""
    facts = dict(joined.facts)
    facts.setdefault("container", chosen.ending if chosen.ending == "safetensors" else "pickle")
    imports = (*facts.get("imports", ()), *beside.imports)
    if imports:
        facts["imports"] = tuple(dict.fromkeys(imports))
    if joined.metadata:
        facts["metadata"] = next(iter(joined.metadata.values()))
    return {**facts, "files": tuple(joined.read), "index": chosen.index}


def _one(objects: Mapping[str, Any]) -> Any:
    """A single object, or several by file name, or None."""
    return next(iter(objects.values())) if len(objects) == 1 else dict(objects) or None


def verify(place: Place, checkpoint: Checkpoint, report: Report) -> None:
    """Deep: what each file's own format can check, and every digest that the folder carries."""
    for name in checkpoint.facts.get("files", ()):
        file = place.open(name)
        row = of_file(file)
        hook = getattr(row.load(), "verify", None) if row is not None else None
        if hook is not None:
            hook(file, checkpoint, report)
    manifests.verify(place, report)
