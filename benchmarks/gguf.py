"""GGUF: a Hugging Face folder to f16 and bf16 beside a durable copy, and quantized beside ggml's kernels alone.

    python benchmarks/gguf.py [--parameters 500] [--rounds 3] [--jobs 2] [--work bench-out] [--keep]
                              [--official .../convert_hf_to_gguf.py]

The model has a Llama's layout and random bf16 weights. The contenders are llama.cpp's own converter, where its path is
given, and the encoders of the `libgguf` wheel on as many threads, on values that are in memory already, which neither
read nor write a file. Without the wheel, and once more with it turned off, the same is written by numpy.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from harness import ANYCKPT, PYTHON, Command, available, copy, delete, measure, prepare, report

WIDTH, FEED, HEADS, VOCABULARY = 2048, 5632, 32, 32000
BUDGET = 1 << 30
TYPES = ("q8_0", "q4_0", "q4_k_m", "q6_k")

KERNEL = """
import sys
from concurrent.futures import ThreadPoolExecutor
import numpy as np
import anyckpt
from anyckpt.core.ggml import native
from anyckpt.core.ggml.types import BLOCK_TYPES
written, jobs = sys.argv[1], int(sys.argv[2])
values = np.resize(np.random.default_rng(0).standard_normal(1 << 20).astype(np.float32), 1 << 22)
parts = []
for tensor in anyckpt.open(written).weights.values():
    if tensor.dtype.name in BLOCK_TYPES:
        columns, left = tensor.shape[-1], tensor.size // tensor.shape[-1]
        step = len(values) // columns
        parts += [(BLOCK_TYPES[tensor.dtype.name], min(step, left - i), columns) for i in range(0, left, step)]
def one(part):
    row, n, columns = part
    out = np.empty((n, columns // row.block * row.n_bytes), np.uint8)
    native.library().quantize_rows_into_raw(row.id, values[: n * columns].reshape(n, columns), out, n, columns, None)
with ThreadPoolExecutor(jobs) as pool:
    list(pool.map(one, parts))
"""
"""The encoders alone: as many values of each type as the file written has, from 16 MB that are in memory."""


def make(folder: Path, millions: int) -> None:
    """A Llama of about so many million parameters, with a small SentencePiece vocabulary."""
    if (folder / "config.json").exists():
        return
    import ml_dtypes
    import numpy as np

    from anyckpt.core.tensor import Tensor, from_array
    from anyckpt.formats.gguf import kv
    from anyckpt.formats.gguf.tokens import tokenizer_files
    from anyckpt.verbs.save import save

    folder.mkdir(parents=True)
    layer_parameters = 4 * WIDTH * WIDTH + 3 * WIDTH * FEED
    n_layers = max(1, (millions * 1_000_000 - 2 * VOCABULARY * WIDTH) // layer_parameters)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": WIDTH, "intermediate_size": FEED,
        "num_hidden_layers": n_layers, "num_attention_heads": HEADS, "num_key_value_heads": HEADS,
        "vocab_size": VOCABULARY, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "hidden_act": "silu",
    }  # fmt: skip
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *(f"▁w{i}" for i in range(31741))]
    kinds = [2, 3, 3, *[6] * 256, *[1] * 31741]
    fields = {
        "general.architecture": kv.text("llama"), "tokenizer.ggml.model": kv.text("llama"),
        "tokenizer.ggml.tokens": kv.array(kv.STRING, tokens), "tokenizer.ggml.token_type": kv.array(kv.I32, kinds),
        "tokenizer.ggml.scores": kv.array(kv.F32, [-float(i) for i in range(len(tokens))]),
        "tokenizer.ggml.bos_token_id": kv.u32(1), "tokenizer.ggml.eos_token_id": kv.u32(2),
    }  # fmt: skip
    files = tokenizer_files(kv.Metadata(fields))
    (folder / "tokenizer.model").write_bytes(files["tokenizer.model"])
    noise = np.random.default_rng(0).standard_normal(8_000_000).astype(np.float32) * np.float32(0.02)
    values = np.resize(noise.astype(ml_dtypes.bfloat16), VOCABULARY * WIDTH)

    def matrix(rows: int, columns: int) -> Tensor:
        return from_array(values[: rows * columns].reshape(rows, columns))

    weights = {"model.embed_tokens.weight": matrix(VOCABULARY, WIDTH), "lm_head.weight": matrix(VOCABULARY, WIDTH)}
    norm = from_array(np.ones(WIDTH, ml_dtypes.bfloat16))
    for i in range(n_layers):
        lead = f"model.layers.{i}."
        for name in "qkvo":
            weights[f"{lead}self_attn.{name}_proj.weight"] = matrix(WIDTH, WIDTH)
        weights[f"{lead}mlp.gate_proj.weight"] = matrix(FEED, WIDTH)
        weights[f"{lead}mlp.up_proj.weight"] = matrix(FEED, WIDTH)
        weights[f"{lead}mlp.down_proj.weight"] = matrix(WIDTH, FEED)
        weights[f"{lead}input_layernorm.weight"] = norm
        weights[f"{lead}post_attention_layernorm.weight"] = norm
    weights["model.norm.weight"] = norm
    save(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


def ours(folder: Path, out: Path, quant: str, jobs: int, label: str = "", **bars: float) -> Command:
    """A conversion with our own command."""
    argv = (*ANYCKPT, "convert", str(folder), str(out), "--quant", quant, "--jobs", str(jobs), "-q", "--force")
    memory = BUDGET + 200_000_000
    return Command(label or f"anyckpt --quant {quant}", argv, folder, out, memory_bar=memory, **bars)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=int, default=500, help="millions of parameters")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--work", type=Path, default=Path("bench-out"))
    parser.add_argument("--official", type=Path, help="convert_hf_to_gguf.py of a llama.cpp tree")
    parser.add_argument("--types", nargs="*", default=TYPES, choices=TYPES)
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--make", type=Path, help=argparse.SUPPRESS)  # a process of its own: this one must stay small
    options = parser.parse_args()
    if options.make:
        make(options.make, options.parameters)
        return 0
    folder, out = options.work / f"llama-{options.parameters}m", options.work / "out.gguf"
    again = (PYTHON, __file__, "--make", str(folder), "--parameters", str(options.parameters))
    prepare(f"a Llama of {options.parameters} M parameters", lambda: subprocess.run(again, check=True))
    jobs, held = options.jobs, True
    commands = [copy(folder / "model.safetensors", options.work / "copy.bin")]
    for quant in ("f16", "bf16"):
        commands.append(ours(folder, out, quant, jobs, ratio_bar=1.5))
        if options.official:
            argv = (PYTHON, str(options.official), str(folder), "--outfile", str(out), "--outtype", quant)
            commands.append(Command(f"convert_hf_to_gguf.py --outtype {quant}", argv, folder, out))
    held &= report("Hugging Face folder to GGUF", measure(commands, options.work, options.rounds))
    for quant in options.types:
        commands = []
        if available("libgguf"):
            sample = options.work / f"sample-{quant}.gguf"
            first = ours(folder, sample, quant, jobs).argv
            prepare(f"the types of {quant}", lambda argv=first: subprocess.run(argv, check=True))
            argv = (PYTHON, "-c", KERNEL, str(sample), str(jobs))
            commands.append(Command(f"libgguf's encoders alone, {quant}", argv, sample, baseline=True))
            commands.append(ours(folder, out, quant, jobs, ratio_bar=1.0))
        slow = ours(folder, out, quant, jobs, f"anyckpt --quant {quant}, by numpy")
        argv = ("env", "ANYCKPT_NO_LIBGGUF=1", *slow.argv)
        commands.append(Command(slow.label, argv, folder, out, memory_bar=slow.memory_bar))
        held &= report(f"quantized to {quant}", measure(commands, options.work, options.rounds))
        delete(options.work / f"sample-{quant}.gguf")
    if not options.keep:
        delete(folder)
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
