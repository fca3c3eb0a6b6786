r"""GGUF: one header of metadata and tensor infos, then the tensors; in one file or split over several.

    0   "GGUF"
    4   u32 version (3; 1 and 2 are read; byte-swapped in a big-endian file)
    8   u64 number of tensors, u64 number of metadata values        u32 both in version 1
    …   per value:   string key, u32 kind, the value                 `kv.py`
    …   per tensor:  string name, u32 n, u64 sizes[n] fastest axis first, u32 ggml type, u64 offset
    …   zeros up to a multiple of general.alignment (32 where it is missing)
    …   data: each tensor at its offset from here, zeros up to the alignment after every one, the last one too

Strings are u64 length (u32 in version 1) and UTF-8. A set of files is named PREFIX-00001-of-00003.gguf; each is whole
in itself and carries split.no, split.count and split.tensors.count; all other metadata is in the first.

    kv        metadata values              header    reading one header          split     sets of files
    order     big-endian data              template  chat templates              check     scales of blocks
    write     files to be
    hparams   config.json -> keys          vocab     tokenizer -> keys           mixture   which tensor gets which type
    config    keys -> config.json          tokens    keys -> tokenizer.json      legacy    what came before GGUF

Facts from llama.cpp builds 11434 and 11739 and gguf-py 0.19; the C reader's limits are kept where a file is judged.
"""

from __future__ import annotations

from anyckpt.core.checkpoint import Checkpoint
from anyckpt.core.source import File
from anyckpt.finding import Report
from anyckpt.formats.gguf.check import verify
from anyckpt.formats.gguf.describe import describe
from anyckpt.formats.gguf.header import MAGIC
from anyckpt.formats.gguf.split import read_one, read_set
from anyckpt.formats.gguf.write import write

__all__ = ["describe", "matches", "read", "read_set", "verify", "write"]


def matches(file: File, head: bytes) -> bool:
    """Whether the four letters stand at the start; endings say nothing, caches name files by their digest."""
    return head[:4] == MAGIC


def read(file: File, report: Report) -> Checkpoint:
    """Read a file by itself; of a set, `read_set` finds the others."""
    return read_one(file, report)
