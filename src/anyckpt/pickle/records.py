"""Classes of torch and the training frameworks that hold plain data: instances are kept as they are, and are harmless.

Each is a dataclass, a named tuple, an enum or a class of plain attributes whose construction and `__setstate__` do
nothing but keep what they are given. Sources: torch 2.13, DeepSpeed 0.19, Megatron-LM core 0.10 to 0.14, and every
checkpoint of the corpus.
"""

from __future__ import annotations

from typing import Any

from anyckpt.finding import fail
from anyckpt.pickle.call import Call, Row, record
from anyckpt.pickle.storage import sketch

_RECORDS: dict[str, str] = {
    "torch.distributed.checkpoint.metadata.": """
        BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex StorageMeta TensorProperties
        TensorStorageMetadata
    """,
    "torch.distributed.checkpoint.filesystem.": "_StorageInfo _StoragePrefix",
    "torch.distributed.checkpoint.planner.": """
        SavePlan LoadPlan TensorWriteData WriteItem ReadItem BytesIOWriteData
    """,
    "torch.distributed.checkpoint._fsspec_filesystem.": "_StorageInfo",
    "torch.distributed._shard.metadata.": "ShardMetadata",
    "torch.distributed._shard.sharded_tensor.metadata.": "ShardedTensorMetadata TensorProperties",
    "torch.distributed._shard.sharded_tensor.shard.": "Shard",
    "torch.distributed._shard.sharded_tensor.api.": "ShardedTensor ShardedTensor.ProcessGroupState",
    "torch.distributed._shard.sharded_tensor.": "ShardedTensor ShardedTensor.ProcessGroupState",
    "torch.distributed._shard.sharding_spec.chunk_sharding_spec.": "ChunkShardingSpec",
    "torch.distributed._shard.sharding_spec.api.": "EnumerableShardingSpec DevicePlacementSpec",
    "torch.distributed.remote_device.": "_remote_device",
    "torch.distributed.device_mesh.": "DeviceMesh",
    "torch.distributed._mesh_layout.": "_FlatLayout _MeshLayout",
    "torch.distributed.tensor.": "DTensor",
    "torch.distributed._tensor.api.": "DTensor",
    "torch.distributed.tensor._api.": "DTensor",
    "torch.distributed.tensor._dtensor_spec.": "DTensorSpec ShardOrderEntry TensorMeta",
    "torch.distributed._tensor._dtensor_spec.": "DTensorSpec TensorMeta",
    "torch.distributed._tensor.placement_types.": """
        DTensorSpec TensorMeta Shard Replicate Partial _Partial _StridedShard
    """,
    "torch.distributed.tensor.placement_types.": "Shard Replicate Partial _StridedShard",
    "torch.nested._internal.nested_tensor.": "NestedTensor",
    "torch._dynamo.decorators.": "_DimRange",
    "torch.torch_version.": "TorchVersion",
    "deepspeed.runtime.fp16.loss_scaler.": "LossScaler DynamicLossScaler LossScalerBase",
    "deepspeed.utils.tensor_fragment.": "fragment_address tensor_fragment",
    "deepspeed.checkpoint.universal_checkpoint.": "SubparamShape",
    "deepspeed.checkpoint.": "SubparamShape",
}

_ENUMS: dict[str, str] = {
    "torch.distributed.checkpoint.metadata.": "_MEM_FORMAT_ENCODING",
    "torch.distributed.checkpoint.planner.": "WriteItemType LoadItemType",
    "torch.distributed._shard.sharded_tensor.metadata.": "MEM_FORMAT_ENCODING",
    "deepspeed.runtime.zero.config.": "ZeroStageEnum",
    "deepspeed.runtime.zero.offload_config.": "OffloadDeviceEnum",
    "megatron.core.enums.": "ModelType Fp8Recipe Fp4Recipe",
    "megatron.model.enums.": "ModelType",
    "megatron.core.transformer.enums.": "AttnBackend AttnMaskType AttnType LayerType CudaGraphScope",
    "megatron.core.rerun_state_machine.": "RerunDiagnostic RerunMode RerunState",
    "signal.": "Signals",
    "torch.distributed.fsdp.api.": "ShardingStrategy StateDictType BackwardPrefetch",
    "torch.distributed.fsdp._common_utils.": "TrainingState HandleTrainingState",
}


def _enum(call: Call) -> Any:
    """A member of an enum is written as the call of its class with its value."""
    if len(call.args) == 1 and type(call.args[0]) in (int, str, tuple) and not call.kwargs:
        return call.opaque()
    raise fail("malformed-pickle", f"the enum {call.function} is called with {sketch(call.args)}")


ROWS: dict[str, Row] = {
    **{module + name: Row(record) for module, names in _RECORDS.items() for name in names.split()},
    **{module + name: Row(_enum) for module, names in _ENUMS.items() for name in names.split()},
}
