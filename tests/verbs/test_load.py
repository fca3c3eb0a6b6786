"""Loading into torch: any format, either side wrapped, all faults told before anything is changed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.frameworks
torch = pytest.importorskip("torch")

from anyckpt.core.checkpoint import Checkpoint  # noqa: E402
from anyckpt.core.dtypes import DTYPES  # noqa: E402
from anyckpt.core.tensor import Tensor, from_array  # noqa: E402
from anyckpt.errors import CheckpointError, Refused, UsageError  # noqa: E402
from anyckpt.finding import Finding  # noqa: E402
from anyckpt.verbs.load import load, load_into, to_torch  # noqa: E402
from anyckpt.verbs.save import from_tensors  # noqa: E402


class Net(torch.nn.Module):
    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(11, 6)
        self.block = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 6))
        self.head = torch.nn.Linear(6, 11, bias=False)
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        if tied:
            self.head.weight = self.embed.weight


def fresh(seed: int, tied: bool = True, dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(seed)
    return Net(tied).to(dtype)


def same(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def checkpoint(model: torch.nn.Module, prefix: str = "", without: tuple[str, ...] = ()) -> Checkpoint:
    state = {f"{prefix}{n}": t.clone() for n, t in model.state_dict().items() if n not in without}
    return from_tensors(state)


DTYPE_NAMES = sorted(
    name for name, d in DTYPES.items() if d.block == 1 and d.kind != "quantized" and hasattr(torch, name)
)


@pytest.mark.parametrize("name", DTYPE_NAMES)
def test_every_torch_type_keeps_its_bytes(name: str) -> None:
    dtype = DTYPES[name]
    raw = np.random.default_rng(1).integers(0, 2, (3, 4, dtype.itemsize), dtype=np.uint8)
    tensor = Tensor(dtype, (3, 4), from_array(raw.reshape(-1)).pieces)
    made = to_torch(tensor)
    assert made.dtype == getattr(torch, name)
    assert made.shape == (3, 4)
    assert made.reshape(-1).view(torch.uint8).numpy().tobytes() == raw.tobytes()


def test_packed_float4_takes_torchs_shape() -> None:
    tensor = Tensor(DTYPES["float4_e2m1fn"], (2, 4), from_array(np.arange(4, dtype=np.uint8)).pieces)
    assert to_torch(tensor).shape == (2, 2)


def test_torch_quantized_values_are_not_taken_for_numbers() -> None:
    with pytest.raises(UsageError, match="no plain tensor of type qint8") as error:
        to_torch(from_array(np.zeros(2, np.int8), DTYPES["qint8"]), name="w")
    assert "dense" in error.value.hint


def test_load_gives_what_torch_load_gives(data: Path) -> None:
    path = data / "trainer" / "checkpoint.pt"
    want = torch.load(path, weights_only=False)["model"]
    got = load(path)
    assert list(got) == list(want)
    assert all(torch.equal(got[n], want[n]) for n in want)
    assert got["lm_head.weight"] is got["model.embed_tokens.weight"]
    some = load(path, names=["*norm*"], dtype=torch.bfloat16)
    assert some
    assert all("norm" in n and t.dtype == torch.bfloat16 for n, t in some.items())
    with pytest.raises(UsageError, match="no tensor is called"):
        load(path, names=["absent"])


def test_slabs_give_the_same_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    import anyckpt.verbs.load as module

    x = torch.randn(13, 7, 5)
    whole = from_tensors({"x": x})
    monkeypatch.setattr(module, "boxes_of", lambda t: __import__("anyckpt.core.box").core.box.slabs(t.shape, 9))
    assert torch.equal(load(whole)["x"], x)
    target = torch.nn.ParameterDict({"x": torch.nn.Parameter(torch.zeros(5, 7, 13).permute(2, 1, 0))})
    load_into(target, whole)
    assert torch.equal(target["x"].detach(), x)


def test_a_damaged_checkpoint_is_not_loaded() -> None:
    broken = Checkpoint("torch", "x", {}, findings=(Finding("truncated", "error", "cut short"),))
    with pytest.raises(CheckpointError, match="cut short"):
        load(broken)


@pytest.mark.parametrize("stored", ["", "module.", "_orig_mod.module.", "net."])
@pytest.mark.parametrize("wrapped", ["plain", "data parallel", "compiled"])
def test_prefixes_on_either_side(stored: str, wrapped: str) -> None:
    source, model = fresh(1), fresh(2)
    outer = {"plain": lambda m: m, "data parallel": torch.nn.DataParallel, "compiled": torch.compile}[wrapped](model)
    before = model.embed.weight.data_ptr()
    loaded = load_into(outer, checkpoint(source, stored))
    assert same(source, model)
    assert model.embed.weight.data_ptr() == before
    assert model.head.weight is model.embed.weight
    own = {"plain": "", "data parallel": "module.", "compiled": "_orig_mod."}[wrapped]
    assert bool(loaded.renamed) == (stored != own)
    json.dumps(loaded.as_dict())


def test_a_prefix_given_takes_a_part() -> None:
    source, model = fresh(1), fresh(2)
    both = {**checkpoint(source, "module.student.").weights, **checkpoint(fresh(3), "module.teacher.").weights}
    with pytest.raises(UsageError):
        load_into(model, Checkpoint("m", "m", both))
    load_into(model, Checkpoint("m", "m", both), prefix="student.")
    assert same(source, model)
    with pytest.raises(UsageError, match="no name begins with"):
        load_into(model, Checkpoint("m", "m", both), prefix="absent.")


def test_what_does_not_fit_is_told_with_shapes_and_nearest_before_anything_changes() -> None:
    source, model = fresh(1), fresh(2)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    bad = dict(checkpoint(source).weights)
    bad["block.2.weights"] = bad.pop("block.2.weight")
    bad["block.0.weight"] = from_array(np.zeros((5, 7), np.float32))
    with pytest.raises(UsageError) as error:
        load_into(model, Checkpoint("m", "m", bad))
    text = str(error.value)
    assert "block.0.weight: [5, 7] in the file, [5, 6] in the module" in text
    assert "block.2.weight [6, 5]   nearest: block.2.weights [6, 5]" in text
    assert "nothing was changed" in text
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())


def test_not_strict_loads_what_fits_and_tells_the_rest() -> None:
    source, model = fresh(1), fresh(2)
    some = dict(checkpoint(source, without=("block.0.bias",)).weights)
    some["other"] = from_array(np.zeros(2, np.float32))
    with pytest.raises(UsageError, match=r"1 of the module's 11 are not in the file"):
        load_into(model, Checkpoint("m", "m", some))
    loaded = load_into(model, Checkpoint("m", "m", some), strict=False)
    assert loaded.missing == ("block.0.bias",)
    assert loaded.unexpected == ("other",)
    assert torch.equal(model.block[2].weight, source.block[2].weight)


def test_values_are_rounded_to_the_modules_type_as_torch_does_and_told() -> None:
    source, model = fresh(1), fresh(2, dtype=torch.bfloat16)
    loaded = load_into(model, checkpoint(source))
    assert torch.equal(model.block[0].weight, source.block[0].weight.to(torch.bfloat16))
    assert {(c.stored, c.module) for c in loaded.casts} == {("float32", "bfloat16")}
    assert "block.1.num_batches_tracked" not in {c.name for c in loaded.casts}


@pytest.mark.parametrize("value", [np.ones(3, np.complex64), np.ones(3, np.int8)])
def test_a_cast_that_changes_the_meaning_is_refused(value: np.ndarray) -> None:
    model = torch.nn.ParameterDict({"w": torch.nn.Parameter(torch.zeros(3))})
    with pytest.raises(UsageError, match="in the module"):
        load_into(model, Checkpoint("m", "m", {"w": from_array(value)}))


def test_a_tied_name_may_be_left_out_or_equal_but_not_differ() -> None:
    source = fresh(1)
    for without in (("head.weight",), ("embed.weight",), ()):
        model = fresh(2)
        load_into(model, checkpoint(source, without=without))
        assert same(source, model)
    untied, model = fresh(3, tied=False), fresh(2)
    before = model.embed.weight.clone()
    with pytest.raises(Refused, match="one tensor in the module"):
        load_into(model, checkpoint(untied))
    assert torch.equal(model.embed.weight, before)


def test_meta_parameters_get_memory_and_ties_hold() -> None:
    source = fresh(1)
    with torch.device("meta"):
        model = Net()
    loaded = load_into(model, checkpoint(source))
    assert same(source, model)
    assert model.head.weight is model.embed.weight
    assert isinstance(model.head.weight, torch.nn.Parameter)
    assert "embed.weight" in loaded.made
    assert loaded.still_meta == ("scratch",)


def test_lazy_parameters_take_the_files_shape() -> None:
    model = torch.nn.Sequential(torch.nn.LazyLinear(4))
    source = torch.nn.Sequential(torch.nn.Linear(3, 4))
    load_into(model, checkpoint(source))
    assert torch.equal(model[0].weight, source[0].weight)


def test_counters_newer_than_the_file_stay_and_obsolete_buffers_are_ignored() -> None:
    source, model = fresh(1), fresh(2)
    old = dict(checkpoint(source, without=("block.1.num_batches_tracked",)).weights)
    old["h.0.attn.masked_bias"] = from_array(np.float32(-1e4).reshape(()))
    loaded = load_into(model, Checkpoint("m", "m", old))
    assert loaded.kept == ("block.1.num_batches_tracked",)
    assert loaded.ignored == ("h.0.attn.masked_bias",)


def test_weight_norm_in_either_spelling() -> None:
    old = torch.nn.utils.weight_norm(torch.nn.Conv1d(3, 5, 2))
    new = torch.nn.utils.parametrizations.weight_norm(torch.nn.Conv1d(3, 5, 2))
    loaded = load_into(new, checkpoint(old))
    assert torch.equal(new.parametrizations.weight.original1, old.weight_v)
    assert {why for _, why in loaded.renamed.values()} == {"older spelling"}
    load_into(old, checkpoint(new))


def test_ddp_and_compiled_names_of_one_file(corpus: Path) -> None:
    path = corpus / "torch" / "ddp_prefixes" / "ckpt.pt"
    want = torch.load(path, weights_only=False)
    state = {n.removeprefix("module."): t for n, t in want["model"].items()}
    model = torch.nn.Module()
    for name, tensor in state.items():
        *path_, leaf = name.split(".")
        at = model
        for part in path_:
            if not hasattr(at, part):
                at.add_module(part, torch.nn.Module())
            at = getattr(at, part)
        at.register_parameter(leaf, torch.nn.Parameter(torch.zeros_like(tensor)))
    loaded = load_into(model, path)
    assert all(torch.equal(t, state[n]) for n, t in model.state_dict().items())
    assert {why for _, why in loaded.renamed.values()} == {"wrapper prefix"}


def test_a_real_model_computes_what_it_computed(data: Path) -> None:
    transformers = pytest.importorskip("transformers")
    truth = json.loads((data / "truth.json").read_text())
    config = transformers.AutoConfig.from_pretrained(data / "trainer")
    tokenizer = transformers.AutoTokenizer.from_pretrained(data / "trainer")
    for source in ("trainer/checkpoint.pt", "sharded", "legacy.pth"):
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        load_into(model, data / source)
        ids = torch.tensor([tokenizer(truth["prompt"])["input_ids"]])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, -1]
        torch.testing.assert_close(logits, torch.tensor(truth["prompt_logits"]))


def test_memory_stays_near_the_module_alone(tmp_path: Path) -> None:
    """48 MiB of weights are loaded with a few MiB beside the module's own."""
    import subprocess
    import sys

    torch.save({"w": torch.randn(12 << 20)}, tmp_path / "w.pt")
    code = (
        "import sys, resource, torch; from anyckpt.verbs.load import load_into\n"
        "m = torch.nn.ParameterDict({'w': torch.nn.Parameter(torch.zeros(12 << 20))})\n"
        "m['w'].data.fill_(1); small = torch.nn.ParameterDict({'w': torch.nn.Parameter(torch.zeros(2))})\n"
        "from anyckpt.verbs.save import from_tensors; load_into(small, from_tensors({'w': torch.ones(2)}))\n"
        "a = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss; load_into(m, sys.argv[1], jobs=2)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - a)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "w.pt")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 30 << 10  # KiB
