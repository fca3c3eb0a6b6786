"""Every format that is written goes through the suite that other packages' formats go through."""

from __future__ import annotations

from pathlib import Path

import anyckpt
from anyckpt.testing import FormatTests

SOURCE = Path(__file__).parent / "data" / "trainer" / "checkpoint.pt"


class Converted(FormatTests):
    """The example is the training run of tests/data, written in the format by us."""

    __test__ = False

    def example(self, tmp_path: Path) -> Path:
        row = self.format()
        path = tmp_path / ("made" if row.writes == "folder" else f"made{row.endings[0]}")
        anyckpt.convert(SOURCE, path, to=row.name, **self.options)
        return path


def _case(name: str, **attributes: object) -> type[Converted]:
    return type(f"Test_{name}", (Converted,), {"__test__": True, "row": name, **attributes})


TestTorch = _case("torch")
TestSafetensors = _case("safetensors")
TestHuggingFace = _case("hf")
TestDcp = _case("dcp", options={"world": 2})
TestDeepSpeed = _case("deepspeed", options={"world": 2})
TestUniversal = _case("deepspeed-universal")
TestGguf = _case("gguf", view="hf")
TestGgufFolder = _case("gguf-folder", view="hf")
