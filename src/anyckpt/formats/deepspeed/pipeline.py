"""Pipelines: weights lie in one file a layer, under the layer's own names.

The live model calls them `{layer number}.{name}`, and `tied_modules.{key}.{name}` where a TiedLayerSpec shares a module
between layers; only `param_shapes` tells that key. A layer that is a plain function has no file, nor has a tied layer's
second use through a `forward_fn`. Facts: DeepSpeed 0.19.8 `pipe/module.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from anyckpt.core.box import Shape
from anyckpt.core.tensor import Tensor
from anyckpt.finding import Report
from anyckpt.formats.deepspeed.joined import Joined
from anyckpt.formats.deepspeed.load import tensor_of
from anyckpt.formats.deepspeed.tensor_parallel import Rules, merged_tensors

TIED = "tied_modules."

Layers = Mapping[int, Mapping[int, Mapping[str, Any]]]  # layer -> tensor-parallel rank -> name -> tensor


def add_layers(
    model: Joined, layers: Layers, named: Sequence[Sequence[Mapping[str, Shape]]], tp: int, rules: Rules, report: Report
) -> None:
    """Put the layers' weights into `model`, in the order of the layers.

    `named`: for every stage, its `param_shapes`, none where the run had no ZeRO: tied modules then go by layer number.
    """
    shapes = {name: shape for stage in named for one in stage for name, shape in one.items()}
    tied: dict[str, dict[str, Shape]] = {}
    for name, shape in shapes.items():
        if name.startswith(TIED):
            module, _, rest = name[len(TIED) :].partition(".")
            tied.setdefault(module, {})[rest] = shape
    numbered = {name.partition(".")[0] for name in shapes}
    weights: dict[str, Tensor] = {}
    for layer, by_rank in sorted(layers.items()):
        parts = [
            {str(k): t for k, v in by_rank.get(rank, {}).items() if (t := tensor_of(v)) is not None}
            for rank in range(tp)
        ]
        lead = f"{layer}."
        model.layers[layer] = lead
        if tied and str(layer) not in numbered and (key := _key(parts[0], tied)) is not None:
            lead = model.layers[layer] = f"{TIED}{key}."
        for rank in [r for r in range(tp) if r not in by_rank]:
            report.add(
                "missing-shard", f"is not there: the run had {tp} tensor-parallel ranks",
                where=f"layer_{layer:02d}-model_{rank:02d}-model_states.pt",
            )
            parts[rank] = parts[0]
        for name in parts[0]:
            whole = merged_tensors(lead + name, [part[name] for part in parts if name in part], rules, report)
            weights.setdefault(lead + name, whole)
    model.weights = {**weights, **model.weights}


def _key(layer: Mapping[str, Tensor], tied: Mapping[str, Mapping[str, Shape]]) -> str | None:
    """The tied module that has this layer's parameters."""
    for key, shapes in tied.items():
        if all(name in layer and layer[name].shape == shape for name, shape in shapes.items()):
            return key
    return None
