"""DeepSpeed Universal checkpoints: one small file a parameter and slot, for any number of ranks.

    TAG_universal/                                     beside it `latest_universal`
      mp_rank_TT_model_states.pt                       stages 0-2: copies of the run's model files
      zero_pp_rank_D_mp_rank_TT_model_states.pt        stage 3: copies, which hold placeholders
      zero/optimizer_state.pt                          what is not a tensor of a parameter: param_groups, loss scaler
      zero/NAME/fp32.pt  exp_avg.pt …  step.pt         stages 0-2: {"param": tensor of its shape, "cat_dim": 0 or 1, …}
                                                       stage 3: the flat tensor itself, its shape in param_shapes

Frozen parameters, buffers and tied names have an fp32.pt as well in stages 0-2, which no loader reads: the model file
has them as they are. Facts: DeepSpeed 0.19.8 `checkpoint/ds_to_universal.py`, `checkpoint/universal_checkpoint.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

from anyckpt.core import ops
from anyckpt.core.box import Shape
from anyckpt.core.checkpoint import Checkpoint, Optimizer
from anyckpt.core.layout import FileLayout
from anyckpt.core.tensor import Tensor, filled
from anyckpt.core.topology import Topology
from anyckpt.finding import Report
from anyckpt.formats.deepspeed.around import with_surroundings
from anyckpt.formats.deepspeed.contents import compute_dtype, load
from anyckpt.formats.deepspeed.files import chosen_step, is_universal, parts_in, steps_in, unfinished
from anyckpt.formats.deepspeed.load import Loader, mapping, options_of, sequence, tensor_of
from anyckpt.formats.deepspeed.step import OPTIMIZER_KEYS, assemble, model_shapes
from anyckpt.formats.table import WriteOptions
from anyckpt.formats.torch.optimizer import kind_of
from anyckpt.io.paths import printable
from anyckpt.io.place import Place

GLOBAL_STATE = "zero/optimizer_state.pt"


def matches(place: Place) -> bool:
    """A universal folder, or one whose steps all are universal."""
    if is_universal(place):
        return True
    steps = steps_in(place)
    return bool(steps) and all(is_universal(place.subplace(tag)) for tag in steps)


def read(place: Place, report: Report) -> Checkpoint:
    """Describe it: masters and moments from the files of the parameters, all else from the model file."""
    folder, tag = chosen_step(place, report)
    unfinished(place, report)
    checkpoint = with_surroundings(place, folder, read_universal(folder, report), report)
    return replace(checkpoint, path=str(place.path), facts={**checkpoint.facts, "tag": tag})


def write(checkpoint: Checkpoint, options: WriteOptions) -> list[FileLayout]:
    """The folder to be; see `write_universal`."""
    from anyckpt.formats.deepspeed import write_universal

    return write_universal.write(checkpoint, options)


def read_universal(place: Place, report: Report) -> Checkpoint:
    """Describe the universal folder `place`."""
    loader = Loader(place, report)
    step = load(loader, parts_in(place.names), report, universal=True)
    named = model_shapes(step)
    shapes = {name: shape for one in named for name, shape in one.items()}
    saved = mapping(loader.object(GLOBAL_STATE)) if GLOBAL_STATE in place.names else {}
    if not saved:
        report.add(
            "missing-shard", "is not there: DeepSpeed can't load the folder without it", where=GLOBAL_STATE,
            hint="convert the original checkpoint again: anyckpt convert SRC DST --to deepspeed-universal",
        )
    slots = _slots(place, loader, shapes, report)
    inner = mapping(saved.get("optimizer_state_dict"))  # stage 3 keeps a rank's whole state
    first = mapping(mapping(inner.get("state")).get(0))
    if "step" not in slots and (taken := tensor_of(first.get("step"))) is not None:
        slots["step"] = dict.fromkeys(shapes, taken)
    groups = _groups(saved, inner, named)
    optimizer = Optimizer(slots=slots, groups=groups, kind=kind_of(slots, groups)) if slots else None
    weights, aliases = _weights(step.first, slots.get("master", {}), shapes, compute_dtype(step))
    lost = [name for name in shapes if name not in slots.get("master", {})]
    if lost:
        more = f", and {len(lost) - 1} more" if len(lost) > 1 else ""
        report.add(
            "missing-shard", f"is not there{more}: the model has the parameter",
            where=f"zero/{printable(lost[0])}/fp32.pt", hint="convert the original checkpoint again",
        )
    kept = {key: saved[key] for key in OPTIMIZER_KEYS if key in saved}
    zero = 3 if step.by_rank and "param" not in _form(place, loader) else 2
    found = assemble(place, step, loader, report, Topology(dp=1, zero=0), kept)
    return replace(
        found, format="deepspeed-universal", weights=weights, aliases=aliases, optimizer=optimizer,
        facts={**found.facts, "container": "DeepSpeed universal", "zero_stage": zero, "universal": True},
    )


def _form(place: Place, loader: Loader) -> Any:
    """The object of one parameter's fp32.pt: a dict, or the tensor itself."""
    name = next((n for n in place.names if n.startswith("zero/") and n.endswith("/fp32.pt")), None)
    value = loader.object(name) if name else None
    return value if isinstance(value, dict) else {}


def _slots(
    place: Place, loader: Loader, shapes: Mapping[str, Shape], report: Report
) -> dict[str, dict[str, Tensor]]:
    """slot -> parameter -> tensor, from the folders below `zero`; those of no parameter (buffers) are only judged."""
    slots: dict[str, dict[str, Tensor]] = {}
    for path in place.names:
        head, _, file = path.rpartition("/")
        if not head.startswith("zero/") or not file.endswith(".pt"):
            continue
        name, slot = head[len("zero/") :], file.removesuffix(".pt")
        value = loader.object(path)
        tensor = tensor_of(mapping(value).get("param") if isinstance(value, dict) else value)
        if name not in shapes:
            continue
        if tensor is None:
            if value is not None:
                report.add("inconsistent", "holds no tensor", where=printable(path))
            continue
        shape = shapes[name]
        if slot != "step" and tensor.shape != shape:
            if tensor.size != prod(shape) and not _is_full(tensor, shape):
                message = f"has {tensor.size:,} elements, the parameter {prod(shape):,}"
                report.add("size-mismatch", message, where=printable(path))
                continue
            if tensor.size == prod(shape):
                tensor = ops.reshape(tensor, shape)
            elif mapping(value).get("vocab_tensor") and tensor.shape[1:] == shape[1:] and tensor.shape[0] < shape[0]:
                tensor = _padded(tensor, shape)  # the padding of one rank's own model; loaders pad with zeros
        slots.setdefault("master" if slot == "fp32" else slot, {})[name] = tensor
    order = {name: i for i, name in enumerate(shapes)}
    return {slot: dict(sorted(found.items(), key=lambda item: order[item[0]])) for slot, found in slots.items()}


def _padded(tensor: Tensor, shape: Shape) -> Tensor:
    rows = (shape[0] - tensor.shape[0], *shape[1:])
    return ops.concat([tensor, filled(tensor.dtype, rows, bytes(tensor.dtype.itemsize))], 0)


def _is_full(tensor: Tensor, local: Shape) -> bool:
    """Whether it is the whole of what a tensor-parallel rank's model file gives the local shape of."""
    return tensor.ndim == len(local) and sum(a != b for a, b in zip(tensor.shape, local, strict=True)) == 1


def _groups(
    saved: Mapping[str, Any], inner: Mapping[str, Any], named: list[dict[str, Shape]]
) -> tuple[dict[str, Any], ...]:
    """Hyperparameters with names: of sub groups (stage 3) by their numbers, else one list of names a group."""
    if inner:
        sub_groups = dict(enumerate(named))
        return tuple(
            {
                **options_of(group),
                "params": [n for i in sequence(mapping(group).get("params")) for n in sub_groups.get(i, ())],
            }
            for group in sequence(inner.get("param_groups"))
        )
    groups = sequence(saved.get("param_groups"))
    return tuple({**options_of(mapping(g)), "params": list(one)} for g, one in zip(groups, named, strict=False))


def _weights(
    model: Mapping[str, Any], masters: Mapping[str, Tensor], shapes: Mapping[str, Shape], usual: Any
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The model file's weights where it has them whole, else the masters in the type that the run computes with."""
    shared = {str(a): str(b) for a, b in mapping(model.get("shared_params")).items()}
    module = {str(k): t for k, v in mapping(model.get("module")).items() if (t := tensor_of(v)) is not None}
    weights: dict[str, Tensor] = {}
    for name in dict.fromkeys((*module, *masters)):
        own, master = module.get(name), masters.get(name)
        if master is not None and (own is None or own.shape != master.shape):
            weights[name] = ops.cast(master, usual if own is None else own.dtype)
        elif own is not None and (own.size or name not in shared):
            weights[name] = own
    for alias, name in shared.items():
        if name in weights:
            weights[alias] = weights[name]
    return weights, {a: b for a, b in shared.items() if a in weights and b in weights}
