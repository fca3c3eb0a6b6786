"""`anyckpt convert SOURCE DESTINATION`: write a checkpoint in another format."""

from __future__ import annotations

from typing import Any

import click

from anyckpt.cli.making import gguf_options, make, maker_options
from anyckpt.cli.options import path_argument, size, verb
from anyckpt.cli.output import Output
from anyckpt.cli.reshard import SIZES, megatron_options, size_options, spelled


@verb("convert")
@path_argument("source")
@path_argument("destination")
@click.option("--to", metavar="FORMAT", help="What to write (default: as the destination's ending says).")
@click.option("--dtype", metavar="DTYPE", help="Cast the floating-point weights, rounded to nearest even.")
@click.option("--keep-dtype", multiple=True, metavar="GLOB", help="Leave the dtype of these tensors alone.")
@click.option("--include", multiple=True, metavar="GLOB", help="Take only these tensors.")
@click.option("--exclude", multiple=True, metavar="GLOB", help="Leave these tensors out.")
@click.option("--only", type=click.Choice(["weights", "optimizer"]), help="Take only that part of the state.")
@click.option(
    "--weights",
    type=click.Choice(["compute", "master"]),
    default="compute",
    show_default=True,
    help="Weights as the model computes with them, or the optimizer's master copies.",
)
@click.option(
    "--max-shard-size", type=size, metavar="SIZE", default="5GB", show_default=True, help="Largest file of a set."
)
@click.option(
    "--tied",
    type=click.Choice(["keep", "drop", "clone"]),
    default="keep",
    show_default=True,
    help="Tied names: as the framework writes them, left out, or each with its own copy.",
)
@click.option("--strip-prefixes", is_flag=True, help="Take wrapper prefixes (module., _orig_mod. …) off all names.")
@click.option("--dense", is_flag=True, help="Make sparse and quantized tensors plain.")
@click.option("--merge-adapter", type=click.Path(), metavar="PATH", help="Merge this PEFT adapter into the weights.")
@click.option("--like", type=click.Path(), metavar="PATH", help="A checkpoint of the same model, for its names.")
@size_options
@megatron_options
@gguf_options
@maker_options
def command(out: Output, source: str, destination: str, **options: Any) -> None:
    """Write the checkpoint SOURCE to DESTINATION in another format.

    The result appears whole or not at all, and is read back and compared with the plan; --prove compares every byte
    with the source as well. Nothing is overwritten without --force.

    \b
    anyckpt convert checkpoint.pt model.safetensors
    anyckpt convert run/step_1000 ./model --to hf --dtype bf16
    anyckpt convert run/step_1000 ./eight --to dcp --world 8
    anyckpt convert ./model model.gguf --quant q4_k_m
    anyckpt convert ./model ./megatron --to megatron --tp 4 --pp 2
    """
    from anyckpt.verbs.convert import convert
    from anyckpt.verbs.reshard import reshard

    options["extra"] = spelled(options)
    sizes = {name: options.pop(name) for name in (*SIZES, "zero")}
    asked = {name: size for name, size in sizes.items() if size is not None}
    if asked:
        make(out, reshard, source, destination, {**options, **asked})
    else:
        make(out, convert, source, destination, options)
