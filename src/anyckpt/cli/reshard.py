"""`anyckpt reshard SOURCE DESTINATION --dp 8`: the whole training state for another number of ranks."""

from __future__ import annotations

from typing import Any

import click

from anyckpt.cli.making import make, maker_options
from anyckpt.cli.options import path_argument, verb
from anyckpt.cli.output import Output

SIZES = {
    "tp": "Tensor-parallel ranks.",
    "pp": "Pipeline stages.",
    "vpp": "Virtual stages on each pipeline rank.",
    "ep": "Expert-parallel ranks.",
    "etp": "Tensor-parallel ranks of experts.",
    "cp": "Context-parallel ranks.",
    "dp": "Data-parallel ranks.",
    "world": "Ranks in all, for formats that know no other.",
}


def size_options(function: Any) -> Any:
    """One option a parallel size, and the ZeRO stage."""
    option = click.option("--zero", type=click.IntRange(1, 3), metavar="STAGE", help="DeepSpeed's ZeRO stage: 1, 2, 3.")
    function = option(function)
    for name, help_text in reversed(SIZES.items()):
        function = click.option(f"--{name}", type=click.IntRange(1), metavar="N", help=help_text)(function)
    return function


def megatron_options(function: Any) -> Any:
    """How a Megatron model spells its layers; both are what its own options are called."""
    for option in (
        click.option(
            "--make-vocab-size-divisible-by", type=click.IntRange(1), metavar="N",
            help="Megatron: pad the vocabulary to a multiple of N × TP, as the run will.",
        ),
        click.option(
            "--moe-grouped-gemm/--no-moe-grouped-gemm", default=None, help="Megatron: experts grouped, or one by one."
        ),
        click.option(
            "--transformer-impl", type=click.Choice(["local", "transformer_engine"]),
            help="Megatron: layers of that kind (default: as SOURCE has them, else transformer_engine).",
        ),
    ):
        function = option(function)
    return function


def spelled(options: dict[str, Any]) -> dict[str, Any]:
    """The options that `megatron_options` added, as the writer takes them; those not given are left out."""
    names = ("transformer_impl", "moe_grouped_gemm", "make_vocab_size_divisible_by")
    return {name: value for name in names if (value := options.pop(name)) is not None}


@verb("reshard")
@path_argument("source")
@path_argument("destination")
@click.option("--to", metavar="FORMAT", help="What to write (default: as SOURCE is; DeepSpeed with --zero).")
@size_options
@click.option("--buffer", "buffers", multiple=True, metavar="GLOB", help="Weights that are buffers, not frozen.")
@megatron_options
@maker_options
def command(out: Output, source: str, destination: str, **options: Any) -> None:
    """Write the training checkpoint SOURCE for other numbers of ranks: weights, optimizer, scheduler and counters.

    Sizes that are not given stay as they were saved. The framework resumes from DESTINATION as if it had saved it at
    those sizes itself.

    \b
    anyckpt reshard run/global_step500 ./for-8 --dp 8
    anyckpt reshard run ./for-6 --dp 6 --zero 3
    anyckpt reshard megatron-run ./wide --tp 8 --pp 2 --ep 4 --dp 4
    """
    from anyckpt.verbs.reshard import reshard

    extra = spelled(options)  # takes them out of `options`
    make(out, reshard, source, destination, {**options, "extra": extra})
