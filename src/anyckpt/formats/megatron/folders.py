"""Where in a folder a Megatron checkpoint is, and which of its forms it has.

    ROOT/latest_checkpointed_iteration.txt       the iteration, as digits, or "release"; may lie inside, or be missing
    ROOT/iter_0000100/                           or release/; or the user names this folder, or one rank's in it
         mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt          "torch"; also mp_rank_TT/pp_rank_PP/…
         metadata.json  .metadata  common.pt  __R_N.distcp  "torch_dist"; metadata.json says `sharded_backend`
         metadata.json  common.pt  NAME/.zarray             "zarr"

Covers Megatron-LM 2.x to core 0.16 (run), HEAD of 2026 (read).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from anyckpt.errors import CheckpointError
from anyckpt.finding import Report
from anyckpt.io.paths import printable
from anyckpt.io.place import Place

TRACKER = "latest_checkpointed_iteration.txt"
Form = Literal["torch", "torch_dist", "zarr"]

_ITERATION = re.compile(r"iter_(\d{7,})")
_RANK_FILE = re.compile(
    r"mp_rank_(?P<tp>\d{2,})(?:_(?P<a>\d{3,}))?(?:_(?P<b>\d{3,}))?/(?:pp_rank_(?P<pp>\d+)/)?model_optim_rng\.pt"
)
_RANK_FOLDER = re.compile(r"mp_rank_\d{2,}(_\d{3,}){0,2}|pp_rank_\d+")


@dataclass(frozen=True, slots=True)
class RankName:
    """A rank's file by its name: `tp` is the tensor rank; `rest` are the one or two numbers behind it.

    With one number, whether it is a pipeline or an expert rank only the run's sizes tell. `pp` is given by the nested
    form alone.
    """

    file: str
    tp: int
    rest: tuple[int, ...]
    pp: int | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint of one iteration: its folder, its name below the one that the user named ("" for itself), its form.

    `iteration`: from the folder's name; None for a release or a renamed folder.
    """

    place: Place
    name: str
    form: Form
    iteration: int | None


def rank_names(place: Place) -> list[RankName]:
    """The rank files directly in an iteration's folder."""
    found = []
    for name in place.names:
        if match := _RANK_FILE.fullmatch(name):
            rest = tuple(int(n) for n in (match["a"], match["b"]) if n is not None)
            found.append(RankName(name, int(match["tp"]), rest, None if match["pp"] is None else int(match["pp"])))
    return found


def form_of(place: Place, below: str = "") -> Form | None:
    """The form of the iteration in this folder, or in the folder `below` (ending in "/") of it."""
    inner = [n[len(below) :] for n in place.names if n.startswith(below)] if below else place.names
    if any(_RANK_FILE.fullmatch(n) for n in inner):
        return "torch"
    names = set(inner)
    if "metadata.json" in names and "common.pt" in names:
        if ".metadata" in names:
            return "torch_dist"
        if any(n.endswith("/.zarray") for n in names):
            return "zarr"
    if ".metadata" in names and "common.pt" in names:
        return "torch_dist"  # metadata.json is written last: an unfinished save, which the reader tells
    return None


def outer_place(place: Place) -> Place:
    """The iteration's folder where the user named one rank's."""
    if "model_optim_rng.pt" in place.names and _RANK_FOLDER.fullmatch(place.path.name):
        parent = place.path.resolve().parent
        return Place.at(parent.parent if place.path.name.startswith("pp_rank") else parent)
    return place


def candidates(place: Place) -> dict[str, Form]:
    """The iterations' folders directly in a root, the newest first, each with its form."""
    folders = {name.partition("/")[0] for name in place.names if "/" in name}
    forms = {
        name: form
        for name in folders
        if (_ITERATION.fullmatch(name) or name == "release") and (form := form_of(place, name + "/"))
    }
    return dict(sorted(forms.items(), key=lambda item: -_number(item[0])))


def is_megatron(place: Place, forms: tuple[Form, ...]) -> bool:
    """Whether the checkpoint that would be read here has one of these forms."""
    place = outer_place(place)
    own = form_of(place)
    if own is not None:
        return own in forms
    found = candidates(place)
    if not found:
        return False
    tracker, _ = _tracker(place)
    return found.get(tracker or next(iter(found)), next(iter(found.values()))) in forms


def locate(place: Place, report: Report) -> Found:
    """The iteration to read: the folder itself, what the tracker names, else the newest. The place must match."""
    place = outer_place(place)
    own = form_of(place)
    if own is not None:
        return Found(place, "", own, _iteration(place.path.name))
    found = candidates(place)
    named, text = _tracker(place)
    chosen = next(iter(found))
    exists = TRACKER in place.names or place.exists(TRACKER)
    if named in found:
        chosen = named
        newer = [name for name in found if _number(name) > _number(chosen)]
        if newer:
            report.add(
                "ambiguous", f"{newer[0]} is newer than {chosen}, which the tracker names and which is read",
                where=TRACKER, severity="note", hint="name the folder that is meant",
            )
    elif named:
        report.add(
            "incomplete", f"names {named}, which is not there; {chosen} is the newest that is", where=TRACKER,
            hint=f"to go on from {chosen}, write {_text_of(chosen)} into {TRACKER}",
        )
    elif exists:
        shown = f"holds {printable(text, limit=40)!r}" if text else "is empty"
        report.add(
            "bad-tracker", f"{shown}, neither an iteration nor 'release'; {chosen} is read, the newest", where=TRACKER,
            hint=f"write {_text_of(chosen)} into it",
        )
    elif len(found) > 1:
        report.add(
            "ambiguous", f"{len(found)} iterations and no tracker file; {chosen} is read, the newest",
            where=printable(str(place.path)), hint="name the folder that is meant", severity="note",
        )
    return Found(place.subplace(chosen), chosen, found[chosen], _iteration(chosen))


def _tracker(place: Place) -> tuple[str, str]:
    """The folder that the tracker file names ("" where it names none), and its text."""
    if TRACKER not in place.names:
        return "", ""
    try:
        text = place.head(64, TRACKER).decode("utf-8", "replace").strip()
    except CheckpointError:
        return "", ""
    if text == "release":
        return "release", text
    return (f"iter_{int(text):07d}", text) if text.isascii() and text.isdigit() and len(text) < 16 else ("", text)


def _text_of(name: str) -> str:
    iteration = _iteration(name)
    return name if iteration is None else str(iteration)


def _iteration(name: str) -> int | None:
    match = _ITERATION.fullmatch(name)
    return int(match[1]) if match else None


def _number(name: str) -> int:
    return -1 if (n := _iteration(name)) is None else n
