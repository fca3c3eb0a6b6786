"""The object in a torch file as it was saved, for families whose files hold more than a model beside an optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from anyckpt.core.source import File
from anyckpt.errors import CheckpointError
from anyckpt.finding import Report, fail
from anyckpt.formats import of_file
from anyckpt.formats.torch import legacy
from anyckpt.formats.torch import zip as torch_zip
from anyckpt.formats.torch.archive import STANDARD, judge_strays, members_of, open_archive
from anyckpt.formats.torch.zip import data_pickle
from anyckpt.pickle.result import Import


@dataclass(frozen=True, slots=True)
class Saved:
    """`value`: inert data. `imports`: the globals that its pickles name."""

    value: Any
    imports: tuple[Import, ...]


def saved_object(file: File, report: Report, *, lazy: bool = False) -> Saved:
    """Read the object of a file that torch.save wrote, in either container; what was cut off is absent and reported.

    `lazy`: local headers of a zip are looked at when a tensor is read, where there are very many files. Raises
    CheckpointError where it is no such file, or nothing of it can be had.
    """
    if lazy and file.read(0, min(4, file.size)) == b"PK\3\4":
        archive = members_of(file)
        if archive is not None and data_pickle(archive) is not None:
            result, records = torch_zip.load(open_archive(file, report), report, lazy=True)
            judge_strays(archive, {f"{records.top}/{name}" for name in STANDARD} | records.used, report)
            return Saved(result.value, result.imports)
    row = of_file(file) if file.size else None
    if row is not None and row.name == "torch":
        try:
            archive = open_archive(file, report)
        except CheckpointError as error:
            if error.finding.code != "truncated":
                raise
            facts = torch_zip.read(file, report).facts
            return Saved(facts["object"], tuple(facts.get("imports", ())))
        result, records = torch_zip.load(archive, report)
        judge_strays(archive, {f"{records.top}/{name}" for name in STANDARD} | records.used, report)
        return Saved(result.value, result.imports)
    if row is not None and row.name == "torch-legacy":
        facts = legacy.read(file, report).facts
        return Saved(facts["object"], tuple(facts.get("imports", ())))
    if row is None:
        from anyckpt.io.sniff import complain

        raise complain(file)
    raise fail("not-a-checkpoint", f"is {row.title} where a file of torch.save belongs", where=file.name)
