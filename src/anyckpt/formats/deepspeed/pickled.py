"""Objects as DeepSpeed's own files hold them: torch.Size, loss scalers, stage enums, fragment addresses.

Only classes that keep plain data are named (`pickle.records`), and argparse.Namespace, which Megatron-DeepSpeed's
client state is. All else that has no plain form is made plain, as in every file that is written.
"""

from __future__ import annotations

from collections.abc import Mapping as ReadOnly
from typing import Any

from anyckpt.core.box import Shape
from anyckpt.core.inert import Mapping, Opaque
from anyckpt.core.layout import FileLayout
from anyckpt.formats.deepspeed.load import count
from anyckpt.formats.torch.plain import Replacements
from anyckpt.formats.torch.zipwrite import archive, top_folder
from anyckpt.pickle import records
from anyckpt.pickle.reduce import Call, Name

_SCALERS = "deepspeed.runtime.fp16.loss_scaler"
_NAMESPACE = "argparse.Namespace"
_DYNAMIC_KEYS = frozenset(("cur_iter", "last_overflow_iter", "scale_factor", "scale_window"))
_DYNAMIC_DEFAULTS = {
    "cur_scale": 65536.0, "cur_iter": 0, "last_overflow_iter": -1, "scale_factor": 2.0, "scale_window": 1000,
    "min_scale": 1, "delayed_shift": 1, "cur_hysteresis": 1, "consecutive_hysteresis": False,
    "raise_error_at_min_scale": True, "dtype": None, "dynamic": True,
}


def saved(name: str, root: Any) -> FileLayout:
    """The file that torch.save would write of `root`."""
    layout = archive(root, top_folder(name))
    return FileLayout(name, layout.size, layout.parts, layout.checksums)


def kept(value: Any) -> Any:
    """A saved value for writing: harmless objects stay what they are, others become plain data."""
    if isinstance(value, Mapping) and value.kind == "collections.OrderedDict":
        return Mapping({key: kept(item) for key, item in value.items()})
    if isinstance(value, dict):
        return {key: kept(item) for key, item in value.items()}
    if isinstance(value, list):
        return [kept(item) for item in value]
    if type(value) is tuple:
        return tuple(kept(item) for item in value)
    if isinstance(value, Opaque) and (value.class_name in records.ROWS or value.class_name == _NAMESPACE):
        module, _, name = value.class_name.rpartition(".")
        if value.args and value.state is None:
            return Call(Name(module, name), tuple(kept(item) for item in value.args))
        state = kept(value.state if value.state is not None else value.attributes() | (value.kwargs or {}))
        return Call(Name(module, name), (), state=state, new=True)
    return value if isinstance(value, Call) else Replacements([]).plain(value)


def size(shape: Shape) -> Call:
    """A torch.Size: zero_to_fp32.py asks it for its number of elements."""
    return Call(Name("torch", "Size"), (tuple(shape),))


def stage(number: int) -> Call:
    """The stage as DeepSpeed's enum."""
    return Call(Name("deepspeed.runtime.zero.config", "ZeroStageEnum"), (number,))


def fragment(start: int, length: int) -> Call:
    """Where in a rank's partition a parameter's elements are."""
    cls = Name("deepspeed.utils.tensor_fragment", "fragment_address")
    return Call(cls, (), state={"numel": length, "start": start}, new=True)


def loss_scaler(own: ReadOnly[str, Any]) -> Call:
    """The loss scaler as the source had it, whatever form it had there; without one, that of runs that need none."""
    value = own.get("loss_scaler")
    attributes = value.attributes() if isinstance(value, Opaque) else value
    if not isinstance(attributes, dict) and "cur_scale" in own:  # stage 0 keeps it in pieces
        attributes = {key: own[key] for key in _DYNAMIC_DEFAULTS if key in own}
        attributes["dynamic"] = bool(own.get("dynamic_loss_scale"))
    if not isinstance(attributes, dict):
        attributes = {"cur_scale": 1.0, "dynamic": False}
    if attributes.get("dynamic") and attributes.keys() & _DYNAMIC_KEYS:
        return Call(Name(_SCALERS, "DynamicLossScaler"), (), state=_DYNAMIC_DEFAULTS | kept(attributes), new=True)
    state = {"cur_scale": attributes.get("cur_scale", 1.0), "dynamic": False}
    return Call(Name(_SCALERS, "LossScaler"), (), state=state, new=True)


def whole_number(own: ReadOnly[str, Any], key: str) -> int:
    """A count that DeepSpeed keeps, 0 where the source has none."""
    return count(own.get(key))
