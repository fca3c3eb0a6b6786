"""The files beside a model that its GGUF is made from: config, tokenizer, model card, looked up by name."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from anyckpt.core.checkpoint import Asset
from anyckpt.core.source import File
from anyckpt.finding import fail
from anyckpt.io import json

MAX_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class Files:
    """Assets by name. Nothing is read before it is asked for; JSON is parsed once."""

    by_name: dict[str, File]
    parsed: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(assets: Iterable[Asset]) -> Files:
        """The assets of a checkpoint."""
        return Files({asset.name: asset.file for asset in assets})

    def __contains__(self, name: str) -> bool:
        return name in self.by_name

    def data(self, name: str) -> bytes:
        """All bytes of a file. Raises [limit-exceeded] for one that is no config or vocabulary any more."""
        file = self.by_name[name]
        if file.size > MAX_BYTES:
            raise fail("limit-exceeded", f"has {file.size:,} bytes, too many for a vocabulary", where=file.name)
        return file.read(0, file.size)

    def json(self, name: str) -> Any:
        """A JSON file; None where there is none."""
        if name not in self.by_name:
            return None
        if name not in self.parsed:
            self.parsed[name] = json.parse(
                self.data(name),
                where=name,
                code="bad-header",
                allow_nan=True,
                max_depth=64,
                on_duplicate=lambda _: None,
            )
        return self.parsed[name]

    def table(self, name: str) -> dict[str, Any]:
        """A JSON file that holds an object; {} where there is none."""
        found = self.json(name)
        return found if isinstance(found, dict) else {}

    def text(self, name: str) -> str | None:
        """A text file; None where there is none."""
        return self.data(name).decode("utf-8", "replace") if name in self.by_name else None

    def pooling(self) -> dict[str, Any] | None:
        """The config of sentence-transformers' pooling module, None where there is none."""
        for module in self.json("modules.json") or []:
            if isinstance(module, dict) and str(module.get("type", "")).endswith("Pooling"):
                return self.table(f"{module.get('path')}/config.json") or None
        return None

    def named(self, pattern: str) -> list[str]:
        """Names that match a regular expression, in order."""
        return sorted(name for name in self.by_name if re.fullmatch(pattern, name))
