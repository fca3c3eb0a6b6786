"""Whether Megatron can train on from a checkpoint at a layout (`--for "megatron tp=4 pp=2"`), and which layouts divide.

Legacy folders are one file a rank: `load_checkpoint` takes them at the TP, PP and EP that saved them, at any DP.
`torch_dist` loads at any layout, but for optimizer state in flat buckets (`dp_reshardable`, the default since core
0.15), which follows a change of DP alone (megatron/training/checkpointing.py of 0.16, `load_checkpoint`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from shlex import quote
from typing import Any

from anyckpt.core.checkpoint import Checkpoint
from anyckpt.core.topology import Topology
from anyckpt.errors import UsageError
from anyckpt.names import settings
from anyckpt.verbs.resume import Answer, Wanted, no_training_state

RESHARDABLE = ("", "fully_reshardable", "fully_sharded_model_space")
_RANKED = ("tp", "pp", "vpp", "ep", "etp")


def megatron(checkpoint: Checkpoint, wanted: Wanted) -> Answer:
    """The judge of Megatron-LM; sizes that are not named are those that it was saved with."""
    saved = checkpoint.topology or Topology()
    given = {name: getattr(wanted.topology, name) for name in wanted.given if name not in ("world", "zero")}
    sizes = " ".join(f"--{name} {size}" for name, size in given.items())
    if "tp" in given and "etp" not in given and saved.etp == saved.tp:
        given["etp"] = given["tp"]
    layout = replace(saved, **given)
    args = arguments(checkpoint)
    faults = list(indivisible(args, layout))
    if faults:
        return Answer(str(wanted), False, "; ".join(faults))
    if (answer := no_training_state(checkpoint, wanted)) is not None:
        return answer
    changed = [name for name in _RANKED if getattr(layout, name) != getattr(saved, name)]
    lost = ("RNG states belong to ranks of the layout that saved them",) if checkpoint.rng is not None and (
        {"tp", "pp"} & set(changed)
    ) else ()
    command = f"anyckpt reshard {quote(checkpoint.path)} OUT {sizes}".rstrip()
    if checkpoint.format == "megatron":
        if not changed:
            return Answer(str(wanted), True, "load_checkpoint takes it at the layout that saved it", lost=lost)
        why = f"its files are those of ranks at {saved}: load_checkpoint takes them at no other {', '.join(changed)}"
        return Answer(str(wanted), False, why, command, lost)
    if checkpoint.format == "megatron-dist":
        kind = str(checkpoint.facts.get("param_state", ""))
        if not changed or kind in RESHARDABLE:
            return Answer(str(wanted), True, "a sharded checkpoint, which loads at any layout", lost=lost)
        why = f"its optimizer state is {kind}: Megatron takes it at no other {', '.join(changed)}"
        return Answer(str(wanted), False, why, command, lost)
    command = f"anyckpt convert {quote(checkpoint.path)} OUT --to megatron-dist {sizes}".rstrip()
    return Answer(str(wanted), False, f"Megatron can't read {checkpoint.format} checkpoints", command, lost)


def arguments(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """The run's options; those that a config.json means for a model of another family."""
    config = checkpoint.config or {}
    if not isinstance(config.get("model_type"), str):  # Megatron has one of its own, which is an enum
        return settings.plain_arguments(config)
    from anyckpt.names.arch import find

    try:
        return settings.megatron_arguments(config, find.of_config(config))[0]
    except UsageError:
        return {}


def indivisible(args: Mapping[str, Any], layout: Topology) -> Iterator[str]:
    """Every dimension that the layout does not divide, with the sizes that would. The vocabulary is padded to fit."""
    experts = args.get("num_experts")
    chunks = layout.pp * layout.vpp
    rows: list[tuple[str, Any, str, int]] = [
        ("attention heads", args.get("num_attention_heads"), "TP", layout.tp),
        ("query groups", settings.n_groups(args) if "num_attention_heads" in args else None, "TP", layout.tp),
        ("rows of the first MLP layer", args.get("ffn_hidden_size"), "TP", layout.tp),
        ("layers", args.get("num_layers"), "PP × VPP" if layout.vpp > 1 else "PP", chunks),
        ("experts", experts, "EP", layout.ep),
        ("rows of an expert", args.get("moe_ffn_hidden_size") if experts else None, "expert-TP", layout.etp),
    ]
    for what, size, name, n in rows:
        if isinstance(size, int) and size % n:
            fitting = [i for i in range(1, min(size, 1024) + 1) if size % i == 0]
            shown = ", ".join(map(str, fitting[:12])) + (" …" if len(fitting) > 12 else "")
            yield f"{size} {what} don't divide by {name} {n}; {name} may be {shown}"
    if not experts and layout.ep > 1:
        yield f"EP {layout.ep} is for models with experts"
