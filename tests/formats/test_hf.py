"""Hugging Face folders: read as the loaders would, faults told, and what is written is loaded by transformers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anyckpt.core.dtypes import DTYPES
from anyckpt.core.ops import cast
from anyckpt.core.tensor import filled
from anyckpt.errors import CheckpointError
from anyckpt.formats import hf
from anyckpt.formats.hf.order import in_model_order
from anyckpt.formats.hf.sets import find_sets
from anyckpt.formats.hf.write import split
from anyckpt.formats.table import WriteOptions

Made = Callable[..., Path]


@pytest.fixture
def made(tmp_path: Path, safetensors_bytes: Callable[..., bytes]) -> Made:
    """A folder of small safetensors files: name -> {tensor: (dtype, bytes)}, and other files by name -> text."""

    def make(shards: dict[str, dict[str, str]], step: dict[str, str] | None = None, **files: str) -> Path:
        folder = tmp_path / "model"
        folder.mkdir()
        for name, tensors in shards.items():
            header: dict[str, Any] = {"__metadata__": {"format": "pt", **({"step": step[name]} if step else {})}}
            offset = 0
            for tensor, dtype in tensors.items():
                size = 2 * {"F32": 4, "BF16": 2}[dtype]
                header[tensor] = {"dtype": dtype, "shape": [2], "data_offsets": [offset, offset + size]}
                offset += size
            (folder / name).write_bytes(safetensors_bytes(header, bytes(range(1, offset + 1))))
        for name, text in files.items():
            (folder / name.replace("__", ".")).write_text(text)
        return folder

    return make


ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model__safetensors__index__json"


def index(total_size: int = 16, **weight_map: str) -> str:
    return json.dumps({"metadata": {"total_size": total_size}, "weight_map": weight_map})


def test_sharded_folder_gives_every_tensor_of_the_live_model(data: Path, read: Any) -> None:
    checkpoint, report = read(data / "sharded")
    truth, _ = read(data / "truth.safetensors")
    assert set(checkpoint.weights) == set(truth.weights)
    for name, tensor in truth.weights.items():
        assert checkpoint.weights[name].tobytes() == tensor.tobytes()
    assert dict(checkpoint.aliases) == {"lm_head.weight": "model.embed_tokens.weight"}
    assert report.verdict == "safe"
    assert not report.errors
    assert {a.name for a in checkpoint.assets} >= {"config.json", "tokenizer.json"}
    assert checkpoint.nbytes == sum(t.nbytes for n, t in truth.weights.items() if n != "lm_head.weight")


def test_pickled_shards_are_read_like_safetensors_ones(data: Path, read: Any) -> None:
    checkpoint, report = read(data / "bin")
    truth, _ = read(data / "truth.safetensors")
    for name, tensor in truth.weights.items():
        assert checkpoint.weights[name].tobytes() == cast(tensor, DTYPES["bfloat16"]).tobytes()
    assert dict(checkpoint.aliases) == {"lm_head.weight": "model.embed_tokens.weight"}
    assert [f.code for f in report.findings if f.severity != "note"] == ["missing-tokenizer"]


@pytest.mark.parametrize(
    ("shards", "files", "code"),
    [
        ({ONE: {"a": "F32"}}, {INDEX: index(a=ONE, b=TWO)}, "missing-shard"),
        ({ONE: {"a": "F32"}, TWO: {"c": "F32"}}, {INDEX: index(a=ONE, b=TWO)}, "missing-tensor"),
        ({ONE: {"a": "F32"}, TWO: {"b": "F32"}}, {INDEX: index(a=TWO, b=TWO)}, "missing-tensor"),
        ({ONE: {"a": "F32"}, TWO: {"b": "F32"}}, {INDEX: index(a=TWO, b=ONE)}, "wrong-shard"),
        ({ONE: {"a": "F32"}, TWO: {"b": "F32"}}, {INDEX: index(a=ONE)}, "extra-shard"),
        ({ONE: {"a": "F32"}, TWO: {"b": "F32", "c": "F32"}}, {INDEX: index(24, a=ONE, b=TWO)}, "unlisted-tensor"),
        ({ONE: {"a": "F32", "b": "F32"}, TWO: {"b": "F32"}}, {INDEX: index(24, a=ONE, b=TWO)}, "duplicate-tensor"),
        ({ONE: {"a": "F32"}, TWO: {"b": "F32"}}, {INDEX: index(10**10, a=ONE, b=TWO)}, "total-size-mismatch"),
        ({ONE: {"a": "F32"}, TWO: {"b": "BF16"}}, {INDEX: index(12, a=ONE, b=TWO)}, "mixed-dtype"),
        ({ONE: {"a": "F32"}, TWO: {"b": "F32"}}, {INDEX: '{"weight_map": {"a": 1}}'}, "bad-index"),
        ({ONE: {"a": "F32"}, TWO: {"b": "F32"}}, {INDEX: "<html>sign in</html>"}, "bad-index"),
        ({ONE: {"a": "F32"}, TWO: {"b": "F32"}}, {INDEX: index(a=ONE, b="../secret.safetensors")}, "path-escape"),
        ({ONE: {"a": "F32"}, TWO: {"b": "F32"}}, {}, "missing-index"),
        ({ONE: {"a": "F32"}}, {}, "missing-shard"),
        ({ONE: {"a": "F32"}}, {"model-00002-of-00002__safetensors__tmp": "x"}, "incomplete"),
        ({"model.safetensors": {"a": "F32"}}, {"model__safetensors__tmp-4711": "x"}, "leftover"),
        ({"model.safetensors": {"a": "F32"}, "pytorch_model.safetensors": {"a": "F32"}}, {}, "ambiguous"),
        ({"model.safetensors": {"a": "F32"}}, {}, "missing-config"),
        ({"model.safetensors": {"a": "F32"}}, {"config__json": '{"auto_map": {"AutoModel": "x.Y"}}'}, "contains-code"),
        ({"model.safetensors": {"a": "F32"}}, {"config__json": "{not json"}, "bad-header"),
        ({"model.safetensors": {"a": "F32"}}, {"optimizer__pt": "not one"}, "not-a-checkpoint"),
    ],
)
def test_each_fault_of_a_folder_has_its_word(
    shards: dict[str, dict[str, str]], files: dict[str, str], code: str, made: Made, codes: Any
) -> None:
    found = codes(made(shards, **files))
    assert code in found
    assert len(set(found) - {"missing-config", "ambiguous", "missing-index", "tied", code}) <= 1, found


def test_shards_of_two_steps_are_not_one_model(made: Made, read: Any) -> None:
    folder = made({ONE: {"a": "F32"}, TWO: {"b": "F32"}}, {ONE: "100", TWO: "200"}, **{INDEX: index(a=ONE, b=TWO)})
    assert "mixed-steps" in [f.code for f in read(folder)[1].errors]


def test_a_good_shard_is_still_read_beside_a_broken_one(made: Made, read: Any) -> None:
    folder = made({ONE: {"a": "F32"}, TWO: {"b": "F32"}}, **{INDEX: index(a=ONE, b=TWO)})
    (folder / TWO).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 7\n")
    checkpoint, report = read(folder)
    assert set(checkpoint.weights) == {"a"}
    assert [f.code for f in report.errors] == ["lfs-pointer"]


def test_without_a_readable_weight_opening_raises_the_first_fault(made: Made, read: Any) -> None:
    folder = made({}, **{INDEX: index(a=ONE, b=TWO)})
    with pytest.raises(CheckpointError) as caught:
        read(folder)
    assert caught.value.finding.code == "missing-shard"


def test_a_dangerous_pickle_beside_good_weights_is_what_the_folder_is(made: Made, read: Any) -> None:
    folder = made({"model.safetensors": {"a": "F32"}})
    (folder / "training_args.bin").write_bytes(b"\x80\x02cos\nsystem\nX\x04\0\0\0trueq\0\x85R.")
    checkpoint, report = read(folder)
    assert report.verdict == "dangerous"
    assert checkpoint.verdict == "dangerous"
    assert set(checkpoint.weights) == {"a"}


def test_trainer_folder_gives_optimizer_step_and_the_rest(corpus: Path, read: Any) -> None:
    checkpoint, report = read(corpus / "torch/hf_trainer/checkpoint-4")
    truth, _ = read(corpus / "torch/hf_trainer/truth_optim.safetensors")
    assert checkpoint.optimizer is not None
    slots = {f"{p}/{slot}": t for slot, named in checkpoint.optimizer.slots.items() for p, t in named.items()}
    for name, tensor in truth.weights.items():
        assert slots[name].tobytes() == tensor.tobytes()
    assert checkpoint.step == 4
    assert checkpoint.scheduler["last_epoch"] == 4
    assert checkpoint.rng is not None
    assert "training_args.bin" in checkpoint.state
    assert report.verdict == "unknown"  # the pickled TrainingArguments


def test_without_a_known_order_the_optimizer_is_named_by_shapes_and_that_is_said(corpus: Path, read: Any) -> None:
    checkpoint, report = read(corpus / "torch/accelerate_state/ckpt")
    assert "blocks.0.qkv.weight" in checkpoint.optimizer.slots["exp_avg"]
    assert checkpoint.optimizer.names_inferred
    assert "ambiguous" in [f.code for f in report.findings]
    assert checkpoint.step == 3


@pytest.mark.parametrize("saved", [True, None])
def test_a_head_that_is_not_stored_is_tied_unless_the_config_denies_it(
    saved: bool | None, data: Path, tmp_path: Path, read: Any
) -> None:
    folder = tmp_path / "m"
    shutil.copytree(data / "sharded", folder)
    config = json.loads((folder / "config.json").read_text())
    config.pop("tie_word_embeddings")
    (folder / "config.json").write_text(
        json.dumps(config if saved is None else {**config, "tie_word_embeddings": saved})
    )
    assert dict(read(folder)[0].aliases) == {"lm_head.weight": "model.embed_tokens.weight"}
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    checkpoint, report = read(folder)
    assert "lm_head.weight" not in checkpoint.weights
    assert "missing-tensor" in [f.code for f in report.findings]


@pytest.fixture
def by_rank(
    tmp_path: Path, safetensors_bytes: Callable[..., bytes]
) -> Callable[[dict[int, tuple[list[int], Any]]], Path]:
    """Files of torch's distributed writer: rank -> (offsets, array) of the tensor `w`."""

    def make(parts: dict[int, tuple[list[int], Any]]) -> Path:
        for rank, (start, array) in parts.items():
            info = json.dumps({"w": {"saved_offsets": start}})
            header = {
                "__metadata__": {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": info},
                "w": {"dtype": "F32", "shape": list(array.shape), "data_offsets": [0, array.nbytes]},
            }
            name = f"shard-{rank:05d}-model-00001-of-00001.safetensors"
            (tmp_path / name).write_bytes(safetensors_bytes(header, array.tobytes()))
        return tmp_path

    return make


FULL = np.arange(12, dtype=np.float32).reshape(4, 3)


def test_boxes_by_rank_make_one_tensor(by_rank: Any, read: Any) -> None:
    parts = {1: ([0, 0], FULL[:2, :2]), 2: ([0, 2], FULL[:2, 2:]), 3: ([2, 0], FULL[2:]), 4: ([2, 0], FULL[2:])}
    checkpoint, report = read(by_rank(parts))
    assert np.array_equal(checkpoint.weights["w"].numpy(), FULL)
    assert not report.errors


@pytest.mark.parametrize(
    ("parts", "code"),
    [
        ({1: ([0, 0], FULL[:2]), 2: ([3, 0], FULL[3:])}, "missing-shard"),
        ({1: ([0, 0], FULL[:3]), 2: ([2, 0], FULL[2:])}, "offset-overlap"),
        ({1: ([0, 0], FULL[:2]), 3: ([2, 0], FULL[2:])}, "missing-shard"),
        ({1: ([0], FULL)}, "bad-header"),
        ({1: ([-1, 0], FULL)}, "bad-header"),
    ],
)
def test_boxes_that_do_not_make_a_tensor_are_told(parts: Any, code: str, by_rank: Any, read: Any) -> None:
    folder = by_rank(parts)
    try:
        found = [f.code for f in read(folder)[1].errors]
    except CheckpointError as error:
        found = [error.finding.code]
    assert found == [code]


def test_sets_are_found_by_name_and_the_loaders_choice_comes_first() -> None:
    names = [
        "pytorch_model.bin", "model.fp16.safetensors", "model-00001-of-00002.safetensors", "optimizer.bin",
        "model.safetensors.index.json", "model-00002-of-00002.fp16.safetensors", "consolidated.safetensors",
        "training_args.bin", "sub/model.safetensors",
    ]  # fmt: skip
    found = [(s.stem, s.variant, s.ending, s.total, bool(s.index)) for s in find_sets(names)]
    assert found == [
        ("model", "", "safetensors", 2, True),
        ("consolidated", "", "safetensors", 0, False),
        ("pytorch_model", "", "bin", 0, False),
        ("model", ".fp16", "safetensors", 0, False),
        ("model", ".fp16", "safetensors", 2, False),
    ]
    assert find_sets(names)[0].missing == ["model-00002-of-00002.safetensors"]


def test_shards_are_cut_as_the_hub_cuts_them() -> None:
    weights = {
        n: filled(DTYPES["uint8"], (size,), b"\1") for n, size in zip("abcdef", (6, 6, 2, 6, 2, 20), strict=True)
    }
    assert split(weights, 10) == [["a"], ["b", "c"], ["f"], ["d", "e"]]
    assert split({}, 10) == [[]]


@pytest.mark.parametrize("limit", [4_000, 12_500, 10**9])
def test_a_written_folder_is_read_back_the_same(
    limit: int, data: Path, tmp_path: Path, read: Any, lay_down: Any
) -> None:
    checkpoint, _ = read(data / "bin")
    lay_down(hf.write(checkpoint, WriteOptions(max_shard_bytes=limit)), tmp_path / "out")
    back, report = read(tmp_path / "out")
    assert not report.errors
    assert set(back.weights) == set(checkpoint.weights)
    assert dict(back.aliases) == dict(checkpoint.aliases)
    assert all(back.weights[n].tobytes() == t.tobytes() for n, t in checkpoint.weights.items())
    assert (tmp_path / "out/config.json").read_bytes() == (data / "bin/config.json").read_bytes()


def test_a_cast_changes_the_dtype_in_the_config_and_nothing_else(
    data: Path, tmp_path: Path, read: Any, lay_down: Any
) -> None:
    checkpoint, _ = read(data / "sharded")
    half = checkpoint.with_weights({n: cast(t, DTYPES["float16"]) for n, t in checkpoint.weights.items()})
    lay_down(hf.write(half, WriteOptions()), tmp_path / "out")
    before = json.loads((data / "sharded/config.json").read_text())
    assert json.loads((tmp_path / "out/config.json").read_text()) == {**before, "dtype": "float16"}


@pytest.mark.frameworks
@pytest.mark.parametrize("source", ["sharded", "bin", "trainer"])
def test_transformers_loads_what_is_written_with_equal_logits(
    source: str, data: Path, tmp_path: Path, read: Any, lay_down: Any
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    checkpoint, _ = read(data / source)
    lay_down(hf.write(checkpoint, WriteOptions(max_shard_bytes=9_000)), tmp_path / "out")
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    truth = json.loads((data / "truth.json").read_text())
    from transformers import AutoTokenizer

    ids = torch.tensor([AutoTokenizer.from_pretrained(data / "sharded")(truth["prompt"])["input_ids"]])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, -1]
    if source == "bin":  # bfloat16: the same logits as transformers has from the source itself
        with torch.no_grad():
            wanted = AutoModelForCausalLM.from_pretrained(data / "bin")(input_ids=ids).logits[0, -1]
        assert torch.equal(logits, wanted)
    else:
        assert np.allclose(logits.numpy(), truth["prompt_logits"], rtol=0, atol=1e-6)


@pytest.mark.frameworks
@pytest.mark.parametrize(
    "model_type", ["llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "phi3", "gpt2", "gpt_neox", "opt", "bert"]
)
def test_the_order_of_parameters_is_that_of_the_real_class(model_type: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    small = {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 12, "num_attention_heads": 2,
        "num_key_value_heads": 1, "vocab_size": 32, "n_embd": 16, "n_layer": 12, "n_head": 2, "ffn_dim": 24,
        "word_embed_proj_dim": 8, "head_dim": 8, "pad_token_id": 0, "is_decoder": True,
    }  # fmt: skip
    config = AutoConfig.for_model(model_type, **small)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    names = [name for name, _ in model.named_parameters()]
    assert in_model_order(sorted(names), {"model_type": model_type}) == names


@pytest.mark.frameworks
def test_files_are_those_that_transformers_and_the_hub_write(
    data: Path, tmp_path: Path, read: Any, lay_down: Any
) -> None:
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(data / "sharded").save_pretrained(tmp_path / "theirs")
    checkpoint, _ = read(data / "trainer")
    lay_down(hf.write(checkpoint, WriteOptions()), tmp_path / "ours")
    assert (tmp_path / "ours/model.safetensors").read_bytes() == (tmp_path / "theirs/model.safetensors").read_bytes()
    lay_down(hf.write(checkpoint, WriteOptions(max_shard_bytes=9_000)), tmp_path / "shards")
    ours = json.loads((tmp_path / "shards/model.safetensors.index.json").read_text())
    loaded = load_file(tmp_path / "ours/model.safetensors")
    ordered = {name: loaded[name] for name in checkpoint.weights if name in loaded}
    theirs = split_torch_state_dict_into_shards(
        ordered, filename_pattern="model{suffix}.safetensors", max_shard_size=9_000
    )
    assert ours["weight_map"] == theirs.tensor_to_filename
    assert ours["metadata"]["total_size"] == theirs.metadata["total_size"]


TINY = {
    "vocab_size": 32, "hidden_size": 16, "d_model": 16, "intermediate_size": 24, "d_ff": 24, "num_hidden_layers": 1,
    "num_layers": 1, "encoder_layers": 1, "decoder_layers": 1, "num_attention_heads": 2, "num_heads": 2, "n_head": 2,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "num_key_value_heads": 1, "n_embd": 16, "n_layer": 1,
    "n_layers": 1, "n_heads": 2, "dim": 16, "hidden_dim": 24, "embedding_size": 16, "ffn_dim": 24, "d_kv": 8,
    "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "word_embed_proj_dim": 16, "head_dim": 8, "pad_token_id": 0,
    "state_size": 4, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "max_target_positions": 8,
}  # fmt: skip


@pytest.mark.frameworks
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("GPT2LMHeadModel", {}),
        ("LlamaForCausalLM", {"tie_word_embeddings": True}),
        ("LlamaForCausalLM", {"tie_word_embeddings": False}),
        ("GemmaForCausalLM", {}),
        ("BloomForCausalLM", {}),
        ("OPTForCausalLM", {}),
        ("MambaForCausalLM", {}),
        ("T5ForConditionalGeneration", {}),
        ("T5ForConditionalGeneration", {"tie_word_embeddings": False}),
        ("T5EncoderModel", {}),
        ("BartForConditionalGeneration", {}),
        ("WhisperForConditionalGeneration", {}),
        ("BertForMaskedLM", {}),
        ("BertModel", {}),
        ("RobertaForMaskedLM", {}),
        ("DistilBertForMaskedLM", {}),
        ("AlbertForMaskedLM", {}),
        ("ElectraForMaskedLM", {}),
        ("XLNetLMHeadModel", {}),
    ],
)
def test_every_name_of_the_live_model_is_there_tied_ones_too(
    name: str, options: dict[str, Any], tmp_path: Path, read: Any, lay_down: Any
) -> None:
    import torch
    import transformers

    model_class = getattr(transformers, name)
    torch.manual_seed(1)
    model = model_class(model_class.config_class(**{**TINY, **options}))
    model.save_pretrained(tmp_path / "theirs")
    checkpoint, report = read(tmp_path / "theirs")
    assert not report.errors
    live = {n: t for n, t in model.state_dict().items() if not n.endswith("position_ids")}
    assert set(checkpoint.weights) == set(live)
    for tensor_name, tensor in live.items():
        assert np.array_equal(checkpoint.weights[tensor_name].numpy(), tensor.numpy()), tensor_name
    lay_down(hf.write(checkpoint, WriteOptions()), tmp_path / "ours")
    again, info = model_class.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert all(torch.equal(tensor, live[n]) for n, tensor in again.state_dict().items() if n in live)
