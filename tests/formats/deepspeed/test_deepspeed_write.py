"""Writing: any parameters for any ranks and stage come back the same; what can't be kept is refused by name."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from anyckpt.core.checkpoint import Checkpoint, Optimizer
from anyckpt.core.tensor import from_array
from anyckpt.core.topology import Topology
from anyckpt.errors import Refused, UsageError
from anyckpt.verbs.convert import convert
from anyckpt.verbs.reshard import reshard
from anyckpt.verbs.verify import verify

Open = Callable[[Path], Checkpoint]
Build = Callable[..., Checkpoint]
Same = Callable[[Checkpoint, Checkpoint], None]

SHAPES = st.lists(st.integers(0, 7), max_size=3).map(tuple)
GROUPS = st.lists(st.lists(SHAPES, min_size=1, max_size=5), min_size=1, max_size=3)
PLAIN: dict[str, Any] = {"deepspeed": {"buffer_names": []}}
ALIGNED = {"deepspeed": {"ds_config": {"zero_optimization": {"parameter_alignment": True}}, "buffer_names": []}}
SHUFFLED = {"deepspeed": {"ds_config": {"zero_optimization": {"round_robin_gradients": True}}, "buffer_names": []}}
SMALL = {"deepspeed": {"ds_config": {"zero_optimization": {"sub_group_size": 9}}, "buffer_names": []}}


@example(shapes=[[(0,), (0,)]], zero=1, dp=1, dtype="float32", state=PLAIN)  # once taken for ZeRO-3's placeholders
@example(shapes=[[(0,), (0,)]], zero=3, dp=2, dtype="bfloat16", state=PLAIN)
@settings(deadline=None, max_examples=40)
@given(
    shapes=GROUPS, zero=st.sampled_from([1, 2, 3]), dp=st.integers(1, 5),
    dtype=st.sampled_from(["float32", "bfloat16"]), state=st.sampled_from([PLAIN, ALIGNED, SHUFFLED, SMALL]),
)  # fmt: skip
def test_any_parameters_come_back_from_any_ranks(
    build: Build, open_at: Open, same: Same, shapes: list[list[tuple[int, ...]]], zero: int, dp: int, dtype: str,
    state: dict[str, Any],
) -> None:
    groups = [{f"g{i}.p{k}": shape for k, shape in enumerate(group)} for i, group in enumerate(shapes)]
    source = build(groups, dtype=dtype, frozen={"frozen.weight": (3, 5)}, state=state)
    with tempfile.TemporaryDirectory() as folder:
        reshard(source, Path(folder, "out"), dp=dp, zero=zero)
        got = open_at(Path(folder, "out"))
        same(got, source)
        assert got.topology == Topology(dp=dp, zero=zero)
        assert not [f for f in got.findings if f.severity == "error"]


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("dp", [1, 2, 5])
@pytest.mark.parametrize("run", ["zero2", "zero3"])
def test_a_real_run_keeps_everything(
    run: str, dp: int, zero: int, data: Path, open_at: Open, same: Same, tmp_path: Path
) -> None:
    source = open_at(data / "deepspeed" / run)
    reshard(source, tmp_path / "out", dp=dp, zero=zero, prove=True)
    got = open_at(tmp_path / "out")
    same(got, source)
    assert (got.aliases, got.scheduler, got.state["note"]) == (source.aliases, source.scheduler, "client")
    assert verify(tmp_path / "out", deep=True).ok


def test_the_same_ranks_give_the_same_buffers(zero2: Path, tmp_path: Path) -> None:
    """Tensor for tensor what DeepSpeed wrote, shorter only by the views that it saved whole."""
    from anyckpt.finding import Report
    from anyckpt.formats.deepspeed.files import parts_in
    from anyckpt.formats.deepspeed.load import Loader
    from anyckpt.io.place import Place

    reshard(zero2, tmp_path / "out", dp=2)
    was, now = (Place.at(folder / "global_step3") for folder in (zero2, tmp_path / "out"))
    for part in (p for p in parts_in(was.names) if p.kind == "optim"):
        a, b = (Loader(place, Report()).dict(part)["optimizer_state_dict"] for place in (was, now))
        assert list(a) == list(b), "the same keys in the same order"
        for key in ("group_paddings", "partition_count", "param_alignment_paddings", "clip_grad"):
            assert a[key] == b[key], key
        for x, y in zip(a["single_partition_of_fp32_groups"], b["single_partition_of_fp32_groups"], strict=True):
            assert (x.shape, x.tobytes()) == (y.shape, y.tobytes())
        for group, state in a["base_optimizer_state"]["state"].items():
            for slot, tensor in state.items():
                assert tensor.tobytes() == b["base_optimizer_state"]["state"][group][slot].tobytes(), slot
        mappings = [
            [{name: f.attributes() for name, f in one.items()} for one in s["param_slice_mappings"]] for s in (a, b)
        ]
        assert mappings[0] == mappings[1]


def test_universal_comes_back_the_same(zero3: Path, open_at: Open, same: Same, tmp_path: Path) -> None:
    source = open_at(zero3)
    written = convert(source, tmp_path / "out", to="deepspeed-universal")
    got = open_at(tmp_path / "out")
    assert got.format == "deepspeed-universal"
    same(got, source)
    assert got.aliases == source.aliases
    assert "lossy" in [f.code for f in written.findings], "the loader's gaps are told"
    reshard(tmp_path / "out", tmp_path / "ranks", dp=2, zero=2)
    same(open_at(tmp_path / "ranks"), source)


def test_fp32_weights_keep_their_precision_as_masters(build: Build, open_at: Open, tmp_path: Path) -> None:
    source = build([{"a.weight": (5, 3)}])
    assert source.optimizer is not None
    slots = {slot: t for slot, t in source.optimizer.slots.items() if slot != "master"}
    plain = Checkpoint("memory", "", source.weights, optimizer=Optimizer(slots, source.optimizer.groups), step=5)
    convert(plain, tmp_path / "out", to="deepspeed", dtype="bf16")
    got = open_at(tmp_path / "out")
    assert got.weights["a.weight"].dtype.name == "bfloat16"
    assert got.optimizer is not None
    assert got.optimizer.slots["master"]["a.weight"].tobytes() == source.weights["a.weight"].tobytes()


EXPERTS = [
    {"gate.weight": (4, 6), "out.weight": (5,)},
    {f"moe.deepspeed_moe.experts.deepspeed_experts.{i}.{n}": (3, 7) for i in range(4) for n in ("w", "v")},
]


@pytest.mark.parametrize(("dp", "ep"), [(1, 1), (2, 2), (4, 2), (4, 4), (6, 1)])
def test_experts_are_shared_by_any_ranks(
    dp: int, ep: int, build: Build, open_at: Open, same: Same, tmp_path: Path
) -> None:
    options = [{"name": "dense"}, {"name": "ep_size_2", "moe": True}]
    state = {"deepspeed": {"num_experts": [4], "buffer_names": []}}
    source = build(EXPERTS, options=options, state=state)
    reshard(source, tmp_path / "out", dp=dp, ep=ep, zero=2)
    got = open_at(tmp_path / "out")
    same(got, source)
    assert got.topology == Topology(dp=dp, ep=ep, zero=2)
    assert got.optimizer is not None and got.optimizer.groups[1]["name"] == f"ep_size_{ep}"


def test_muon_keeps_its_momentum_whole_on_each_rank(build: Build, open_at: Open, same: Same, tmp_path: Path) -> None:
    source = build([{"a": (5, 7), "b": (3, 9), "c": (11,)}], options=[{"use_muon": True}], slots=("momentum_buffer",))
    reshard(source, tmp_path / "out", dp=3, zero=2)
    same(open_at(tmp_path / "out"), source)
    with pytest.raises(Refused, match="Muon"):
        reshard(source, tmp_path / "three", dp=3, zero=3)


# -- what is refused -------------------------------------------------------------------------------------------------


def test_weights_alone_are_refused(build: Build, tmp_path: Path) -> None:
    source = Checkpoint("memory", "", build([{"a": (2,)}]).weights)
    with pytest.raises(UsageError, match="no optimizer"):
        convert(source, tmp_path / "out", to="deepspeed")


def test_different_steps_in_one_group_are_refused(build: Build, tmp_path: Path) -> None:
    source = build([{"a": (2,), "b": (2,)}])
    assert source.optimizer is not None
    steps = {"a": from_array(np.array(1, np.float32)), "b": from_array(np.array(2, np.float32))}
    optimizer = Optimizer({**source.optimizer.slots, "step": steps}, source.optimizer.groups)
    with pytest.raises(Refused, match="different values of 'step'"):
        convert(Checkpoint("memory", "", source.weights, optimizer=optimizer), tmp_path / "out", to="deepspeed")


def test_a_parameter_without_moments_gets_zeros_and_a_note(build: Build, open_at: Open, tmp_path: Path) -> None:
    source = build([{"a": (2,), "b": (3,)}])
    assert source.optimizer is not None
    slots = {slot: dict(tensors) for slot, tensors in source.optimizer.slots.items()}
    del slots["exp_avg"]["b"]
    partial = Checkpoint("memory", "", source.weights, optimizer=Optimizer(slots, source.optimizer.groups), step=5)
    written = reshard(partial, tmp_path / "out", dp=2, zero=3)
    assert any("exp_avg" in f.message for f in written.findings if f.code == "inferred")
    got = open_at(tmp_path / "out")
    assert got.optimizer is not None
    assert not any(got.optimizer.slots["exp_avg"]["b"].tobytes())


def test_state_of_a_parameter_that_is_no_weight_is_refused(build: Build, tmp_path: Path) -> None:
    source = build([{"a": (2,), "b": (3,)}])
    lost = Checkpoint("memory", "", {"a": source.weights["a"]}, optimizer=source.optimizer)
    with pytest.raises(Refused, match="'b' is none of the weights"):
        convert(lost, tmp_path / "out", to="deepspeed")


@pytest.mark.parametrize(
    ("sizes", "message"),
    [({"dp": 3, "ep": 2}, "can't share"), ({"dp": 2, "pp": 2}, "pipeline"), ({"dp": 1, "tp": 2}, "tensor-parallel")],
)
def test_layouts_that_can_t_be_are_refused(
    sizes: dict[str, int], message: str, build: Build, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=message):
        reshard(build([{"a": (4,)}]), tmp_path / "out", zero=2, **sizes)


def test_buffers_can_be_named_where_the_source_does_not_tell_them(
    build: Build, open_at: Open, tmp_path: Path
) -> None:
    source = build([{"a": (4,)}], frozen={"table": (3, 3), "b.weight": (2,)})
    reshard(source, tmp_path / "out", dp=2, zero=3, buffers=("table",))
    assert open_at(tmp_path / "out").state["deepspeed"]["buffer_names"] == ["table"]
