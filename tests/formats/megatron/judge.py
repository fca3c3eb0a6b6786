"""Megatron-core as the judge, on CPU with gloo: build the model that a checkpoint's args describe, load it, run it.

    python judge.py JOB.json        {"checkpoint", "form", "tp", "pp", "ep", "etp", "dp", "tokens", "steps", "out"}

Loads at the layout of the job, whatever the checkpoint was saved or written at, through `dist_checkpointing.load`
(torch_dist) or `torch.load` and `load_state_dict` (torch). Writes {"logits": of the last stage, "losses": of training
steps with the loaded optimizer} to `out`. Nothing of Megatron is altered but where tensors live: no GPU is needed.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
os.environ["TORCHDYNAMO_DISABLE"] = "1"

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


class OnCpu(TorchFunctionMode):
    """Tensors that Megatron makes on "cuda" are made on the CPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if isinstance(device, int) or (device is not None and str(device).startswith("cuda")):
            kwargs["device"] = CPU
        return function(*args, **kwargs)


def place_on_cpu() -> None:
    torch.cuda.current_device = lambda: CPU  # type: ignore[assignment,return-value]
    for module in (torch.cuda, torch.cuda.random):
        module.get_rng_state = lambda *a, **k: torch.get_rng_state()  # type: ignore[attr-defined]
        module.set_rng_state = lambda state, *a, **k: torch.set_rng_state(state)  # type: ignore[attr-defined]
    torch.cuda.manual_seed = lambda seed: torch.manual_seed(seed)  # type: ignore[assignment,return-value]
    torch.cuda.device_count = lambda: 1
    torch.cuda.default_generators = {CPU: torch.default_generator}  # type: ignore[assignment]
    torch.cuda._lazy_call = lambda function, **k: function()  # type: ignore[assignment]
    torch.cuda.synchronize = lambda *a, **k: None  # type: ignore[assignment]
    torch.Tensor.cuda = lambda self, *a, **k: self  # type: ignore[assignment,method-assign]
    of_type = torch.Tensor.type

    def cuda_type(self: torch.Tensor, *a: Any, **k: Any) -> Any:  # optimizers compare the name of the type
        found = of_type(self, *a, **k)
        return found.replace("torch.", "torch.cuda.") if isinstance(found, str) else found

    torch.Tensor.type = cuda_type  # type: ignore[method-assign,assignment]
    all_reduce = dist.all_reduce

    def averaged(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        if op == dist.ReduceOp.AVG:  # gloo has no average
            all_reduce(tensor, group=group)
            tensor.div_(dist.get_world_size(group))
            return None
        return all_reduce(tensor, op=op, group=group, async_op=async_op)

    dist.all_reduce = averaged
    OnCpu().__enter__()


def run(job: dict[str, Any], rank: int, world: int) -> None:
    place_on_cpu()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    from megatron.core import parallel_state as mpu
    from megatron.core import tensor_parallel
    from megatron.core.safe_globals import register_safe_globals
    from megatron.core.transformer.moe import moe_utils

    moe_utils.te_general_gemm = None  # left undefined where Transformer Engine is not installed
    register_safe_globals()
    mpu.initialize_model_parallel(
        job["tp"], job["pp"], expert_model_parallel_size=job["ep"],
        expert_tensor_parallel_size=job["etp"],
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    root = Path(job["checkpoint"])
    folder = root / f"iter_{int((root / 'latest_checkpointed_iteration.txt').read_text()):07d}" if (
        (root / "latest_checkpointed_iteration.txt").read_text() != "release"
    ) else root / "release"
    args = read_args(folder, job["form"])
    model = build(args, job)
    trained, optimizer = build_optimizer(model, args) if job.get("steps") else (None, None)
    load(folder, job["form"], model, optimizer, args, job)
    tokens = torch.tensor(job["tokens"])
    logits = None if job.get("steps") else forward(model, tokens[:, :-1])  # a trained head's stay on their ranks
    losses = []
    for _ in range(job.get("steps", 0)):
        losses.append(train_step(trained, optimizer, tokens))
    if mpu.is_pipeline_last_stage() and mpu.get_tensor_model_parallel_rank() == 0 and mpu.get_data_parallel_rank() == 0:
        torch.save({"logits": logits, "losses": losses}, job["out"])
    dist.barrier()


def read_args(folder: Path, form: str) -> Any:
    file = folder / "common.pt" if form == "torch_dist" else next(folder.glob("mp_rank_*/model_optim_rng.pt"))
    return torch.load(file, weights_only=True)["args"]


def build(args: Any, job: dict[str, Any]) -> Any:
    from megatron.core import parallel_state as mpu
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    gated = args.swiglu
    dtype = args.params_dtype
    config = TransformerConfig(
        num_layers=args.num_layers, hidden_size=args.hidden_size, num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups if args.group_query_attention else args.num_attention_heads,
        ffn_hidden_size=args.ffn_hidden_size, kv_channels=args.kv_channels, gated_linear_unit=gated,
        activation_func=torch.nn.functional.silu if gated else
        (lambda x: torch.nn.functional.gelu(x, approximate="tanh")) if args.openai_gelu else torch.nn.functional.gelu,
        normalization=args.normalization, layernorm_epsilon=args.layernorm_epsilon,
        add_bias_linear=args.add_bias_linear, add_qkv_bias=args.add_qkv_bias, qk_layernorm=args.qk_layernorm,
        num_moe_experts=args.num_experts, moe_router_topk=getattr(args, "moe_router_topk", 2) or 2,
        moe_ffn_hidden_size=getattr(args, "moe_ffn_hidden_size", None), moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="allgather", moe_router_pre_softmax=getattr(args, "moe_router_pre_softmax", False),
        tensor_model_parallel_size=job["tp"], pipeline_model_parallel_size=job["pp"],
        expert_model_parallel_size=job["ep"], expert_tensor_parallel_size=job["etp"],
        sequence_parallel=False, params_dtype=dtype, pipeline_dtype=dtype, bf16=dtype == torch.bfloat16,
        hidden_dropout=0.0, attention_dropout=0.0, use_cpu_initialization=True, bias_activation_fusion=False,
        bias_dropout_fusion=False, masked_softmax_fusion=False, gradient_accumulation_fusion=False,
        apply_rope_fusion=False, persist_layer_norm=False, perform_initialization=True,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(
        args.num_experts, False, args.qk_layernorm, normalization=args.normalization
    )
    return GPTModel(
        config, spec, args.padded_vocab_size, args.max_position_embeddings,
        pre_process=mpu.is_pipeline_first_stage(), post_process=mpu.is_pipeline_last_stage(),
        parallel_output=bool(job.get("steps")),
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type, rotary_base=int(args.rotary_base or 10000),
        rope_scaling=bool(getattr(args, "use_rope_scaling", False)),
        rope_scaling_factor=getattr(args, "rope_scaling_factor", 8.0) or 8.0,
    ).to(dtype)


def build_optimizer(model: Any, args: Any) -> tuple[Any, Any]:
    """The model as Megatron trains it, and its optimizer."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    config = OptimizerConfig(
        optimizer="adam", lr=1e-2, min_lr=1e-2, weight_decay=0.0, bf16=args.bf16, params_dtype=args.params_dtype,
        clip_grad=0.0, use_distributed_optimizer=False,
    )
    trained = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
    return trained, get_megatron_optimizer(config, [trained])


def load(folder: Path, form: str, model: Any, optimizer: Any, args: Any, job: dict[str, Any]) -> None:
    from megatron.core import dist_checkpointing
    from megatron.core import parallel_state as mpu

    if form == "torch_dist":
        metadata = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True,
                    "dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True)}
        wanted = {"model": model.sharded_state_dict(metadata=metadata)}
        if optimizer is not None:
            wanted["optimizer"] = optimizer.sharded_state_dict(wanted, is_loading=True, metadata=metadata)
        state = dist_checkpointing.load(wanted, str(folder))
    else:
        name = f"mp_rank_{mpu.get_tensor_model_parallel_rank():02d}"
        name += f"_{mpu.get_pipeline_model_parallel_rank():03d}" if job["pp"] > 1 else ""
        name += f"_{mpu.get_expert_model_parallel_rank():03d}" if job["ep"] > 1 else ""
        state = torch.load(folder / name / "model_optim_rng.pt", weights_only=True)
    model.load_state_dict(state["model"])
    if optimizer is not None:
        optimizer.load_state_dict(state["optimizer"])


def forward(model: Any, tokens: torch.Tensor) -> torch.Tensor | None:
    """Logits on the last stage; hidden states go from stage to stage."""
    from megatron.core import parallel_state as mpu

    n, length = tokens.shape
    positions = torch.arange(length).expand(n, length)
    mask = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
    model.eval()  # in training Megatron wants sequence parallelism beside experts
    with torch.no_grad():
        if not mpu.is_pipeline_first_stage():
            hidden = torch.empty(length, n, model.config.hidden_size, dtype=model.config.params_dtype)
            dist.recv(hidden, mpu.get_pipeline_model_parallel_prev_rank())
            model.set_input_tensor(hidden)
        out = model(tokens, positions, mask)
        if not mpu.is_pipeline_last_stage():
            dist.send(out.contiguous(), mpu.get_pipeline_model_parallel_next_rank())
            return None
    return out


def train_step(model: Any, optimizer: Any, tokens: torch.Tensor) -> float:
    """One step on all of `tokens`; the loss before it. Stages are not trained, tensor ranks are."""
    inputs, labels = tokens[:, :-1], tokens[:, 1:].contiguous()
    n, length = inputs.shape
    positions = torch.arange(length).expand(n, length)
    mask = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
    model.zero_grad_buffer()
    optimizer.zero_grad()
    loss = model(inputs, positions, mask, labels=labels).float().mean()
    loss.backward()
    model.finish_grad_sync()
    optimizer.step()
    return float(loss)


def main() -> int:
    job = json.loads(Path(sys.argv[1]).read_text())
    world = job["tp"] * job["pp"] * job["dp"]
    children = []
    for rank in range(world):
        pid = os.fork()
        if not pid:
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(job["port"]), GLOO_SOCKET_IFNAME="lo",
                              RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
            status = 1
            try:
                run(job, rank, world)
                status = 0
            except BaseException:
                traceback.print_exc()
            sys.stderr.flush()
            os._exit(status)
        children.append(pid)
    return max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0 for pid in children)


if __name__ == "__main__":
    sys.exit(main())
