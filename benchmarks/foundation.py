#!/usr/bin/env python3
"""What looking, converting and casting cost beside a durable copy of the same bytes. How it is measured: harness.py.

    python benchmarks/foundation.py [--sizes 2,4] [--rounds 5] [--cases torch,safetensors,cast,names,many] [--work DIR]

Peers: torch + safetensors, as every guide has it, and pt-safe-loader (pt_loader, a Rust parser that needs no torch). No
command line on PyPI converts a .pt: ckptkit 0.3.0 says it does and has no such command; pt-safe-loader has a Python API
only, and writes safetensors only.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

from harness import ANYCKPT, MIB, Command, available, call, copy, measure, prepare, print_table, python, report

CASES = ("torch", "safetensors", "cast", "names", "many")
PLAIN_MEMORY = 120_000_000
CAST_MEMORY = 128 * MIB + 120_000_000

# A decoder's shapes, float32, until the size is reached; random, so that no file system can cheat by compressing.
MAKE_TORCH = """
import sys, torch
path, size = sys.argv[1], int(float(sys.argv[2]) * 1e9)
hidden, inner, vocab = 2048, 5632, 16000
noise = torch.randn(inner * hidden, generator=torch.Generator().manual_seed(0))
state, layer = {}, 0
def add(name, *shape):
    count = shape[0] * (shape[1] if len(shape) > 1 else 1)
    state[name] = noise.repeat(-(-count // len(noise)))[:count].reshape(shape).clone()
    return count * 4
size -= add("model.embed_tokens.weight", vocab, hidden)
while size > 0:
    for name, *shape in [("self_attn.q_proj", hidden, hidden), ("self_attn.k_proj", hidden, hidden),
                         ("self_attn.v_proj", hidden, hidden), ("self_attn.o_proj", hidden, hidden),
                         ("mlp.gate_proj", inner, hidden), ("mlp.up_proj", inner, hidden),
                         ("mlp.down_proj", hidden, inner), ("input_layernorm", hidden),
                         ("post_attention_layernorm", hidden)]:
        if size > 0:
            size -= add(f"model.layers.{layer}.{name}.weight", *shape)
    layer += 1
torch.save(state, path)
"""
MAKE_SAFETENSORS = """
import sys, torch
from safetensors.torch import save_file
save_file(torch.load(sys.argv[1], mmap=True), sys.argv[2])
"""
TORCH_TO_SAFETENSORS = MAKE_SAFETENSORS
SAFETENSORS_TO_TORCH = """
import sys, torch
from safetensors.torch import load_file
torch.save(load_file(sys.argv[1]), sys.argv[2])
"""
TORCH_CAST = """
import sys, torch
from safetensors.torch import save_file
state = torch.load(sys.argv[1], mmap=True)
save_file({name: tensor.to(torch.bfloat16) for name, tensor in state.items()}, sys.argv[2])
"""
PT_LOADER = """
import os, sys
from pt_loader import PtCheckpoint
source, target = sys.argv[1:]
limits = dict.fromkeys(("max_archive_bytes", "max_tensor_bytes", "max_tensor_count"), 1 << 40)
PtCheckpoint.load(source, **limits).export(target, format="safetensors", include_metadata=False, overwrite=True)
"""

# In-process times: five calls each, the first apart, since it also pays for imports.
NAMES_ANYCKPT = """
import json, sys, time
import anyckpt
def look():
    return {name: (tuple(t.shape), str(t.dtype)) for name, t in anyckpt.open(sys.argv[1]).weights.items()}
"""
NAMES_TORCH = """
import json, sys, time
import torch
def look():
    return {name: (tuple(t.shape), str(t.dtype)) for name, t in torch.load(sys.argv[1]).items()}
"""
NAMES_TAIL = """
times = []
for _ in range(6):
    start = time.perf_counter()
    found = look()
    times.append(time.perf_counter() - start)
print(json.dumps({"n": len(found), "first": times[0], "median": sorted(times[1:])[2]}))
"""

# n tensors of four float32 in shards of at most 100,000 (a safetensors header is limited to 100 MB).
MAKE_MANY = """
import json, os, sys
folder, n = sys.argv[1], int(sys.argv[2])
os.makedirs(folder)
n_shards, weight_map = -(-n // 100_000), {}
for shard in range(n_shards):
    file = f"model-{shard + 1:05d}-of-{n_shards:05d}.safetensors"
    header, offset = {}, 0
    for i in range(shard * 100_000, min(n, (shard + 1) * 100_000)):
        name = f"model.layers.{i // 1000}.experts.{i % 1000}.weight"
        header[name] = {"dtype": "F32", "shape": [2, 2], "data_offsets": [offset, offset + 16]}
        weight_map[name] = file
        offset += 16
    blob = json.dumps(header, separators=(",", ":")).encode()
    blob += b" " * (-len(blob) % 8)
    with open(os.path.join(folder, file), "wb") as out:
        out.write(len(blob).to_bytes(8, "little") + blob + os.urandom(offset))
with open(os.path.join(folder, "model.safetensors.index.json"), "w") as out:
    json.dump({"metadata": {"total_size": 16 * n}, "weight_map": weight_map}, out)
"""


class Bench:
    """The inputs, made when first asked for, and what was found."""

    def __init__(self, work: Path, rounds: int) -> None:
        self.work = work
        self.rounds = rounds
        self.held = True
        self.results: dict[str, object] = {}

    def torch_file(self, gigabytes: float) -> Path:
        path = self.work / f"in-{gigabytes:g}.pt"
        if not path.exists():
            prepare(f"{gigabytes:g} GB of .pt", partial(call, MAKE_TORCH, path, gigabytes))
        return path

    def safetensors_file(self, gigabytes: float) -> Path:
        path = self.work / f"in-{gigabytes:g}.safetensors"
        if not path.exists():
            source = self.torch_file(gigabytes)
            prepare(f"{gigabytes:g} GB of .safetensors", partial(call, MAKE_SAFETENSORS, source, path))
        return path

    def run(self, title: str, *commands: Command) -> None:
        rows = measure(commands, self.work, self.rounds)
        self.held &= report(title, rows)
        self.results[title] = [
            {"label": row.command.label, "failure": row.failure, "runs": [vars(run) for run in row.runs]}
            for row in rows
        ]

    def anyckpt(self, source: Path, target: Path, to: str, *more: str, ratio: float, memory: int) -> Command:
        argv = (*ANYCKPT, "convert", str(source), str(target), "--to", to, "-q", "--force", *more)
        label = " ".join(("anyckpt convert", *more))
        return Command(label, argv, source, target, ratio_bar=ratio, memory_bar=memory)

    def torch(self, gigabytes: float) -> None:
        source, target = self.torch_file(gigabytes), self.work / "out.safetensors"
        commands = [
            copy(source, target),
            self.anyckpt(source, target, "safetensors", ratio=1.3, memory=PLAIN_MEMORY),
            Command("torch.load(mmap) + save_file", python(TORCH_TO_SAFETENSORS, source, target), source, target),
        ]
        if available("pt_loader"):
            commands.append(Command("pt_loader export", python(PT_LOADER, source, target), source, target))
        self.run(f".pt to .safetensors, {gigabytes:g} GB", *commands)

    def safetensors(self, gigabytes: float) -> None:
        source, target = self.safetensors_file(gigabytes), self.work / "out.pt"
        self.run(
            f".safetensors to .pt, {gigabytes:g} GB (a CRC-32 of every byte is due)",
            copy(source, target),
            self.anyckpt(source, target, "torch", ratio=1.8, memory=PLAIN_MEMORY),
            Command("load_file + torch.save", python(SAFETENSORS_TO_TORCH, source, target), source, target),
        )

    def cast(self, gigabytes: float) -> None:
        source, target = self.torch_file(gigabytes), self.work / "out.safetensors"
        options = ("--dtype", "bfloat16", "--max-memory", "128M")
        self.run(
            f".pt float32 to .safetensors bfloat16, {gigabytes:g} GB (the copy is of the input)",
            copy(source, target),
            self.anyckpt(source, target, "safetensors", *options, ratio=1.6, memory=CAST_MEMORY),
            Command("torch.load(mmap) + .to + save_file", python(TORCH_CAST, source, target), source, target),
        )

    def names(self, gigabytes: float = 1) -> None:
        source = self.torch_file(gigabytes)
        try:
            ours = json.loads(call(NAMES_ANYCKPT + NAMES_TAIL, source))
            theirs = json.loads(call(NAMES_TORCH + NAMES_TAIL, source))
        except subprocess.CalledProcessError as error:
            print(f"\nnames and shapes: not measured, exit status {error.returncode}")
            self.held = False
            return
        factor = theirs["median"] / ours["median"]
        print(f"\nnames and shapes of a {gigabytes:g} GB .pt, in process, file in the page cache")
        lines = [("", "first ms", "then ms", "tensors")]
        for label, found in (("anyckpt.open", ours), ("torch.load, no mmap", theirs)):
            lines.append((label, f"{found['first'] * 1e3:.1f}", f"{found['median'] * 1e3:.1f}", str(found["n"])))
        print_table(lines)
        print(f"  {factor:.0f} times faster ({'within' if factor >= 50 else 'UNDER'} the bar of 50)")
        self.held &= factor >= 50 and ours["n"] == theirs["n"]
        self.results["names"] = {"anyckpt": ours, "torch": theirs}

    def many(self) -> None:
        counts = (1_000, 10_000, 100_000, 1_000_000)
        lines = [("tensors", "open + plan s", "us a tensor", "peak MB", "")]
        for count in counts:
            folder = self.work / f"many-{count}"
            prepare(
                f"a folder of {count:,} tensors",
                partial(call, MAKE_MANY, folder, count),
            )
            argv = (*ANYCKPT, "convert", str(folder), str(self.work / "out.hf"), "--to", "hf", "--dry-run", "--json")
            (row,) = measure([Command(f"{count:,}", argv, folder)], self.work, 3)
            shutil.rmtree(folder)
            if row.failure:
                lines.append((f"{count:,}", "-", "", "", row.failure))
                self.held = False
                continue
            wall, peak = row.median("wall"), row.median("peak")
            note = ""
            if count == counts[-1]:
                good = wall < 20 and peak < 2e9
                self.held &= good
                note = f"{'within' if good else 'OVER'} 20 s and 2 GB"
            lines.append((f"{count:,}", f"{wall:.2f}", f"{wall / count * 1e6:.1f}", f"{peak / 1e6:.0f}", note))
            self.results[f"many {count}"] = [vars(run) for run in row.runs]
        print("\nfolders of many small tensors: open and plan (convert --dry-run, its start included)")
        print_table(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="What looking, converting and casting cost beside a durable copy.")
    parser.add_argument("--sizes", default="2,4", help="gigabytes, comma-separated (default: 2,4)")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each command; medians are shown (default: 5)")
    parser.add_argument("--cases", default=",".join(CASES), help=f"which, comma-separated (default: {','.join(CASES)})")
    parser.add_argument("--work", type=Path, default=Path("bench-out"), help="scratch folder, deleted at the end")
    parser.add_argument("--json", type=Path, help="write every single run to this file as well")
    parser.add_argument("--strict", action="store_true", help="exit 1 if a bar was missed")
    options = parser.parse_args()
    sizes = [float(size) for size in options.sizes.split(",")]
    cases = options.cases.split(",")
    if unknown := set(cases) - set(CASES):
        parser.error(f"no such case: {', '.join(sorted(unknown))}")
    if not available("torch") or not available("safetensors"):
        parser.error("the inputs are made by torch and safetensors: pip install -e '.[bench]'")

    work = options.work.resolve()
    work.mkdir(parents=True, exist_ok=False)
    need, free = int(3.2e9 * max(sizes)), shutil.disk_usage(work).free
    if free < need:
        work.rmdir()
        parser.error(f"needs {need / 1e9:.0f} GB at {work}, {free / 1e9:.0f} GB are free")
    bench = Bench(work, options.rounds)
    print(f"{os.cpu_count()} cores, median of {options.rounds} interleaved rounds, warm page cache, everything synced")
    try:
        for size in sizes:
            for case in cases:
                if case in ("torch", "safetensors", "cast"):
                    getattr(bench, case)(size)
            for path in work.glob("in-*"):
                path.unlink()
        if "names" in cases:
            bench.names()
        if "many" in cases:
            bench.many()
    finally:
        shutil.rmtree(work, ignore_errors=True)
    if options.json:
        options.json.write_text(json.dumps(bench.results, indent=1) + "\n")
    print(f"\n{'every bar was held' if bench.held else 'some bars were missed'}")
    return 1 if options.strict and not bench.held else 0


if __name__ == "__main__":
    sys.exit(main())
