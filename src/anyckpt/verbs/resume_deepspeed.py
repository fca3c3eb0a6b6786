"""Whether DeepSpeed can train on from a checkpoint at a number of ranks and a stage (`--for "deepspeed dp=8 zero=3"`).

`engine.load_checkpoint` refuses another number of data-parallel ranks than the one that saved ("Automatic adjustment …
is not currently supported"), takes stage 1 for 2 and 2 for 1, and nothing else for stage 3 (DeepSpeed 0.19.8).
"""

from __future__ import annotations

from shlex import quote

from anyckpt.core.checkpoint import Checkpoint
from anyckpt.core.topology import Topology
from anyckpt.verbs.resume import Answer, Wanted, no_training_state


def deepspeed(checkpoint: Checkpoint, wanted: Wanted) -> Answer:
    """The judge of DeepSpeed; sizes that are not named are those that it was saved with."""
    if (answer := no_training_state(checkpoint, wanted)) is not None:
        return answer
    saved = checkpoint.topology or Topology()
    stage = int(checkpoint.facts.get("zero_stage", 0))
    zero = wanted.topology.zero if "zero" in wanted.given else abs(stage)
    tp, pp = (getattr(wanted.topology if size in wanted.given else saved, size) for size in ("tp", "pp"))
    dp = wanted.topology.dp if "dp" in wanted.given else saved.dp
    if "world" in wanted.given and "dp" not in wanted.given:
        dp = max(1, wanted.topology.world // (tp * pp))
    if zero not in (0, 1, 2, 3):
        return Answer(str(wanted), False, f"there is no ZeRO stage {zero}")
    lost = _rng_lost(checkpoint, saved, dp * tp * pp)
    command = f"anyckpt reshard {quote(checkpoint.path)} OUT --dp {dp}" + (f" --zero {zero}" if zero else "")
    if checkpoint.format == "deepspeed-universal":
        return _universal(checkpoint, wanted, zero, lost)
    if checkpoint.format != "deepspeed":
        command += "" if zero else " --zero 2"
        return Answer(str(wanted), False, f"DeepSpeed can't read {checkpoint.format} checkpoints", command, lost)
    if (tp, pp) != (saved.tp, saved.pp):
        why = f"it was saved with {saved.tp} tensor-parallel ranks and {saved.pp} pipeline stages"
        return Answer(str(wanted), False, why, command + f" --tp {tp}" if pp == saved.pp else "", lost)
    kind = min(abs(stage), 1) if abs(stage) < 3 else 3
    if kind != (min(zero, 1) if zero < 3 else 3):
        form = "each parameter cut over the ranks" if zero == 3 else "one buffer cut over the ranks"
        why = f"it was saved with ZeRO stage {abs(stage)}; stage {zero} wants {form if zero else 'everything whole'}"
        return Answer(str(wanted), False, why, command if zero else "", lost)
    if kind and dp != saved.dp:
        why = f"it was saved by {saved.dp} data-parallel ranks, and DeepSpeed refuses to load it on {dp}"
        return Answer(str(wanted), False, why, command, lost)
    return Answer(str(wanted), True, "engine.load_checkpoint takes it as it is", lost=lost)


def _universal(checkpoint: Checkpoint, wanted: Wanted, zero: int, lost: tuple[str, ...]) -> Answer:
    """Any number of ranks, at what its loader leaves out."""
    saved = checkpoint.optimizer.groups if checkpoint.optimizer else ()
    trained = {name for group in saved for name in group["params"]}
    rest = [name for name in checkpoint.weights if name not in trained and name not in checkpoint.aliases]
    if rest:
        lost += (f"{len(rest)} buffers and frozen parameters, {rest[0]} first, stay as the fresh model has them",)
    groups = [{key: value for key, value in group.items() if key != "params"} for group in saved]
    if zero == 3 and any(group != groups[0] for group in groups[1:]):
        lost += ("every parameter group gets the hyperparameters of the first",)
    return Answer(str(wanted), True, 'with {"checkpoint": {"load_universal": true}} in its config', lost=lost)


def _rng_lost(checkpoint: Checkpoint, saved: Topology, world: int) -> tuple[str, ...]:
    was = saved.world or saved.dp * saved.tp * saved.pp
    if checkpoint.rng is None or world == was:
        return ()
    return (f"the generators' states are those of {was} processes; {world} can't take them over",)
