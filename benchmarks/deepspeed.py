"""DeepSpeed: weights out of ZeRO-2 and ZeRO-3, and a whole training state from 8 ranks to 6, beside a durable copy.

    python benchmarks/deepspeed.py [--parameters 400] [--rounds 5] [--work bench-out] [--keep]

The checkpoints have the layout that DeepSpeed 0.19.8 writes (the resume tests hold it to that); their values are
random, some megabytes over and over, because their making is not what is measured. The contender is DeepSpeed's own
zero_to_fp32.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from harness import ANYCKPT, PYTHON, Command, delete, measure, report

WIDTH, DEPTH_PARAMETERS = 2304, 2304 * 2304 * 12 + 2304 * 13
RANDOM_BYTES = 192 << 20
MASTERS = ("--to", "hf", "--weights", "master", "-q")


def make(work: Path, millions: int, dp: int, zero: int) -> None:
    """A checkpoint of about so many million parameters: bf16 weights, fp32 masters and two moments."""
    from anyckpt.core.checkpoint import Checkpoint, Optimizer
    from anyckpt.core.dtypes import DTYPES
    from anyckpt.core.source import Span
    from anyckpt.core.tensor import Tensor, from_array, from_source
    from anyckpt.core.topology import Topology
    from anyckpt.io.place import Place
    from anyckpt.verbs.reshard import reshard

    target = work / f"zero{zero}-dp{dp}"
    if target.exists():
        return
    import numpy as np

    noise = work / "noise"
    noise.write_bytes(np.random.default_rng(1).bytes(RANDOM_BYTES))
    file = Place.at(noise).open()
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(max(1, millions * 1_000_000 // DEPTH_PARAMETERS)):
        lead = f"model.layers.{layer}."
        for name in ("q", "k", "v", "o"):
            shapes[f"{lead}self_attn.{name}_proj.weight"] = (WIDTH, WIDTH)
        shapes[f"{lead}mlp.up_proj.weight"] = (4 * WIDTH, WIDTH)
        shapes[f"{lead}mlp.down_proj.weight"] = (WIDTH, 4 * WIDTH)
        shapes[f"{lead}norm.weight"] = (WIDTH,)
        shapes[f"{lead}norm.bias"] = (WIDTH,)

    def tensors(dtype: str, shift: int) -> dict[str, Tensor]:
        kind, out = DTYPES[dtype], {}
        for i, (name, shape) in enumerate(shapes.items()):
            n_bytes = kind.nbytes(int(np.prod(shape)))
            if n_bytes > RANDOM_BYTES // 2:
                raise SystemExit("the noise is too short for a tensor")
            offset = (i * 4096 + shift) % (RANDOM_BYTES - n_bytes)
            out[name] = from_source(kind, shape, Span(file, offset - offset % 4, n_bytes))
        return out

    import ml_dtypes  # noqa: F401  the types of the weights

    slots = {slot: tensors("float32", k * 1_000_000) for k, slot in enumerate(("master", "exp_avg", "exp_avg_sq"))}
    slots["step"] = dict.fromkeys(shapes, from_array(np.array(100, np.float32)))
    groups = ({"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "params": list(shapes)},)
    weights = tensors("bfloat16", 4_000_000)
    source = Checkpoint("memory", "(noise)", weights, optimizer=Optimizer(slots, groups), step=100, topology=Topology())
    reshard(source, target, dp=dp, zero=zero)


def size(folder: Path) -> int:
    return sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())


def to_weights(work: Path, source: Path) -> list[Command]:
    """fp32 weights as one safetensors folder."""
    out, whole = work / "out", work / "weights"
    if not whole.exists():
        os.spawnvp(os.P_WAIT, PYTHON, [*ANYCKPT, "convert", str(source), str(whole), *MASTERS])
    return [
        Command("cp, durable", ("cp", "-r", "--reflink=never", str(whole), str(out)), whole, out, baseline=True),
        Command(
            "anyckpt convert", (*ANYCKPT, "convert", str(source), str(out), *MASTERS), source, out, ratio_bar=1.5,
            memory_bar=200_000_000,
        ),
        Command(
            "zero_to_fp32 (DeepSpeed)",
            (PYTHON, "-m", "deepspeed.utils.zero_to_fp32", str(source), str(out), "--safe_serialization"), source, out,
        ),
    ]


def to_ranks(work: Path, source: Path, dp: int) -> list[Command]:
    """The whole training state for another number of ranks."""
    out = work / "out"
    return [
        Command("cp, durable", ("cp", "-r", "--reflink=never", str(source), str(out)), source, out, baseline=True),
        Command(
            f"anyckpt reshard --dp {dp}", (*ANYCKPT, "reshard", str(source), str(out), "--dp", str(dp), "-q"),
            source, out, ratio_bar=1.5, memory_bar=200_000_000,
        ),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=400, metavar="MILLIONS")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--work", type=Path, default=Path("bench-out"))
    parser.add_argument("--keep", action="store_true", help="leave the inputs for the next time")
    parser.add_argument("--make", type=int, metavar="STAGE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    work = options.work / f"deepspeed-{options.parameters}"
    work.mkdir(parents=True, exist_ok=True)
    if options.make:
        make(work, options.parameters, 8, options.make)
        return 0
    os.environ |= {"DS_ACCELERATOR": "cpu", "TQDM_DISABLE": "1"}
    held = True
    for zero in (2, 3):
        # In a process of its own: what this one has ever held counts as its children's peak.
        subprocess.run([PYTHON, __file__, *sys.argv[1:], "--make", str(zero)], check=True)
        source = work / f"zero{zero}-dp8"
        title = f"ZeRO-{zero}, 8 ranks, {size(source) / 1e9:.1f} GB -> fp32 safetensors"
        held &= report(title, measure(to_weights(work, source), work, options.rounds))
        title = f"ZeRO-{zero}, 8 ranks -> 6 ranks, whole training state"
        held &= report(title, measure(to_ranks(work, source, 6), work, options.rounds))
    if not options.keep:
        delete(work)
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
