"""Say what format a path is, by content: a few hundred bytes of a file, the names in a folder. Imports no numpy."""

from __future__ import annotations

import os
from dataclasses import dataclass

from anyckpt import formats
from anyckpt.errors import CheckpointError
from anyckpt.io.place import Place
from anyckpt.io.sniff import complain


@dataclass(frozen=True, slots=True)
class Identity:
    """What a path is. `format` is a name of `anyckpt formats`, empty where none matches; `why` then says what it is."""

    path: str
    format: str
    title: str = ""
    why: str = ""
    code: str = ""

    def as_dict(self) -> dict[str, str]:
        """The record as `--json` prints it."""
        return {"path": self.path, "format": self.format, "title": self.title, "why": self.why, "code": self.code}


def identify(path: str | os.PathLike[str]) -> Identity:
    """The format of the file or folder at `path`, by content and never by its name alone.

    Raises UsageError where there is no such path.
    """
    shown = os.fspath(path)
    try:
        place = Place.at(path)
        if place.is_folder:
            row = formats.of_folder(place)
            if row is None:
                return Identity(
                    shown, "", why="no checkpoint of any known format is in this folder", code="not-a-checkpoint"
                )
        else:
            file = place.open()
            row = formats.of_file(file)
            if row is None:
                raise complain(file)
    except CheckpointError as error:
        return Identity(shown, "", why=error.finding.message, code=error.finding.code)
    return Identity(shown, row.name, row.title)
