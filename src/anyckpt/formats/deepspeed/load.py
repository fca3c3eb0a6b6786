"""The objects inside a step's files: loaded inertly, and read with little trust in what they hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from anyckpt.core.box import Shape
from anyckpt.core.inert import NumpyArray, Opaque, TensorSubclass
from anyckpt.core.source import Absent
from anyckpt.core.tensor import Piece, Tensor
from anyckpt.errors import CheckpointError
from anyckpt.finding import Report
from anyckpt.formats import of_file, read_file
from anyckpt.formats.deepspeed.files import Part
from anyckpt.formats.torch import archive as torch_archive
from anyckpt.formats.torch import zip as torch_zip
from anyckpt.io.paths import printable
from anyckpt.io.place import Place
from anyckpt.pickle.result import Import, Result


@dataclass(slots=True)
class Loader:
    """Loads a step's files, each once; a damaged one is a finding and stands for nothing."""

    place: Place
    report: Report
    imports: list[Import] = field(default_factory=list)

    def object(self, name: str) -> Any:
        """The object of one file, None where it can't be had."""
        try:
            file = self.place.open(name)
            row = of_file(file) if file.size else None
            if row is not None and row.name == "torch" and not _is_cut(file):
                archive = torch_archive.open_archive(file, self.report)
                result, records = torch_zip.load(archive, self.report)
                known = {f"{records.top}/{member}" for member in torch_archive.STANDARD} | records.used
                torch_archive.judge_strays(archive, known, self.report)
                self._note(result)
                return result.value
            checkpoint = read_file(file, self.report)
        except CheckpointError as error:
            self.report.extend([error.finding])
            self.report.worsen("unknown")  # what was not looked at is never safe
            return None
        self.imports += checkpoint.facts.get("imports", ())
        return checkpoint.facts.get("object")

    def dict(self, part: Part) -> dict[str, Any]:
        """The dict that a part is, an empty one where it is damaged or something else."""
        value = self.object(part.name)
        if isinstance(value, dict):
            return {str(k): v for k, v in value.items()}
        if value is not None:
            self.report.add(
                "inconsistent", f"holds a {type(value).__name__}, not the dict that DeepSpeed saves",
                where=printable(part.name),
            )
        return {}

    def _note(self, result: Result) -> None:
        known = {item.path for item in self.imports}
        self.imports += [item for item in result.imports if item.path not in known]


def _is_cut(file: Any) -> bool:
    """Whether the archive's directory at the end is missing; the torch reader tells what is left of such a file."""
    return torch_archive.members_of(file) is None


def tensor_of(value: Any) -> Tensor | None:
    """A saved value as a plain tensor: Python attributes on it (ds_id) are no part of it."""
    if isinstance(value, TensorSubclass):
        return value.base
    if isinstance(value, NumpyArray):
        return value.tensor
    return value if isinstance(value, Tensor) else None


def mapping(value: Any) -> dict[Any, Any]:
    """A value where a dict belongs."""
    return value if isinstance(value, dict) else {}


def sequence(value: Any) -> list[Any]:
    """A value where a list belongs."""
    return list(value) if isinstance(value, list | tuple) else []


def count(value: Any, default: int = 0) -> int:
    """A value where a number of things belongs; enums give their value."""
    if isinstance(value, Opaque) and len(value.args) == 1:
        value = value.args[0]
    if isinstance(value, bool) or not isinstance(value, int):
        return default
    return value


def shapes_of(value: Any) -> dict[str, Shape]:
    """name -> shape, of a dict of torch.Size."""
    return {
        str(name): tuple(shape)
        for name, shape in mapping(value).items()
        if isinstance(shape, list | tuple) and all(type(n) is int and n >= 0 for n in shape)
    }


def flat_absent(like: Tensor, why: str) -> Tensor:
    """A buffer as long as another rank's, whose file is missing."""
    return Tensor(like.dtype, like.shape, (Piece(Absent(like.nbytes, why)),))


def options_of(group: Mapping[Any, Any]) -> dict[str, Any]:
    """A parameter group's hyperparameters, without its parameters."""
    return {str(k): v for k, v in group.items() if k not in ("params", "param_names")}
