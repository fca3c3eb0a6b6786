"""Megatron: TP4 · PP2 to Hugging Face, TP2 · PP4 to TP4 · PP1 with moments, and a layout of 1,024 ranks opened.

    python benchmarks/megatron.py [--parameters 250] [--rounds 5] [--work bench-out] [--keep]

The checkpoints have the layout that Megatron-LM core 0.16 writes (its trainer resumes from such files: see the tests);
their values are random, some megabytes over and over. The 1,024 ranks (TP8 · PP16 · EP8) are files of the same pickles
with storages of holes.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

from harness import ANYCKPT, PYTHON, Command, delete, measure, report

RANDOM_BYTES = 96 << 20
WIDTH = 2048


def source_of(noise: Path, millions: int, experts: int = 0, width: int = WIDTH, layers: int = 0) -> Any:
    """A llama-like training state of about so many million parameters over a file of noise."""
    import numpy as np

    from anyckpt.core.checkpoint import Checkpoint, Optimizer
    from anyckpt.core.dtypes import DTYPES
    from anyckpt.core.source import Span
    from anyckpt.core.tensor import Tensor, from_source
    from anyckpt.core.topology import Topology
    from anyckpt.io.place import Place

    if not noise.exists():
        noise.write_bytes(np.random.default_rng(1).bytes(RANDOM_BYTES))
    file = Place.at(noise).open()
    ffn, heads = 11 * width // 4, width // 64
    layers = layers or max(8, millions * 1_000_000 // (4 * width * width + 3 * ffn * width) // 8 * 8)
    shapes: dict[str, tuple[int, ...]] = {"embedding.word_embeddings.weight": (8192, width)}
    for layer in range(layers):
        lead = f"decoder.layers.{layer}."
        shapes[f"{lead}self_attention.linear_proj.weight"] = (width, width)
        shapes[f"{lead}self_attention.linear_qkv.layer_norm_weight"] = (width,)
        shapes[f"{lead}self_attention.linear_qkv.weight"] = (3 * width, width)
        if experts:
            shapes[f"{lead}pre_mlp_layernorm.weight"] = (width,)
            shapes[f"{lead}mlp.router.weight"] = (experts, width)
        else:
            shapes[f"{lead}mlp.linear_fc1.layer_norm_weight"] = (width,)
        for module in [f"experts.local_experts.{e}." for e in range(experts)] or [""]:
            shapes[f"{lead}mlp.{module}linear_fc1.weight"] = (2 * ffn, width)
            shapes[f"{lead}mlp.{module}linear_fc2.weight"] = (width, ffn)
    shapes["decoder.final_layernorm.weight"] = (width,)
    shapes["output_layer.weight"] = (8192, width)

    def tensors(dtype: str, shift: int) -> dict[str, Tensor]:
        kind = DTYPES[dtype]
        out = {}
        for i, (name, shape) in enumerate(shapes.items()):
            n_bytes = kind.nbytes(int(np.prod(shape)))
            offset = (i * 4096 + shift) % max(1, RANDOM_BYTES - n_bytes)
            out[name] = from_source(kind, shape, Span(file, offset - offset % 4, n_bytes))
        return out

    slots = {slot: tensors("float32", k * 1_000_000) for k, slot in enumerate(("master", "exp_avg", "exp_avg_sq"))}
    groups = tuple({"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "wd_mult": w, "weight_decay": 0.1 * w, "step": 100.0,
                    "lr_mult": 1.0, "params": []} for w in (1.0, 0.0))  # fmt: skip
    args = {
        "num_layers": layers, "hidden_size": width, "num_attention_heads": heads, "num_query_groups": heads,
        "group_query_attention": False, "swiglu": True, "ffn_hidden_size": ffn, "num_experts": experts or None,
        "moe_ffn_hidden_size": ffn, "moe_router_topk": 2, "normalization": "RMSNorm", "kv_channels": 64,
        "position_embedding_type": "rope", "add_bias_linear": False, "untie_embeddings_and_output_weights": True,
        "padded_vocab_size": 8192, "make_vocab_size_divisible_by": 128, "max_position_embeddings": 4096,
        "layernorm_epsilon": 1e-5, "transformer_impl": "transformer_engine", "use_distributed_optimizer": True,
        "bf16": True, "rotary_base": 10000,
    }  # fmt: skip
    return Checkpoint(
        "megatron", "(noise)", tensors("bfloat16", 4_000_000), optimizer=Optimizer(slots, groups), step=100,
        config=args, topology=Topology(),
    )  # fmt: skip


def make(work: Path, millions: int, name: str, **sizes: int) -> Path:
    from anyckpt.verbs.reshard import reshard

    target = work / name
    if not target.exists():
        reshard(source_of(work / "noise", millions), target, to="megatron", **sizes)
    return target


def make_sparse(work: Path) -> Path:
    """1,024 ranks: every file laid out by the writer, its tensors' bytes left out as holes."""
    from anyckpt.core.tensor import Tensor
    from anyckpt.core.topology import Topology
    from anyckpt.formats import megatron
    from anyckpt.formats.table import WriteOptions

    target = work / "sparse"
    if target.exists():
        return target
    source = source_of(work / "noise", 0, experts=64, width=1024, layers=48)
    options = WriteOptions("sparse", topology=Topology(tp=8, pp=16, ep=8, etp=8, dp=8), extra={"training": True})
    for layout in megatron.write(megatron.fit(source, options), options):
        path = target / layout.name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.truncate(layout.size)
            for part in layout.parts:
                if isinstance(part.content, bytes) and not isinstance(part.content, Tensor):
                    file.seek(part.offset)
                    file.write(part.content)
    return target


def size(folder: Path) -> int:
    return sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())


def build(work: Path, millions: int) -> None:
    """All inputs, in a process of its own: what this one has ever held counts as its children's peak."""
    import anyckpt

    wide = make(work, 4 * millions, "tp4-pp2", tp=4, pp=2)
    make(work, millions, "tp2-pp4", tp=2, pp=4)
    if not (work / "hf").exists():
        anyckpt.convert(wide, work / "hf", to="hf")
    make_sparse(work)


OPEN = """
import sys, time, anyckpt
start = time.perf_counter()
found = anyckpt.open(sys.argv[1])
seconds = time.perf_counter() - start
print(f"1,024 ranks opened in {seconds:.1f} s: {len(found.weights):,} weights (bar: 5 s)")
sys.exit(seconds >= 5)
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=250, metavar="MILLIONS")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--work", type=Path, default=Path("bench-out"))
    parser.add_argument("--keep", action="store_true", help="leave the inputs for the next time")
    parser.add_argument("--make", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    work = options.work / f"megatron-{options.parameters}"
    work.mkdir(parents=True, exist_ok=True)
    if options.make:
        build(work, options.parameters)
        return 0
    subprocess.run([PYTHON, __file__, *sys.argv[1:], "--make"], check=True)
    out = work / "out"
    cases = [
        ("TP4 · PP2 to Hugging Face", work / "tp4-pp2", work / "hf", ("convert", "--to", "hf")),
        ("TP2 · PP4 to TP4 · PP1, with moments", work / "tp2-pp4", work / "tp2-pp4",
         ("reshard", "--tp", "4", "--pp", "1")),
    ]  # fmt: skip
    held = True
    for title, source, moved, (verb, *asked) in cases:
        commands = [
            Command("cp, durable", ("cp", "-r", "--reflink=never", str(moved), str(out)), moved, out, baseline=True),
            Command(
                f"anyckpt {verb}", (*ANYCKPT, verb, str(source), str(out), *asked, "-q"), source, out, ratio_bar=1.5,
                memory_bar=250 << 20,
            ),
        ]
        held &= report(f"{title}, {size(moved) / 1e9:.1f} GB written", measure(commands, work, options.rounds))
    held &= not subprocess.run([PYTHON, "-c", OPEN, str(work / "sparse")], check=False).returncode
    if not options.keep:
        delete(work)
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
