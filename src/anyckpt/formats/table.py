"""The table of formats. A new format is one module and one row here; other packages add rows by an entry point.

A module named by a row has, for a file format,

    matches(file: File, head: bytes) -> bool          cheap: looks at names and headers only
    read(file: File, report: Report) -> Checkpoint    reports what is wrong; raises CheckpointError where it can't go on

and for a folder format the same two with a `place: Place` instead: `matches(place)`, `read(place, report)`.
Either may have

    verify(file_or_place, checkpoint, report) -> None         what only a deep pass can check (CRCs), beyond values
    write(checkpoint, options: WriteOptions) -> list[FileLayout]     the files to be, sizes and all
    describe(checkpoint) -> list[tuple[str, str]]     (label, text) rows that `inspect` shows of this format alone
    fit(checkpoint, options) -> Checkpoint                    before `write`: what the files will read as (padding …)
    read_like(file_or_place, report, like: Checkpoint) -> Checkpoint as `read`, with a reference for names and shapes
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from types import MappingProxyType, ModuleType
from typing import Any, Literal

from anyckpt.core.topology import Topology
from anyckpt.errors import MissingDependency, UsageError


@dataclass(frozen=True, slots=True)
class Format:
    """One row. A path is a candidate where any of `magic` stands at its offset, or any of `members` (globs of relative
    names) is in the folder; `module.matches` then decides. Rows are tried in the order of the table.

    `writes`: "file", "folder" or "" for read-only; `endings` are the names its files usually have, and say which
    destination names mean this format. `by_name`: a file of such a name that nothing recognises is read by this row all
    the same, because its reader knows what is wrong with it.
    `training`: whether it carries optimizer state, read and written. `official` is the framework's own way to make it.
    `siblings`: its files come in sets that lie side by side; the module then has `read_set(place, report)` too.
    """

    name: str
    module: str
    title: str
    kind: Literal["file", "folder"]
    magic: tuple[tuple[int, bytes], ...] = ()
    members: tuple[str, ...] = ()
    writes: Literal["", "file", "folder"] = ""
    endings: tuple[str, ...] = ()
    by_name: bool = False
    training: bool = False
    needs: str = ""
    official: str = ""
    siblings: bool = False

    def load(self) -> ModuleType:
        """Import the module. Raises MissingDependency with the row's install sentence."""
        try:
            return import_module(self.module)
        except ImportError as error:
            if not self.needs:
                raise
            raise MissingDependency(f"{self.title} needs another package: {self.needs}") from error


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """What a writer may be asked for. Sizes in bytes; `destination` is the final path's name, for titles only.

    `tied`: "keep" writes what the format's own framework would, "drop" leaves aliases out, "clone" writes every name.
    `extra` carries options that belong to one format.
    """

    destination: str = ""
    max_shard_bytes: int = 5_000_000_000
    tied: Literal["keep", "drop", "clone"] = "keep"
    topology: Topology | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


ZIP = ((0, b"PK\x03\x04"),)
PICKLE = tuple((0, bytes([0x80, protocol])) for protocol in (2, 3, 4, 5))
TORCH_STREAM = (*PICKLE, (0, b"L119547037146038801333356L"))  # the last: torch's magic number in protocols 0 and 1

TORCH_NAMES = (".pt", ".pth", ".bin", ".ckpt")

ROWS: tuple[Format, ...] = (
    Format("safetensors", "anyckpt.formats.safetensors", "safetensors", "file", magic=((8, b"{"), (8, b" ")),
           writes="file", endings=(".safetensors",), by_name=True,
           official="safetensors.torch.save_file(model.state_dict(), path)"),
    Format("gguf", "anyckpt.formats.gguf", "GGUF (llama.cpp)", "file", magic=((0, b"GGUF"),), writes="file",
           endings=(".gguf",), by_name=True, siblings=True, official="convert_hf_to_gguf.py FOLDER"),
    Format("ggml", "anyckpt.formats.gguf.legacy", "GGML, GGMF, GGJT (before GGUF)", "file",
           magic=tuple((0, mark) for mark in (b"lmgg", b"fmgg", b"tjgg", b"algg")),
           endings=(".bin", ".ggml"), siblings=True),
    Format("torch-export", "anyckpt.formats.torch.export", "torch.export archive (.pt2)", "file", magic=ZIP,
           endings=(".pt2", *TORCH_NAMES)),
    Format("torchscript", "anyckpt.formats.torch.script", "TorchScript archive", "file", magic=ZIP,
           endings=TORCH_NAMES),
    Format("torch", "anyckpt.formats.torch.zip", "PyTorch (torch.save)", "file", magic=ZIP, writes="file",
           endings=TORCH_NAMES, training=True, official="torch.save(model.state_dict(), path)"),
    Format("lightning", "anyckpt.formats.lightning_write", "Lightning .ckpt (read as torch)", "file", magic=ZIP,
           writes="file", endings=(".ckpt",), training=True, official="trainer.save_checkpoint(path)"),
    Format("npz", "anyckpt.formats.numpy.npz", "numpy .npz", "file", magic=ZIP, endings=(".npz",)),
    Format("npy", "anyckpt.formats.numpy.npy", "numpy .npy", "file", magic=((0, b"\x93NUMPY"),), endings=(".npy",)),
    Format("nemo", "anyckpt.formats.nemo", "NeMo 1 (.nemo)", "file", magic=((257, b"ustar"), (0, b"\x1f\x8b")),
           endings=(".nemo",)),
    Format("torch-tar", "anyckpt.formats.torch.tar", "PyTorch tar (2016)", "file", magic=((257, b"ustar"),),
           endings=TORCH_NAMES),
    Format("torch-legacy", "anyckpt.formats.torch.legacy", "PyTorch before 1.6", "file", magic=TORCH_STREAM,
           endings=TORCH_NAMES, training=True),
    Format("pickle", "anyckpt.formats.pickled", "bare pickle", "file", endings=TORCH_NAMES),
    Format("nemo-folder", "anyckpt.formats.nemo.folder", "NeMo folder", "folder",
           members=("model_config.yaml", "context/*")),
    Format("megatron", "anyckpt.formats.megatron", "Megatron-LM (torch)", "folder",
           members=("mp_rank_*/*", "*/mp_rank_*/*", "model_optim_rng.pt"), writes="folder", training=True,
           official="save_checkpoint with --ckpt-format torch"),
    Format("deepspeed-universal", "anyckpt.formats.deepspeed.universal", "DeepSpeed universal", "folder",
           members=("zero/*", "*/zero/*"), writes="folder", training=True,
           official="python -m deepspeed.checkpoint.ds_to_universal"),
    Format("deepspeed", "anyckpt.formats.deepspeed", "DeepSpeed", "folder",
           members=("*_states.pt", "*optim_states.pt", "*/zero/optimizer_state.pt"), writes="folder", training=True,
           official="engine.save_checkpoint(folder)"),
    Format("accelerate", "anyckpt.formats.accelerate", "Accelerate or Trainer folder with FSDP", "folder",
           members=("pytorch_model_fsdp_*",), training=True),
    Format("dcp-hf", "anyckpt.formats.dcp.hf_storage", "safetensors parts of torch.distributed.checkpoint", "folder",
           members=("shard-*-model-*.safetensors",)),
    Format("ranks", "anyckpt.formats.ranks", "one file a rank (FSDP, DTensor, verl)", "folder",
           members=("*rank*.pt", "*rank*.pth", "*rank*.bin", "*rank*.ckpt"), training=True),
    Format("megatron-dist", "anyckpt.formats.megatron.dist", "Megatron-LM (torch_dist)", "folder",
           members=("common.pt", "*/common.pt"), writes="folder", training=True,
           official="save_checkpoint with --ckpt-format torch_dist"),
    Format("megatron-zarr", "anyckpt.formats.megatron.zarr", "Megatron-LM (zarr)", "folder",
           members=("common.pt", "*/common.pt"), training=True),
    Format("lightning-sharded", "anyckpt.formats.lightning", "Lightning or Fabric sharded folder", "folder",
           members=("meta.pt",), training=True),
    Format("dcp", "anyckpt.formats.dcp", "torch.distributed.checkpoint folder", "folder",
           members=(".metadata", "__*.metadata", "__*.distcp"), writes="folder", training=True,
           official="torch.distributed.checkpoint.save(state_dict, checkpoint_id=folder)"),
    Format("peft", "anyckpt.formats.peft", "PEFT adapter", "folder",
           members=("adapter_config.json", "adapter_model.*")),
    Format("hf", "anyckpt.formats.hf", "Hugging Face folder", "folder",
           members=("config.json", "*.safetensors", "*.bin", "*.index.json"), writes="folder",
           official="model.save_pretrained(folder)"),
    Format("gguf-folder", "anyckpt.formats.gguf.folder", "folder of GGUF files", "folder", members=("*.gguf",),
           writes="folder", official="llama-gguf-split --split"),
    Format("folder", "anyckpt.formats.folder", "folder with one checkpoint file", "folder", members=("*",)),
)


BUILT_IN: Mapping[str, Format] = MappingProxyType({row.name: row for row in ROWS})


@cache
def formats() -> Mapping[str, Format]:
    """Every format by name, the built-in rows first, then those of other packages (entry points `anyckpt.formats`)."""
    from importlib.metadata import entry_points  # slow to import, and to ask: only where no built-in row will do

    rows = dict(BUILT_IN)
    for point in entry_points(group="anyckpt.formats"):
        row = point.load()
        rows.setdefault(row.name, row)
    return MappingProxyType(rows)


def in_turn() -> Iterator[Format]:
    """Every format in the order it is tried; other packages are only asked once no built-in row was taken."""
    yield from ROWS
    yield from (row for name, row in formats().items() if name not in BUILT_IN)


def row_named(name: str) -> Format | None:
    """The row of a format, None where there is none of that name."""
    return BUILT_IN.get(name) or formats().get(name)


def writable(name: str) -> Format:
    """The row of a format that can be written. Raises UsageError that lists those that can."""
    row = row_named(name)
    if row is None or not row.writes:
        known = ", ".join(sorted(r.name for r in formats().values() if r.writes))
        raise UsageError(f"no writer for {name!r}; there are: {known}")
    return row


def by_ending(path: str) -> Format | None:
    """The writable format that a destination's name asks for, None where it says nothing."""
    return next((r for r in in_turn() if r.writes and path.lower().endswith(r.endings or ("\0",))), None)
