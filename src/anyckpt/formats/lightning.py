"""Lightning and Fabric checkpoints that are folders: what is sharded in DCP, the rest in one torch.save file.

    .metadata  __R_N.distcp      model (or state_dict) and optimizer_0, optimizer_1 …; Fabric: the user's own keys
    meta.pt                      the rest of the checkpoint dict: loops, callbacks, lr_schedulers, hyper_parameters …

The presence of meta.pt is Lightning's own test (2.6, `fabric/strategies/fsdp.py`). A single .ckpt is an ordinary
torch.save file, which `formats.torch` reads.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from anyckpt.core.checkpoint import Checkpoint
from anyckpt.core.topology import Topology
from anyckpt.errors import CheckpointError
from anyckpt.finding import Report
from anyckpt.formats import dcp
from anyckpt.formats.torch import archive
from anyckpt.formats.torch import zip as torch_zip
from anyckpt.formats.torch.state import read_state
from anyckpt.io.place import Place

META = "meta.pt"


def matches(place: Place) -> bool:
    """meta.pt beside the files of DCP."""
    return META in place.names and dcp.matches(place)


def read(place: Place, report: Report) -> Checkpoint:
    """Read both parts as the one object that was saved."""
    root, facts = dcp.read_object(place, report)
    rest: dict[str, Any] = {}
    try:
        result, _ = torch_zip.load(archive.open_archive(place.open(META), report), report)
        rest = dict(result.value) if isinstance(result.value, dict) else {"meta": result.value}
        facts["imports"] = (*facts["imports"], *result.imports)
        for finding in (f for f in result.findings if f.severity == "error"):
            report.extend([finding])
    except CheckpointError as error:
        report.extend([error.finding])
    whole = {**rest, **root}
    checkpoint = read_state(whole, format="lightning-sharded", path=str(place.path), report=report, facts=facts)
    version = rest.get("pytorch-lightning_version")
    kept = {**checkpoint.facts, "framework": f"Lightning {version}" if isinstance(version, str) else "Lightning Fabric"}
    ranks = facts["ranks"]
    return replace(checkpoint, facts=kept, topology=Topology(world=ranks) if ranks > 1 else None)


verify = dcp.verify
