#!/usr/bin/env python3
"""Make the files of this folder: a real training run of a small Llama, saved in the ways people save.

    python tests/data/make.py            # needs the extra `frameworks`; writes into the folder it lies in

The run is AdamW with a warm-up schedule on one thread, so that a second run on the same machine gives the same files.
Truth (`truth*.safetensors`, `truth.json`) is taken from the live model and optimizer, never from what was saved.
"""

from __future__ import annotations

import json
import os
import shutil
from argparse import Namespace
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES="", TOKENIZERS_PARALLELISM="false")

import peft
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

HERE = Path(__file__).resolve().parent
STEPS, STEPS_AFTER, BATCH, LENGTH = 40, 3, 8, 24

TEXT = """A checkpoint is a set of named tensors; a tensor is a set of pieces; a piece says where its box is found.
Reading a file means describing it. Writing a file means describing the file to be, and then filling it.
Weights, moments and steps travel together, or the run that goes on is not the run that stopped.
What cannot be proved is not said; what cannot be kept is not dropped in silence."""


def make_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """A byte-level BPE of 96 tokens, learned from TEXT."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<unk>", "<s>", "</s>"]
    tokenizer.train_from_iterator(TEXT.splitlines(), trainers.BpeTrainer(vocab_size=96, special_tokens=special))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", model_max_length=64
    )
    fast.save_pretrained(folder)
    return fast


def batch(tokens: torch.Tensor, step: int) -> torch.Tensor:
    """The rows of one step; they depend on nothing but the step, so a resumed run sees what the first would have."""
    starts = torch.randint(len(tokens) - LENGTH, (BATCH,), generator=torch.Generator().manual_seed(1000 + step))
    return torch.stack([tokens[start : start + LENGTH] for start in starts.tolist()])


def live_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone().contiguous() for name, tensor in model.state_dict().items()}


def live_optimizer(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """`<param>/<slot>` -> tensor, straight from `optimizer.state`, which is keyed by the parameters themselves."""
    return {
        f"{name}/{slot}": torch.as_tensor(value).detach().clone().contiguous()
        for name, parameter in model.named_parameters()
        for slot, value in optimizer.state[parameter].items()
    }


def train(folder: Path) -> LlamaForCausalLM:
    """Write `trainer/` and the truth of it; return the model as it was when it was saved."""
    folder.mkdir()
    tokenizer = make_tokenizer(folder)
    args = Namespace(data=Path("notes.txt"), lr=5e-3, weight_decay=0.1, warmup=5, batch_size=BATCH, seed=7, amp=None)
    torch.manual_seed(args.seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    tokens = torch.tensor(tokenizer(TEXT)["input_ids"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=args.weight_decay)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, WarmUp(args.warmup))

    losses = []
    for step in range(STEPS + STEPS_AFTER):
        if step == STEPS:
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
                "epoch": 3,
                "global_step": step,
                "args": args,
            }
            torch.save(state, folder / "checkpoint.pt")
            save_file(live_tensors(model), HERE / "truth.safetensors")
            save_file(live_optimizer(model, optimizer), HERE / "truth_optim.safetensors")
            saved = live_tensors(model)
            lr = scheduler.get_last_lr()[0]
        rows = batch(tokens, step)
        loss = model(input_ids=rows, labels=rows).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())

    truth = {
        "torch": torch.__version__,
        "step": STEPS,
        "epoch": 3,
        "lr": lr,
        "losses": losses[:STEPS],
        "next_losses": losses[STEPS:],
        "next_rows": [batch(tokens, STEPS + i).tolist() for i in range(STEPS_AFTER)],
        "tied": {"lm_head.weight": "model.embed_tokens.weight"},
        "prompt": "A checkpoint is",
    }
    model.load_state_dict(saved)
    model.eval()
    with torch.no_grad():
        truth["prompt_logits"] = model(**prompt(tokenizer, truth["prompt"])).logits[0, -1].tolist()
    lines = (f" {json.dumps(key)}: {json.dumps(value)}" for key, value in truth.items())
    (HERE / "truth.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return model


class WarmUp:
    """A schedule as an object, so that its state is saved: `scheduler.lr_lambdas` holds a dict, not None."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def __call__(self, step: int) -> float:
        return min(1.0, (step + 1) / self.steps)


def prompt(tokenizer: PreTrainedTokenizerFast, text: str) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.tensor([tokenizer(text)["input_ids"]])}


def save_bin_folder(model: LlamaForCausalLM, source: Path, folder: Path) -> None:
    """The older Hugging Face folder: pickles, tied weights in both places, here in bfloat16."""
    folder.mkdir()
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in live_tensors(model).items()}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    split = split_torch_state_dict_into_shards(
        tensors, filename_pattern="pytorch_model{suffix}.bin", max_shard_size=8_000
    )
    for name, members in split.filename_to_tensors.items():
        torch.save({member: tensors[member] for member in members}, folder / name)
    weight_map = dict(split.tensor_to_filename)
    weight_map.setdefault("lm_head.weight", weight_map["model.embed_tokens.weight"])
    index = {"metadata": split.metadata, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index, indent=2) + "\n")
    config = json.loads((source / "config.json").read_text()) | {"dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def train_adapter(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """A LoRA whose base is `../sharded`, trained for ten steps so that both of its factors are non-zero."""
    folder.mkdir()
    os.chdir(folder)
    torch.manual_seed(11)
    base = AutoModelForCausalLM.from_pretrained("../sharded")
    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(base, config)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-2)
    tokens = torch.tensor(tokenizer(TEXT)["input_ids"])
    for step in range(10):
        rows = batch(tokens, 500 + step)
        loss = model(input_ids=rows, labels=rows).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(".")
    Path("README.md").unlink(missing_ok=True)
    merged = model.merge_and_unload()
    changed = {n: t for n, t in live_tensors(merged).items() if ".q_proj." in n or ".v_proj." in n}
    save_file(changed, HERE / "truth_merged.safetensors")


def main() -> None:
    torch.set_num_threads(1)
    os.chdir(HERE)
    for name in ("trainer", "sharded", "bin", "adapter"):
        shutil.rmtree(name, ignore_errors=True)
    model = train(HERE / "trainer")
    torch.save(model.state_dict(), "legacy.pth", _use_new_zipfile_serialization=False)
    model.save_pretrained("sharded", max_shard_size=12_500)
    tokenizer = PreTrainedTokenizerFast.from_pretrained("trainer")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path("trainer") / name, "sharded")
    save_bin_folder(model, HERE / "trainer", HERE / "bin")
    train_adapter(tokenizer, HERE / "adapter")
    for path in HERE.rglob("*.safetensors"):
        path.chmod(0o644)


if __name__ == "__main__":
    main()
