"""The judge: real DeepSpeed training a small model on CPUs over gloo. Run as a program, one process a rank:

    python judge.py WORLD jobs.json results.json

Every job trains the same model on the same batches, whatever the number of ranks. `save` trains STEPS steps, saves, and
goes on for three; `resume` loads and goes on for three. Both report the three losses, and the masters and moments that
are live right after the save or load, as a digest of all their bytes.

The model has what goes wrong elsewhere: sizes that no number of ranks divides, tied weights, a frozen part, two
parameter groups, buffers of two types.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import sys
import traceback
from pathlib import Path
from typing import Any

STEPS, VOCABULARY, LENGTH, BATCH, WIDTH, INNER = 3, 37, 7, 6, 10, 13
GROUPS = ({"weight_decay": 0.1}, {"weight_decay": 0.0})
ADAMW = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8}


def build_model(seed: int = 7) -> Any:
    """A language model of about 2,000 parameters."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

        def forward(self, x: Any) -> Any:
            return x + self.down(nn.functional.gelu(self.up(self.norm(x))))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(VOCABULARY, WIDTH)
            self.blocks = nn.ModuleList([Block(), Block()])
            self.norm = nn.LayerNorm(WIDTH)
            self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
            self.head.weight = self.embed.weight
            self.register_buffer("scale", torch.full((1,), 0.125))
            self.register_buffer("version", torch.tensor([7, 11]))
            self.blocks[0].up.requires_grad_(False)

        def forward(self, tokens: Any) -> Any:
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x)) * self.scale.to(x.dtype)

    torch.manual_seed(seed)
    return Model()


def build_optimizer(model: Any, **options: Any) -> Any:
    """AdamW with decay for matrices only."""
    import torch

    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    groups = [
        {**GROUPS[0], "params": [p for _, p in named if p.dim() > 1]},
        {**GROUPS[1], "params": [p for _, p in named if p.dim() <= 1]},
    ]
    return torch.optim.AdamW(groups, **ADAMW, **options)


def batch(step: int, rank: int, world: int) -> tuple[Any, Any]:
    """Rank's share of the batch of one step."""
    import torch

    tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1000 + step))
    n = BATCH // world
    own = tokens[rank * n : (rank + 1) * n]
    return own[:, :-1].contiguous(), own[:, 1:].contiguous()


def loss_of(logits: Any, targets: Any) -> Any:
    """Mean cross entropy."""
    from torch.nn.functional import cross_entropy

    return cross_entropy(logits.float().reshape(-1, VOCABULARY), targets.reshape(-1))


def config(job: dict[str, Any], world: int) -> dict[str, Any]:
    """The DeepSpeed config of a job."""
    out: dict[str, Any] = {
        "train_batch_size": BATCH, "train_micro_batch_size_per_gpu": BATCH // world, "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": job["stage"], **job.get("zero", {})},
    }
    if job.get("scheduler", True):
        parameters = {"warmup_min_lr": 0.001, "warmup_max_lr": 0.01, "warmup_num_steps": 10}
        out["scheduler"] = {"type": "WarmupLR", "params": parameters}
    if job["dtype"] == "bf16":
        out["bf16"] = {"enabled": True}
    if job.get("universal"):
        out["checkpoint"] = {"load_universal": True}
    return out


def live_state(engine: Any) -> dict[str, Any]:
    """Masters and moments that are live, as `parameter/slot`: from the buffers themselves, by address."""
    import torch
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
    from torch import distributed

    optimizer = engine.optimizer
    by_id = {id(p): (n, p) for n, p in engine.module.named_parameters() if p.requires_grad}
    out: dict[str, Any] = {}
    if not hasattr(optimizer, "bit16_groups"):
        for name, parameter in by_id.values():
            out[f"{name}/master"] = safe_get_full_fp32_param(parameter)
            for slot in ("exp_avg", "exp_avg_sq"):
                out[f"{name}/{slot}"] = safe_get_full_optimizer_state(parameter, slot)
    else:
        for group, flat, part in zip(
            optimizer.bit16_groups, optimizer.bit16_groups_flat, optimizer.single_partition_of_fp32_groups, strict=True
        ):
            state = optimizer.optimizer.state[part]
            for slot, value in (("master", part), ("exp_avg", state["exp_avg"]), ("exp_avg_sq", state["exp_avg_sq"])):
                parts = [torch.empty_like(part.data) for _ in range(distributed.get_world_size())]
                distributed.all_gather(parts, value.data.contiguous())
                whole = torch.cat(parts)
                for parameter in group:
                    at = (parameter.data_ptr() - flat.data_ptr()) // parameter.element_size()
                    own = whole[at : at + parameter.numel()].view(parameter.shape)
                    out[f"{by_id[id(parameter)][0]}/{slot}"] = own
    return {name: value.detach().float().clone().contiguous() for name, value in sorted(out.items())}


def live_weights(engine: Any) -> dict[str, Any]:
    """The module's own weights, gathered; a tied name once more under its other name."""
    import deepspeed

    module = engine.module
    out = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            out[name] = parameter.detach().clone().contiguous()
    return out


def digest(state: dict[str, Any]) -> str:
    """SHA-256 of all the bytes of a state, by name."""
    found = hashlib.sha256()
    for name, value in state.items():
        found.update(name.encode() + value.numpy().tobytes())
    return found.hexdigest()


def one_job(job: dict[str, Any], rank: int, world: int) -> dict[str, Any]:
    """Train or resume, on this rank."""
    import deepspeed
    import torch
    from torch import distributed

    model = build_model(job.get("seed", 7 if job["do"] == "save" else 99))
    engine, *_ = deepspeed.initialize(model=model, optimizer=build_optimizer(model), config=config(job, world))

    def step(number: int) -> float:
        inputs, targets = batch(number, rank, world)
        loss = loss_of(engine(inputs), targets)
        shown = loss.detach().clone()
        engine.backward(loss)
        engine.step()
        distributed.all_reduce(shown)
        return float(shown) / world

    out: dict[str, Any] = {}
    if job["do"] == "save":
        for number in range(STEPS):
            step(number)
        engine.save_checkpoint(job["path"], client_state={"note": "client", "tokens": 12})
    else:
        path, client = engine.load_checkpoint(job["path"])
        out["loaded"], out["note"] = bool(path), (client or {}).get("note")
    state = live_state(engine)
    out["digest"] = digest(state)
    if job.get("truth"):
        from safetensors.torch import save_file

        weights = live_weights(engine)
        if rank == 0:
            save_file(weights, job["truth"] + ".safetensors")
            save_file(state, job["truth"] + "_optim.safetensors")
    out["groups"] = [g["weight_decay"] for g in engine.optimizer.param_groups]
    frozen = engine.module.blocks[0].up.weight
    with deepspeed.zero.GatheredParameters([frozen], enabled=hasattr(frozen, "ds_id")):
        out["frozen"] = hashlib.sha256(frozen.detach().float().contiguous().numpy().tobytes()).hexdigest()
    out["buffers"] = [engine.module.scale.float().tolist(), engine.module.version.tolist()]
    out["losses"] = [step(STEPS + i) for i in range(3)]
    out["step"] = engine.global_steps
    torch.manual_seed(0)
    return out


def rank_main(jobs: list[dict[str, Any]], rank: int, world: int, port: int, results: str) -> None:
    """All jobs on one rank; rank 0 writes what came of them."""
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }
    import deepspeed
    from torch import distributed

    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    found = []
    for job in jobs:
        try:
            found.append(one_job(job, rank, world))
        except Exception:
            found.append({"error": traceback.format_exc()[-2000:]})
            if world > 1:
                break  # the other ranks may wait for this one
    if rank == 0:
        Path(results).write_text(json.dumps(found))
    if not any("error" in one for one in found):
        distributed.barrier()


def main() -> int:
    """Fork the ranks, so that torch and DeepSpeed are imported once."""
    world, jobs, results = int(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text()), sys.argv[3]
    import socket

    import deepspeed
    import torch

    torch.set_num_threads(1)
    for name in list(deepspeed.ops.__compatible_ops__):  # nothing is compiled on the way
        deepspeed.ops.__compatible_ops__[name] = False
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=rank_main, args=(jobs, r, world, port, results)) for r in range(world)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(240)
    for process in ranks:
        if process.is_alive():
            process.kill()
    return 0 if Path(results).exists() else 1


if __name__ == "__main__":
    sys.exit(main())
