"""What stands beside the weights in a folder: training state, tokenizer, code, and things left over.

    transformers' Trainer    optimizer.pt scheduler.pt scaler.pt rng_state[_R].pth trainer_state.json training_args.bin
    Accelerate save_state    optimizer[_N].bin scheduler[_N].bin scaler.pt sampler[_N].bin random_states_R.pkl
                             custom_checkpoint_N.pkl
Every file that a loader would unpickle is judged, whatever it is called.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from anyckpt.core.checkpoint import Asset, Checkpoint, Optimizer
from anyckpt.core.source import File
from anyckpt.core.tensor import Tensor
from anyckpt.errors import CheckpointError
from anyckpt.finding import Report
from anyckpt.formats import of_file, read_file, yamled
from anyckpt.formats.hf.order import in_model_order
from anyckpt.formats.torch import archive as torch_archive
from anyckpt.formats.torch import zip as torch_zip
from anyckpt.formats.torch.assign import candidates
from anyckpt.formats.torch.module_order import order_by_shapes
from anyckpt.formats.torch.optimizer import is_optimizer, last_step, read_optimizer, shapes_by_group
from anyckpt.io.paths import printable
from anyckpt.io.place import Place

Role = Literal["optimizer", "scheduler", "rng", "other"]

ROLES: tuple[tuple[re.Pattern[str], Role], ...] = (
    (re.compile(r"optimizer(_\d+)?\.(pt|bin)"), "optimizer"),
    (re.compile(r"scheduler(_\d+)?\.(pt|bin)"), "scheduler"),
    (re.compile(r"rng_state(_\d+)?\.pth|random_states_\d+\.pkl"), "rng"),
    (
        re.compile(r"scaler\.pt|training_args\.bin|(sampler|dl_state_dict)(_\d+)?\.bin|custom_checkpoint_\d+\.pkl"),
        "other",
    ),
)
ASSETS = re.compile(
    r"config\.json|generation_config\.json|tokenizer.*|special_tokens_map\.json|added_tokens\.json|vocab\..+|merges\.txt|"
    r"chat_template.*|.*\.tiktoken|.*\.spm|spiece\.model|sentencepiece.*\.model|.*preprocessor_config\.json|"
    r"processor_config\.json|preprocessor\.json|modules\.json|config_sentence_transformers\.json|"
    r"sentence_bert_config\.json|quantize_config\.json|quantization_config\.json|modelcard\.json|README\.md|"
    r"(?i:license|notice).*|.*\.jinja"
)
"""Files of a model folder that a loader or a reader of the folder wants, beside the weights."""

COMPANIONS = """
config.json generation_config.json tokenizer.json tokenizer_config.json tokenizer.model special_tokens_map.json
added_tokens.json vocab.json merges.txt vocab.txt spiece.model chat_template.jinja chat_template.json
preprocessor_config.json processor_config.json
""".split()
"""What is looked for by name beside a file that is named alone."""

MODULE_CONFIG = re.compile(r"\d+_\w+/config\.json|additional_chat_templates/[^/]+\.jinja")
"""Modules of sentence-transformers, and templates beside the first, which lie in folders of their own."""

TOKENIZER = re.compile(r"tokenizer\.(json|model)|vocab\.(json|txt)|spiece\.model|sentencepiece.*\.model|.*\.tiktoken")
LEFTOVER = re.compile(
    r"(.*/)?(.*\.(tmp|temp|part|partial|incomplete|crdownload|aria2|download|swp|lock)([._\-]?\w*)?|tmp-.*|\.anyckpt-.*|.*~)"
)
MAX_JUDGED = 1000  # files looked into beside the weights; a folder of more is another kind of folder


@dataclass(slots=True)
class Beside:
    """What was found: objects saved beside the weights by file name, and the plain fields of trainer_state.json."""

    objects: dict[str, Any] = field(default_factory=dict)
    trainer_state: Mapping[str, Any] | None = None
    imports: tuple[Any, ...] = ()

    def of(self, role: Role) -> dict[str, Any]:
        """The objects of a role by file name."""
        patterns = [pattern for pattern, r in ROLES if r == role]
        return {name: o for name, o in self.objects.items() if any(p.fullmatch(name) for p in patterns)}


def look_beside(place: Place, weights: Container[str], report: Report) -> Beside:
    """Judge every file but those in `weights`, and keep the training state among them."""
    beside = Beside()
    names = [name for name in place.names if name not in weights]
    for name in names[:MAX_JUDGED]:
        try:
            _look_into(place, name, beside, report)
        except CheckpointError as error:
            # A file that is no checkpoint at all is nothing to complain of here, unless its name says that it is one.
            if error.finding.code != "not-a-checkpoint" or _is_saved(name):
                report.extend([error.finding])
    if len(names) > MAX_JUDGED:
        message = f"{len(names) - MAX_JUDGED:,} more files were not looked into"
        report.add("not-looked-at", message, where=printable(str(place.path)))
        report.worsen("unknown")
    if "trainer_state.json" in place.names:
        try:
            state = place.read_json("trainer_state.json", report, code="bad-header", allow_nan=True)
        except CheckpointError as error:
            report.extend([error.finding])
        else:
            beside.trainer_state = state if isinstance(state, dict) else None
    left = [name for name in names if LEFTOVER.fullmatch(name) and not name.startswith(".cache/")]
    if left:
        message = f"{len(left)} unfinished file{'s' if len(left) > 1 else ''} of a save or download that was cut short"
        hint = "delete it once the checkpoint is known to be whole"
        report.add("leftover", message, where=printable(left[0]), hint=hint)
    return beside


def _is_saved(name: str) -> bool:
    return any(pattern.fullmatch(name) for pattern, _ in ROLES)


def _look_into(place: Place, name: str, beside: Beside, report: Report) -> None:
    file = place.open(name)
    if name.endswith(yamled.ENDINGS):
        yamled.read_yaml(file, report)
        return
    row = of_file(file) if file.size else None
    if row is None or row.name in ("safetensors", "npy"):
        if _is_saved(name):
            read_file(file, report)  # says what it is instead
        return
    found = Report()
    checkpoint = read_file(file, found)
    report.worsen(found.verdict)
    report.extend(finding for finding in found.findings if finding.severity != "note")
    beside.imports += tuple(checkpoint.facts.get("imports", ()))
    if _is_saved(name):
        beside.objects[name] = saved_object(file, row.name, checkpoint)


def saved_object(file: File, row: str, checkpoint: Checkpoint) -> Any:
    """The object in a file as it was saved, where the container allows; else the parts a reader made of it."""
    if row == "torch":
        ignored = Report()
        return torch_zip.load(torch_archive.open_archive(file, ignored), ignored)[0].value
    if checkpoint.optimizer is not None:
        return as_saved(checkpoint.optimizer)
    return {**checkpoint.weights, **checkpoint.state}


def as_saved(optimizer: Optimizer) -> dict[str, Any]:
    """An optimizer's state dict again, from its slots."""
    state: dict[str, dict[str, Any]] = {}
    for slot, by_parameter in optimizer.slots.items():
        for parameter, tensor in by_parameter.items():
            state.setdefault(parameter, {})[slot] = tensor
    return {"state": state, "param_groups": [dict(group) for group in optimizer.groups]}


def optimizer_of(
    beside: Beside,
    weights: Mapping[str, Tensor],
    aliases: Mapping[str, str],
    config: Mapping[str, Any] | None,
    listed: bool,
    report: Report,
    given: Sequence[str] = (),
) -> Optimizer | None:
    """The optimizer by parameter name. `listed`: the weights are in the model's order as they stand (.bin files are).

    Its numbers count along the model's parameters; where that order is known neither from the files nor from the
    class of the model, the likeliest that fits the shapes is taken and said to be so. `given`: a reference's order.
    """
    saved = {name: value for name, value in beside.of("optimizer").items() if is_optimizer(value)}
    if not saved:
        return None
    order = list(weights) if listed else in_model_order(weights, config)
    if given:
        order = [name for name in given if name in weights]
    where = next(iter(saved))
    if order is None:
        shapes = shapes_by_group(saved.values())
        order = order_by_shapes({c.name: c.shape for c in candidates(weights, aliases)}, shapes) if shapes else None
        if order is not None:
            report.add(
                "ambiguous", "the optimizer's numbers were given names by shape and by the usual order of modules: the "
                "files do not tell the model's own", where=where,
                hint="to be sure, name a torch.save file of the same model: --like MODEL", severity="warning",
            )  # fmt: skip
    if order is None:
        report.add(
            "inferred", "the order of the model's parameters is not known, so the optimizer's state keeps its numbers",
            where=where, hint="name a torch.save file of the same model: anyckpt convert PATH OUT --like MODEL",
        )
    ordered = {name: weights[name] for name in order or ()}
    return read_optimizer(saved.values(), ordered, report, aliases=aliases, where=where)


def step_of(beside: Beside, optimizer: Optimizer | None, report: Report) -> tuple[int | None, int | None]:
    """Step and whole epochs, from trainer_state.json, else the optimizer's own count.

    The `step` in Accelerate's RNG files counts batches, not steps; ranks that differ in it are of different saves.
    """
    state = beside.trainer_state or {}
    step, epoch = state.get("global_step"), state.get("epoch")
    step = step if _is_count(step) else None
    ranks = beside.of("rng")
    counts = {o["step"] for o in ranks.values() if isinstance(o, dict) and _is_count(o.get("step"))}
    if len(counts) > 1:
        report.add("mixed-steps", f"the ranks' RNG states are of steps {sorted(counts)}", where=next(iter(ranks)))
    if step is None and optimizer is not None and (step := last_step(optimizer)) is not None:
        report.add("inferred", f"step {step:,} is the optimizer's count", where=next(iter(beside.of("optimizer")), ""))
    return step, int(epoch) if isinstance(epoch, int | float) and 0 <= epoch < 1e9 else None


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def check_code(place: Place, configs: Iterable[tuple[str, Any]], report: Report) -> None:
    """Name the Python files that a loader with `trust_remote_code` would import."""
    scripts = [name for name in place.names if name.endswith(".py")]
    for where, config in configs:
        if isinstance(config, dict) and isinstance(config.get("auto_map"), dict):
            named = sorted({str(target) for value in config["auto_map"].values() for target in _flat(value)})
            message = f"asks for code of its own ({', '.join(printable(n, limit=60) for n in named[:4])})"
            listed = ", ".join(printable(script) for script in scripts[:4]) or "it lies in another repository"
            report.add(
                "contains-code", message + ": trust_remote_code=True would run it", where=where,
                hint=f"read it first: {listed}",
            )
            report.worsen("unknown")
            return
    if scripts:
        message = f"{len(scripts)} Python files lie beside the weights; no config asks for them"
        report.add("contains-code", message, where=printable(scripts[0]), severity="note")


def with_companions(place: Place, checkpoint: Checkpoint, report: Report) -> Checkpoint:
    """A file's checkpoint with the model's config and tokenizer, where they lie beside it.

    Only files of fixed names are looked for, in the folder of a file or the folder that `place` is.
    """
    if checkpoint.assets or "model_type" in (checkpoint.config or {}) or not place.exists("config.json"):
        return checkpoint
    ignored = Report()
    try:
        config = place.read_json("config.json", ignored, code="bad-header")
        if not isinstance(config, dict) or "model_type" not in config:
            return checkpoint
        assets = tuple(Asset(name, place.open(name)) for name in COMPANIONS if place.exists(name))
    except CheckpointError as error:
        where = error.finding.where
        report.add("not-looked-at", f"what lies beside the file can't be read: {error.finding.message}", where=where)
        return checkpoint
    report.add("inferred", "config.json beside the file is taken for that of its model", where="config.json")
    return replace(checkpoint, config=config, assets=assets)


def _flat(value: Any) -> list[Any]:
    return [v for v in value if v is not None] if isinstance(value, list) else [value]


def assets_of(place: Place, config: Mapping[str, Any] | None) -> tuple[Asset, ...]:
    """The files that travel along when the checkpoint is converted; code only where the config needs it to load."""
    wanted = [name for name in place.names if "/" not in name and ASSETS.fullmatch(name)]
    wanted += [name for name in place.names if MODULE_CONFIG.fullmatch(name)]
    if config is not None and isinstance(config.get("auto_map"), dict):
        wanted += [name for name in place.names if name.endswith(".py") and "/" not in name]
    return tuple(Asset(name, place.open(name)) for name in wanted)
