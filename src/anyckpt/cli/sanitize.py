"""`anyckpt sanitize SOURCE DESTINATION`: a file that torch.load(weights_only=True) takes."""

from __future__ import annotations

from typing import Any

from anyckpt.cli.making import make, maker_options
from anyckpt.cli.options import path_argument, verb
from anyckpt.cli.output import Output


@verb("sanitize")
@path_argument("source")
@path_argument("destination")
@maker_options
def command(out: Output, source: str, destination: str, **options: Any) -> None:
    """Write SOURCE to DESTINATION with plain data and tensors only, so that weights_only=True loads it.

    Objects of other classes become plain dicts of their attributes, or are left out; each is reported.
    """
    from anyckpt.verbs.sanitize import sanitize

    make(out, sanitize, source, destination, options)
