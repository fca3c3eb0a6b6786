"""What torch wrote is read as the live model had it: names, types, shapes, bytes, optimizer state and counters."""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import pytest
from builders import array, codes, read_bytes, read_path, saved

from anyckpt.core.checkpoint import Checkpoint
from anyckpt.core.inert import Mapping
from anyckpt.core.tensor import Tensor
from anyckpt.formats.torch import zip as torch_zip
from anyckpt.io.local import open_local

SINGLE_FILES = """
zip_state_dict zip_tied_bf16 zip_views zip_align4096 zip_archive_name zip_no_crc zip_objects full_module
legacy_state_dict tar_2016 torchscript_traced export_pt2 train_adamw train_named_frozen train_sgd_legacy lightning_ckpt
fsdp1_full_w2 fsdp2_full_w2
""".split()
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "C64": "complex64"}


def truth(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """name -> (dtype, shape, bytes) of a safetensors file, by a reader of its own."""
    blob = path.read_bytes()
    n = int.from_bytes(blob[:8], "little")
    header = json.loads(blob[8 : 8 + n])
    header.pop("__metadata__", None)
    return {
        name: (t["dtype"], tuple(t["shape"]), blob[8 + n + t["data_offsets"][0] : 8 + n + t["data_offsets"][1]])
        for name, t in header.items()
    }


def assert_equal(got: dict[str, Tensor], want: dict[str, tuple[str, tuple[int, ...], bytes]]) -> None:
    assert set(got) == set(want)
    for name, (dtype, shape, raw) in want.items():
        tensor = got[name]
        assert (tensor.dtype.name, tensor.shape) == (DTYPES[dtype], shape), name
        assert tensor.tobytes() == raw, name


def slots(checkpoint: Checkpoint) -> dict[str, Tensor]:
    assert checkpoint.optimizer is not None
    return {f"{p}/{s}": t for s, by_name in checkpoint.optimizer.slots.items() for p, t in by_name.items()}


@pytest.mark.parametrize("case", SINGLE_FILES)
def test_a_file_of_the_real_framework_equals_the_live_model(corpus: Path, case: str) -> None:
    folder = corpus / "torch" / case
    facts = json.loads((folder / "case.json").read_text())
    path = folder / facts["path"]
    if path.is_dir():
        (path,) = path.iterdir()
    checkpoint, report = read_path(path)
    ignored = facts["extra"].get("ignore", [])
    weights = {k: t for k, t in checkpoint.weights.items() if not any(fnmatchcase(k, p) for p in ignored)}
    assert_equal(weights, truth(folder / facts["truth"]))
    assert not report.errors
    if "truth_optim" in facts:
        want = truth(folder / facts["truth_optim"])
        got = slots(checkpoint)
        if not any(name.endswith("/step") for name in want):
            got = {k: t for k, t in got.items() if not k.endswith("/step")}
        assert_equal(got, want)
    if "step" in facts["extra"]:
        assert checkpoint.step == facts["extra"]["step"]


@pytest.mark.parametrize("name", ["trainer/checkpoint.pt", "legacy.pth"])
def test_our_own_training_run_is_read_with_its_ties(data: Path, name: str) -> None:
    checkpoint, _ = read_path(data / name)
    assert_equal(dict(checkpoint.weights), truth(data / "truth.safetensors"))
    assert list(checkpoint.aliases.values()) == ["model.embed_tokens.weight"]
    if name.startswith("trainer"):
        assert_equal(slots(checkpoint), truth(data / "truth_optim.safetensors"))
        assert checkpoint.step == json.loads((data / "truth.json").read_text()).get("step", 40)
        assert checkpoint.scheduler is not None
        assert checkpoint.optimizer is not None
        assert checkpoint.optimizer.kind == "AdamW"
        assert checkpoint.facts["weights_only"] is not None


def test_tensors_are_spans_of_the_file_itself(data: Path) -> None:
    checkpoint, _ = read_path(data / "trainer/checkpoint.pt")
    for tensor in checkpoint.weights.values():
        span = tensor.pieces[0].source
        assert span.file.fileno() is not None  # the kernel can copy from it
        assert span.offset % 64 == 0


def test_the_facts_say_who_can_load_it(corpus: Path) -> None:
    checkpoint, _ = read_path(corpus / "torch/zip_dtypes/dtypes.pt")
    assert checkpoint.facts["torch_min"] == ("2.8", "tensors of type float4_e2m1fn_x2")
    assert checkpoint.facts["weights_only"] is None
    assert checkpoint.facts["devices"] == {"cpu": 25}
    module, report = read_path(corpus / "torch/full_module/model_full.pt")
    assert "my_model.TinyLM" in module.facts["weights_only"]
    assert module.facts["module_class"] == "my_model.TinyLM"
    assert report.verdict == "unknown"


def test_a_view_that_was_saved_whole_is_told(corpus: Path) -> None:
    checkpoint, report = read_path(corpus / "torch/zip_views/views.pt")
    assert checkpoint.facts["dead_bytes"] == 672
    assert "dead-storage" in codes(report)


def test_a_zip_written_without_checksums_is_whole(corpus: Path) -> None:
    path = corpus / "torch/zip_no_crc/model.pt"
    checkpoint, report = read_path(path)
    torch_zip.verify(open_local(path), checkpoint, report)
    assert codes(report) == {"no-checksums"}


def test_sparse_quantized_and_nested_tensors_stay_reachable(corpus: Path) -> None:
    checkpoint, report = read_path(corpus / "torch/zip_exotic/exotic.pt")
    assert {"coo/indices", "coo/values", "csr/compressed_indices", "q_int8", "nested/buffer"} <= set(checkpoint.weights)
    assert checkpoint.weights["q_int8"].dtype.name == "qint8"
    assert {"coo", "csr", "q_int8", "q_channel", "nested"} <= set(checkpoint.facts["subclasses"])
    assert not report.errors


def test_big_endian_records_are_swapped_on_reading() -> None:
    data = saved(Mapping({"w": array(2, 3), "i": array(4, dtype="int64")}))
    swapped = data.replace(b"little", b"big\0\0\0")  # the record's size is then wrong for "big"
    checkpoint, report = read_bytes(swapped)
    assert "unknown-byteorder" in codes(report)
    assert checkpoint.weights["w"].numpy()[0, 0] == 1


def test_a_state_dict_keeps_the_versions_of_its_modules() -> None:
    weights = Mapping({"bn.weight": array(3)})
    weights.attributes = {"_metadata": Mapping({"": {"version": 1}, "bn": {"version": 2}})}
    checkpoint, _ = read_bytes(saved(weights))
    assert checkpoint.facts["metadata"]["bn"] == {"version": 2}


def test_python_numbers_in_optimizer_state_are_scalars() -> None:
    state = {0: {"step": 7, "exp_avg": array(3), "exp_avg_sq": array(3), "max_exp_avg_sq": None}}
    root = {"model": {"w": array(3)}, "optimizer": {"state": state, "param_groups": [{"lr": 0.1, "params": [0]}]}}
    checkpoint, report = read_bytes(saved(root))
    assert checkpoint.optimizer is not None
    assert checkpoint.optimizer.slots["step"]["w"].numpy() == np.int64(7)
    assert set(checkpoint.optimizer.slots) == {"step", "exp_avg", "exp_avg_sq"}
    assert checkpoint.step == 7  # the optimizer's count, worded as inferred
    assert "inferred" in codes(report)
