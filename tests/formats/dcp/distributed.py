"""Real training with torch.distributed on the CPU, as a script: it saves checkpoints of every layout, and resumes.

    python distributed.py WORLD ACTIONS.json OUT.json

ACTIONS is a list of {"do": "save" | "resume", "kind": …, "path": …}; OUT gets, for each, the losses it saw. Every rank
sees the same batches, so the losses are those of one process up to the order of sums.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

N_BEFORE, N_AFTER, VOCABULARY = 2, 3, 13


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 7)
        self.down = nn.Linear(7, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Sizes that no world divides, a scalar buffer, a tied-free head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 6)
        self.scale = nn.Parameter(torch.full((5, 6), 0.5))
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(6, VOCABULARY)
        self.register_buffer("gain", torch.tensor(0.75))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + self.scale[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.gain


def train(model: nn.Module, optimizer: Any, first: int, n: int) -> list[float]:
    losses = []
    for step in range(first, first + n):
        ids = torch.randint(0, VOCABULARY, (4, 6), generator=torch.Generator().manual_seed(step))
        out = model(ids[:, :5])
        loss = nn.functional.cross_entropy(out.reshape(-1, VOCABULARY), ids[:, 1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def fresh(seed: int = 7) -> Net:
    torch.manual_seed(seed)
    return Net()


def adamw(model: nn.Module) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.05)


def fsdp2(model: Net, world: int) -> Net:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def fsdp1(model: Net, use_orig_params: bool) -> Any:
    return FullyShardedDataParallel(
        model, auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=use_orig_params,
        device_id=torch.device("cpu"),
    )  # fmt: skip


def save_fsdp2(model: Any, optimizer: Any, path: Path, **how: Any) -> None:
    weights, state = get_state_dict(model, optimizer, options=StateDictOptions(**how))
    dcp.save({"model": weights, "optim": state, "step": N_BEFORE}, checkpoint_id=str(path))


def save_rank_files(model: Any, optimizer: Any, path: Path) -> None:
    path.mkdir(parents=True, exist_ok=True)
    rank = dist.get_rank()
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": N_BEFORE}
    torch.save(saved, path / f"rank{rank}.pt")


def save_fsdp1(model: Any, optimizer: Any, path: Path, kind: StateDictType) -> None:
    config = (FullStateDictConfig(), FullOptimStateDictConfig(offload_to_cpu=False))
    context = FullyShardedDataParallel.state_dict_type(model, kind, *(config if "FULL" in kind.name else ()))
    if "LOCAL" in kind.name:
        with context:
            save_rank_files(model, optimizer, path)
        return
    with context:
        weights = model.state_dict()
        state = FullyShardedDataParallel.optim_state_dict(model, optimizer)
    if "SHARDED" in kind.name:
        dcp.save({"model": weights, "optim": state, "step": N_BEFORE}, checkpoint_id=str(path))
    elif dist.get_rank() == 0:
        torch.save({"model": weights, "optimizer": state, "step": N_BEFORE}, path)


def save_ddp(model: Any, optimizer: Any, path: Path) -> None:
    if dist.get_rank() == 0:
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": N_BEFORE}
        torch.save(saved, path)


Kind = tuple[Callable[[int], Any], Callable[[Any, Any, Path], None]]
KINDS: dict[str, Kind] = {
    "fsdp2": (lambda world: fsdp2(fresh(), world), save_fsdp2),
    "fsdp2_flat": (
        lambda world: fsdp2(fresh(), world),
        lambda m, o, p: save_fsdp2(m, o, p, flatten_optimizer_state_dict=True),
    ),
    "fsdp2_ranks": (lambda world: fsdp2(fresh(), world), save_rank_files),
    "fsdp1_full": (lambda _: fsdp1(fresh(), True), lambda m, o, p: save_fsdp1(m, o, p, StateDictType.FULL_STATE_DICT)),
    "fsdp1_sharded": (
        lambda _: fsdp1(fresh(), True),
        lambda m, o, p: save_fsdp1(m, o, p, StateDictType.SHARDED_STATE_DICT),
    ),
    "fsdp1_local": (
        lambda _: fsdp1(fresh(), False),
        lambda m, o, p: save_fsdp1(m, o, p, StateDictType.LOCAL_STATE_DICT),
    ),
    "fsdp1_local_orig": (
        lambda _: fsdp1(fresh(), True),
        lambda m, o, p: save_fsdp1(m, o, p, StateDictType.LOCAL_STATE_DICT),
    ),
    "ddp": (lambda _: nn.parallel.DistributedDataParallel(fresh()), save_ddp),
}


def save(kind: str, path: Path, world: int) -> list[float]:
    """Train, save, and go on: the losses after the save."""
    build, write = KINDS[kind]
    model = build(world)
    optimizer = adamw(model)
    train(model, optimizer, 0, N_BEFORE)
    write(model, optimizer, path)
    return train(model, optimizer, N_BEFORE, N_AFTER)


def resume(kind: str, path: Path, world: int) -> list[float]:
    """Another model, filled from the checkpoint: the losses from there on."""
    model: Any = fresh(seed=99)
    if kind == "plain":
        optimizer = adamw(model)
        saved = torch.load(path, weights_only=True)
        model.load_state_dict({name.removeprefix("module."): t for name, t in saved["model"].items()})
        optimizer.load_state_dict(next(saved[key] for key in ("optimizer", "optim") if key in saved))
        return train(model, optimizer, N_BEFORE, N_AFTER)
    model = fsdp2(model, world)
    optimizer = adamw(model)
    weights, state = get_state_dict(model, optimizer)
    key = "optim" if kind == "fsdp2" else "optimizer"
    asked = {"model": weights, key: state}
    dcp.load(asked, checkpoint_id=str(path))
    set_state_dict(model, optimizer, model_state_dict=asked["model"], optim_state_dict=asked[key])
    return train(model, optimizer, N_BEFORE, N_AFTER)


def worker(rank: int, world: int, actions: list[dict[str, str]], out: str, port: int) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    dist.init_process_group("gloo", rank=rank, world_size=world)
    run = {"save": save, "resume": resume}
    losses = []
    for action in actions:
        losses.append(run[action["do"]](action["kind"], Path(action["path"]), world))
        dist.barrier()
    if rank == 0:
        Path(out).write_text(json.dumps(losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    n_ranks, todo, result, tcp_port = int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
    mp.spawn(worker, (n_ranks, json.loads(Path(todo).read_text()), result, tcp_port), nprocs=n_ranks)
