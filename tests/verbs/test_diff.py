"""What differs, across formats and types: told exactly, with tolerances, in bounded memory."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from anyckpt.core.checkpoint import Checkpoint, Optimizer
from anyckpt.core.tensor import Tensor, from_array
from anyckpt.verbs.compare import compare_values
from anyckpt.verbs.diff import diff


def checkpoint(weights: dict[str, np.ndarray], **rest: object) -> Checkpoint:
    return Checkpoint("memory", "m", {n: from_array(w) for n, w in weights.items()}, **rest)  # type: ignore[arg-type]


def compare(a: np.ndarray, b: np.ndarray, rtol: float = 0.0, atol: float = 0.0):
    return compare_values("x", from_array(a), from_array(b), rtol=rtol, atol=atol)


X = np.random.default_rng(0).standard_normal((40, 30)).astype(np.float32)


def test_the_same_file_is_the_same_and_is_not_read(data: Path) -> None:
    path = data / "trainer" / "checkpoint.pt"
    seen: list[tuple[int, int]] = []
    found = diff(path, path, state=True, events=lambda done, total: seen.append((done, total)))
    assert found.is_same
    assert found.n_compared > 0
    assert seen[-1][0] == seen[-1][1]


def test_a_trainer_checkpoint_has_the_live_models_values_in_safetensors(data: Path) -> None:
    found = diff(data / "trainer" / "checkpoint.pt", data / "truth.safetensors")
    assert found.is_same
    assert not found.values


def test_one_changed_element_is_found_with_its_place() -> None:
    y = X.copy()
    y[31, 7] += 0.5
    found = diff(checkpoint({"w": X, "v": X}), checkpoint({"w": y, "v": X}))
    assert not found.is_same
    (row,) = found.values
    assert (row.name, row.n_different) == ("w", 1)
    assert row.worst is not None
    assert row.worst[0] == (31, 7)
    assert row.max_abs == pytest.approx(0.5, rel=1e-6)
    assert row.max_rel == pytest.approx(abs(y[31, 7] - X[31, 7]) / max(abs(y[31, 7]), abs(X[31, 7])), rel=1e-5)
    assert row.cosine is not None
    assert row.cosine == pytest.approx(float((X * y).sum() / np.linalg.norm(X) / np.linalg.norm(y)), rel=1e-5)
    assert found.n_same == 1


def test_a_cast_is_told_as_a_type_difference_with_equal_values() -> None:
    half = X.astype(ml_dtypes.bfloat16)
    found = diff(checkpoint({"w": X}), checkpoint({"w": half}))
    assert found.dtypes == {"w": ("float32", "bfloat16")}
    (row,) = found.values
    assert row.is_equal
    assert row.after_cast == "bfloat16"
    assert row.max_abs > 0
    assert not found.is_same
    assert diff(checkpoint({"w": X}), checkpoint({"w": half}), ignore_dtype=True).is_same
    wrong = half.copy()
    wrong[0, 0] *= 2
    assert not diff(checkpoint({"w": X}), checkpoint({"w": wrong}), ignore_dtype=True).is_same


def test_nan_equals_nan_and_nothing_else() -> None:
    a = np.array([1, np.nan, np.nan, np.inf, -np.inf, 0.0], np.float32)
    b = np.array([1, np.nan, 5.0, np.inf, np.inf, -0.0], np.float32)
    row = compare(a, b)
    assert (row.n_nan_a, row.n_nan_b) == (2, 1)
    assert row.n_different == 2  # NaN against 5, and infinities of two signs
    assert not row.is_equal
    assert compare(a, a).is_bitwise


def test_signed_zeros_are_other_bytes_but_no_error() -> None:
    row = compare(np.array([0.0], np.float32), np.array([-0.0], np.float32))
    assert (row.is_bitwise, row.is_equal, row.n_different, row.max_abs) == (False, False, 0, 0.0)
    assert compare(np.array([0.0], np.float32), np.array([-0.0], np.float32), atol=1e-9).is_equal


def test_tolerances_decide() -> None:
    y = X * np.float32(1 + 1e-5)
    assert not compare(X, y).is_equal
    assert compare(X, y, rtol=1e-4).is_equal
    assert not compare(X, y, rtol=1e-6).is_equal
    assert compare(X, y, atol=1e-3).is_equal


def test_large_integers_are_compared_exactly() -> None:
    a = np.array([2**62, 2**62 + 1, -1], np.int64)
    b = np.array([2**62, 2**62, -1], np.int64)
    assert compare(a, b).n_different == 1
    mixed = compare(np.array([-1, 2**62 + 1], np.int64), np.array([2**64 - 1, 2**62 + 1], np.uint64))
    assert mixed.n_different == 1
    assert compare(np.array([True, False]), np.array([True, True])).n_different == 1


@settings(max_examples=40, deadline=None)
@given(
    hnp.arrays(np.float32, hnp.array_shapes(max_dims=3, max_side=6), elements=st.floats(-4, 4, width=32)),
    st.sampled_from([np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.float64]),
    st.integers(0, 2**32 - 1),
)
def test_errors_agree_with_numpy_in_float64(a: np.ndarray, dtype: type, seed: int) -> None:
    b = (a + np.random.default_rng(seed).integers(0, 2, a.shape)).astype(dtype)
    row = compare(a, b)
    error = np.abs(a.astype(np.float64) - b.astype(np.float64))
    assert row.max_abs == error.max()
    if not row.is_bitwise:
        assert row.n_different == (error > 0).sum()
        assert row.worst is None or error[row.worst[0]] == error.max()


def test_slabs_do_not_change_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    y = X.copy()
    y[3, 3], y[39, 29] = 9, np.nan
    once = compare(X, y)
    monkeypatch.setattr("anyckpt.verbs.compare.SLAB_BYTES", 256)
    monkeypatch.setattr("anyckpt.verbs.compare.BLOCK", 7)
    many = compare(X, y)
    assert many.worst == once.worst
    assert (many.n_different, many.max_abs, many.n_nan_b) == (once.n_different, once.max_abs, 1)
    assert many.cosine == pytest.approx(once.cosine)


def test_names_of_one_side_are_told_with_the_nearest() -> None:
    found = diff(checkpoint({"layers.0.q.weight": X}), checkpoint({"blocks.0.q.weight": X, "extra": X}))
    assert not found.is_same
    (only,) = found.only_a
    assert only.nearest is not None
    assert only.nearest.nearest == "blocks.0.q.weight"
    assert [n.name for n in found.only_b] == ["blocks.0.q.weight", "extra"]


def test_wrapped_names_are_compared_and_told() -> None:
    a, b = checkpoint({"module.w": X, "module.norm.gamma": X[0]}), checkpoint({"w": X, "norm.gamma": X[0]})
    found = diff(a, b)
    assert not found.is_same
    assert not found.values
    assert [(r.a, r.b, r.why) for r in found.renamed] == [
        ("module.w", "w", "wrapper prefix"), ("module.norm.gamma", "norm.gamma", "wrapper prefix"),
    ]
    assert found.prefixes == (("module.",), ())
    assert diff(a, b, strip_prefixes=True).is_same


def test_an_older_spelling_is_never_the_same() -> None:
    found = diff(checkpoint({"norm.gamma": X}), checkpoint({"norm.weight": X}), strip_prefixes=True)
    assert [r.why for r in found.renamed] == ["older spelling"]
    assert not found.is_same


def test_a_tie_that_one_side_leaves_out_is_no_difference() -> None:
    a = checkpoint({"embed.weight": X, "head.weight": X}, aliases={"head.weight": "embed.weight"})
    found = diff(a, checkpoint({"embed.weight": X}))
    assert found.is_same
    assert [(n.name, n.tied_to) for n in found.only_a] == [("head.weight", "embed.weight")]


def test_shapes_are_told_and_not_compared() -> None:
    found = diff(checkpoint({"w": X}), checkpoint({"w": X.T.copy()}))
    assert found.shapes == {"w": ((40, 30), (30, 40))}
    assert not found.is_same
    assert not found.values


def test_without_deep_nothing_is_read() -> None:
    def unread(_: object) -> np.ndarray:
        raise AssertionError("was read")

    from anyckpt.core.dtypes import DTYPES
    from anyckpt.core.source import Foreign
    from anyckpt.core.tensor import from_source

    tensor: Tensor = from_source(DTYPES["float32"], (2,), Foreign(unread, 8))
    assert diff(Checkpoint("m", "a", {"w": tensor}), checkpoint({"w": X[0, :2]}), deep=False).is_same


def test_state_compares_slots_under_the_parameters_names_and_hyperparameters() -> None:
    def training(prefix: str, lr: float, moment: np.ndarray) -> Checkpoint:
        slots = {"exp_avg": {f"{prefix}w": from_array(moment)}}
        optimizer = Optimizer(slots, ({"lr": lr, "params": [f"{prefix}w"]},))
        return checkpoint({f"{prefix}w": X}, optimizer=optimizer, step=3, state={"note": "x"})

    a = training("module.", 0.1, X)
    assert diff(a, training("", 0.1, X), state=True, strip_prefixes=True).is_same
    found = diff(a, training("", 0.2, X + 1), state=True, strip_prefixes=True)
    assert [(o.what, o.a, o.b) for o in found.other] == [("optimizer/group 0/lr", "0.1", "0.2")]
    assert [v.name for v in found.values] == ["module.w/exp_avg"]
    assert diff(a, training("", 0.2, X + 1), strip_prefixes=True).is_same


def test_the_document_is_plain_json(data: Path) -> None:
    import json

    y = X.copy()
    y[0, 0] = np.inf
    found = diff(checkpoint({"w": X, "a.q": X}), checkpoint({"w": y, "b.q": X}))
    assert json.loads(json.dumps(found.as_dict(), allow_nan=False))["same"] is False
