"""torch.distributed.checkpoint: weights out of FSDP shards and into them, beside a durable copy; looks at huge saves.

    python benchmarks/dcp.py [--gigabytes 2] [--rounds 5] [--chunks 4000000] [--work bench-out] [--keep]

The shards have the layout that FSDP2 and DCP of torch 2.13 write (the resume tests hold it to that), their values are
random. The contenders are torch's own `dcp_to_torch_save` and `accelerate merge-weights`, which both hold the whole
model in memory. The looks are at a save of 4,096 files (sparse) and at a `.metadata` of millions of chunks.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from harness import ANYCKPT, PYTHON, Command, available, delete, measure, python, report

WIDTH = 2048
RANDOM_BYTES = 64 << 20
RATIO_BAR, MEMORY_BAR = 1.3, 150_000_000

TORCH_SAVE = """
import sys
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
dcp_to_torch_save(sys.argv[1], sys.argv[2])
"""
MERGE = """
import sys
from accelerate.utils import merge_fsdp_weights
merge_fsdp_weights(sys.argv[1], sys.argv[2])
"""
SAVE_MANY = """
import pickle
import sys
from pathlib import Path
import numpy as np
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import *
n_tensors, n_files, per_tensor, out = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
out.mkdir()
rows, item = 8, 8 * 1024 * 4 + 1600
offsets = [0] * n_files
tensors, storage, paths = {}, {}, {}
for t in range(n_tensors):
    name = f"model.layers.{t // 10}.block.{t % 10}.weight"
    chunks = []
    for c in range(per_tensor):
        file, start = (t * per_tensor + c) % n_files, torch.Size((c * rows, 0))
        chunks.append(ChunkStorageMetadata(start, torch.Size((rows, 1024))))
        index = MetadataIndex(name, torch.Size((c * rows, 0)), c)
        storage[index] = _StorageInfo(f"__{file}_0.distcp", offsets[file], item)
        offsets[file] += item
    properties = TensorProperties(dtype=torch.float32)
    tensors[name] = TensorStorageMetadata(properties, torch.Size((per_tensor * rows, 1024)), chunks)
    paths[name] = ("model", name[6:])
(out / ".metadata").write_bytes(pickle.dumps(Metadata(tensors, paths, storage, StorageMeta(), "1.0.0"), protocol=4))
for file, size in enumerate(offsets):
    with open(out / f"__{file}_0.distcp", "wb") as data:
        data.truncate(size)
"""


def make(work: Path, gigabytes: float) -> None:
    """A save of 8 ranks, weights in float32, and the same under accelerate's name."""
    import numpy as np

    from anyckpt.core.checkpoint import Checkpoint
    from anyckpt.core.dtypes import DTYPES
    from anyckpt.core.source import Span
    from anyckpt.core.tensor import from_source
    from anyckpt.io.place import Place
    from anyckpt.verbs.convert import convert

    noise = work / "noise"
    noise.write_bytes(np.random.default_rng(1).bytes(RANDOM_BYTES))
    file, kind, weights = Place.at(noise).open(), DTYPES["float32"], {}
    for layer in range(max(1, int(gigabytes * 1e9 / (WIDTH * WIDTH * 12 * 4)))):
        shapes = {"up": (4 * WIDTH, WIDTH // 2), "down": (WIDTH, 2 * WIDTH), "norm": (WIDTH,)}
        shapes |= dict.fromkeys(("q", "k", "v", "o", "gate", "mix"), (WIDTH, WIDTH))
        for i, (name, shape) in enumerate(shapes.items()):
            n_bytes = kind.nbytes(int(np.prod(shape)))
            span = Span(file, (layer * 9 + i) * 65536 % (RANDOM_BYTES - n_bytes), n_bytes)
            weights[f"layers.{layer}.{name}.weight"] = from_source(kind, shape, span)
    convert(Checkpoint("memory", "(noise)", weights), work / "fsdp8", to="dcp", world=8)


def convert_cases(work: Path) -> list[Command]:
    """DCP of 8 ranks as one safetensors folder."""
    source, out, whole = work / "fsdp8", work / "out", work / "weights"
    if not whole.exists():
        subprocess.run([*ANYCKPT, "convert", str(source), str(whole), "--to", "hf", "-q"], check=True)
    commands = [
        Command("cp, durable", ("cp", "-r", "--reflink=never", str(whole), str(out)), whole, out, baseline=True),
        Command(
            "anyckpt convert --to hf", (*ANYCKPT, "convert", str(source), str(out), "--to", "hf", "-q"), source, out,
            ratio_bar=RATIO_BAR, memory_bar=MEMORY_BAR,
        ),
        Command("dcp_to_torch_save (torch)", python(TORCH_SAVE, source, work / "out.pt"), source, work / "out.pt"),
    ]
    if available("accelerate"):
        commands.append(Command("merge-weights (accelerate)", python(MERGE, source, out), source, out))
    return commands


def reshard_cases(work: Path) -> list[Command]:
    """8 ranks to 6."""
    source, out = work / "fsdp8", work / "out"
    return [
        Command("cp, durable", ("cp", "-r", "--reflink=never", str(source), str(out)), source, out, baseline=True),
        Command(
            "anyckpt convert --world 6",
            (*ANYCKPT, "convert", str(source), str(out), "--to", "dcp", "--world", "6", "-q"), source, out,
            ratio_bar=RATIO_BAR, memory_bar=MEMORY_BAR,
        ),
    ]


def look(title: str, source: Path, rounds: int, memory: int) -> bool:
    command = Command("anyckpt PATH", (*ANYCKPT, str(source)), source / ".metadata", memory_bar=memory)
    return report(title, measure([command], source.parent, rounds))


def many(work: Path, name: str, n_tensors: int, n_files: int, per_tensor: int) -> Path:
    """A sparse save, its metadata made by torch's own classes."""
    target = work / name
    if not target.exists():
        subprocess.run([*python(SAVE_MANY, n_tensors, n_files, per_tensor, target)], check=True)
    return target


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2)
    parser.add_argument("--chunks", type=int, default=4_000_000, help="of the largest look; its making takes 5 KB each")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--work", type=Path, default=Path("bench-out"))
    parser.add_argument("--keep", action="store_true", help="leave the inputs for the next time")
    parser.add_argument("--make", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    work = options.work / f"dcp-{options.gigabytes:g}"
    work.mkdir(parents=True, exist_ok=True)
    if options.make:
        if not (work / "fsdp8").exists():
            make(work, options.gigabytes)
        return 0
    # In a process of its own: what this one has ever held counts as its children's peak.
    subprocess.run([PYTHON, __file__, *sys.argv[1:], "--make"], check=True)
    title = f"DCP, 8 ranks, {options.gigabytes:g} GB -> safetensors"
    held = report(title, measure(convert_cases(work), work, options.rounds))
    held &= report("DCP, 8 ranks -> 6 ranks", measure(reshard_cases(work), work, options.rounds))
    held &= look("1,000 tensors over 4,096 files", many(work, "files", 1000, 4096, 8), options.rounds, 400_000_000)
    if options.chunks:
        per_tensor = max(1, options.chunks // 1000)
        source = many(work, f"chunks-{per_tensor}", 1000, min(4096, per_tensor), per_tensor)
        held &= look(f"{1000 * per_tensor:,} chunks", source, min(options.rounds, 2), 4_000_000_000)
    if not options.keep:
        delete(work)
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
