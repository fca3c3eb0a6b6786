"""The files of one saved step by what their names say, and which step of a run is meant.

    SAVE_DIR/latest                     the tag: a text, or a link to the folder that scripts put in its place
    SAVE_DIR/TAG/
      mp_rank_TT_model_states.pt                                    stages 0-2, and every pipeline
      zero_pp_rank_D_mp_rank_TT_model_states.pt                     stage 3; D is the data-parallel rank
      [bf16_]zero_pp_rank_D_mp_rank_TT_optim_states.pt              stages 1-3 and BF16_Optimizer
      layer_NN[-model_TT]-model_states.pt                           pipeline: one layer
      [layer_L_]expert_E_mp_rank_TT_model_states.pt                 mixture of experts: one expert, numbered globally
      expp_rank_X_mp_rank_TT_optim_states.pt                        mixture of experts without ZeRO

Tutorials draw the names without `_mp_rank_TT`, and so some people name their files; releases before 0.3 left out the
underscore before `optim`. Ranks are numbers: rank 10 follows rank 9.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from anyckpt.errors import CheckpointError
from anyckpt.finding import Report, fail
from anyckpt.io.paths import name_fault, printable
from anyckpt.io.place import Place

Kind = Literal["model", "optim", "layer", "expert", "expert-optim"]

LATEST, LATEST_UNIVERSAL = "latest", "latest_universal"
MAX_TAG_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Part:
    """One file: its kind and the numbers in its name. `dp` is -1 where the file is not one rank's."""

    name: str
    kind: Kind
    dp: int = -1
    mp: int = 0
    layer: int = -1
    expert: int = -1
    bf16: bool = False


_MP = r"(?:_mp_rank_(?P<mp>\d+))?"
_PATTERNS: tuple[tuple[Kind, re.Pattern[str]], ...] = (
    ("model", re.compile(rf"(?:zero_pp_rank_(?P<dp>\d+){_MP}|mp_rank_(?P<mp2>\d+))_model_states\.pt")),
    ("optim", re.compile(rf"(?P<bf16>bf16_)?zero_pp_rank_(?P<dp>\d+){_MP}_?optim_states\.pt")),
    ("layer", re.compile(r"layer_(?P<layer>\d+)(?:-model_(?P<mp>\d+))?-model_states\.pt")),
    ("expert", re.compile(rf"(?:layer_(?P<layer>\d+)_)?expert_(?P<expert>\d+){_MP}_model_states\.pt")),
    ("expert-optim", re.compile(rf"expp_rank_(?P<expert>\d+){_MP}_optim_states\.pt")),
)


def part_of(name: str) -> Part | None:
    """What a file's name says, None for the name of no part."""
    for kind, pattern in _PATTERNS:
        match = pattern.fullmatch(name)
        if match:
            found = {k: int(v) for k, v in match.groupdict().items() if v is not None and k != "bf16"}
            found["mp"] = found.pop("mp2", found.get("mp", 0))
            return Part(name, kind, bf16=bool(match.groupdict().get("bf16")), **found)
    return None


def parts_in(names: Iterable[str]) -> list[Part]:
    """The parts among the names of one folder, in the order of their numbers."""
    found = [part for name in names if "/" not in name and (part := part_of(name)) is not None]
    return sorted(found, key=lambda p: (p.kind, p.mp, p.dp, p.layer, p.expert, p.bf16))


def is_universal(place: Place) -> bool:
    """Whether this folder is one that ds_to_universal.py makes: `zero/optimizer_state.pt` and a folder a parameter."""
    return "zero/optimizer_state.pt" in place.names or any(
        name.startswith("zero/") and name.endswith("/fp32.pt") for name in place.names
    )


def is_step(place: Place) -> bool:
    """Whether this folder is one saved step."""
    return bool(parts_in(place.names)) or is_universal(place)


def steps_in(place: Place) -> list[str]:
    """The folders directly inside that are saved steps, the newest by number last; universal ones first."""
    tags = {name.partition("/")[0] for name in place.names if "/" in name}
    found = [tag for tag in tags if place.kinds.get(tag) == "folder" and is_step(place.subplace(tag))]
    return sorted(found, key=lambda tag: (not is_universal(place.subplace(tag)), number(tag), tag))


def number(tag: str) -> int:
    """The last number in a tag, usually the step; -1 where there is none."""
    digits = re.findall(r"\d+", tag)
    return int(digits[-1]) if digits and len(digits[-1]) < 16 else -1


def chosen_step(place: Place, report: Report) -> tuple[Place, str]:
    """The folder of the step that is meant, and its tag: the place itself, or the one that `latest` names.

    Without `latest` the newest folder is read, and so it is where `latest` names none that exists, which is an error
    finding. Raises [path-escape] where it leads out of the folder, [not-a-checkpoint] where there is no step at all.
    """
    if is_step(place):
        return place, place.path.name
    steps = steps_in(place)
    if not steps:
        where = printable(str(place.path))
        raise fail("not-a-checkpoint", "no step that DeepSpeed saved is in this folder", where=where)
    regular = [tag for tag in steps if not is_universal(place.subplace(tag))]
    tracker = LATEST if place.exists(LATEST) or regular else LATEST_UNIVERSAL
    tag = tag_of(place, tracker, report)
    newest = (regular or steps)[-1]
    if tag is None:
        if len(steps) > 1:
            report.add(
                "ambiguous", f"{len(steps)} steps are in this folder and no {tracker!r} file says which is the last "
                f"whole one; {printable(newest)} is read", where=printable(str(place.path)),
                hint="name the folder of the step that is meant",
            )
        return place.subplace(newest), newest
    if tag not in steps:
        there = "holds no part of a checkpoint" if tag in place.kinds else "is not there"
        report.add(
            "bad-tracker", f"names {printable(tag)!r}, which {there}", where=tracker,
            hint=f"its save or copy did not finish; name a step that did: {place.path / newest}",
        )
        return place.subplace(newest), newest
    behind = [t for t in regular if number(t) > number(tag) >= 0]
    if behind and tracker == LATEST:
        report.add(
            "incomplete", f"is newer than {printable(tag)}, which {LATEST!r} names: its save did not finish, or the "
            "run went back", where=printable(behind[-1]), severity="warning",
            hint=f"to read it all the same, name it: {place.path / behind[-1]}",
        )
    return place.subplace(tag), tag


def tag_of(place: Place, tracker: str, report: Report) -> str | None:
    """What the tracker file names, be it a text or a link; None where there is none."""
    kind = place.kinds.get(tracker)
    if kind == "folder-link":
        inside = os.path.relpath(os.path.realpath(place.path / tracker), os.path.realpath(place.path))
        return _checked(inside, tracker)
    if kind == "broken-link":
        target = os.readlink(place.path / tracker)
        return _checked(target.rstrip("/").removeprefix("./"), tracker)
    if tracker not in place.names:
        return None
    try:
        text = place.head(MAX_TAG_BYTES, tracker)
    except CheckpointError as error:
        report.extend([error.finding])
        return None
    return _checked(text.decode("utf-8", "replace").strip(), tracker)


def _checked(tag: str, tracker: str) -> str:
    """A tag is the name of one folder beside the tracker. Raises [path-escape, bad-tracker]."""
    if not tag:
        raise fail("bad-tracker", "is empty", where=tracker, hint="name the folder of the step that is meant")
    reason = name_fault(tag)
    if reason:
        raise fail("path-escape", f"names {printable(tag)!r}, which {reason}", where=tracker)
    return tag


def unfinished(place: Place, report: Report) -> None:
    """Report folders and files that a save which was cut short has left."""
    left = [name for name in place.kinds if "/" not in name and name.startswith("tmp-")]
    left += [name for name in place.names if name.rpartition("/")[2].endswith((".pt.tmp", ".pt.partial"))]
    if left:
        report.add(
            "leftover", f"{'was' if len(left) == 1 else 'and others were'} being written by a save that did not finish",
            where=printable(left[0]), hint="delete it once the checkpoint is known to be whole",
        )
