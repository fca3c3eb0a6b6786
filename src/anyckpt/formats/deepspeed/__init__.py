"""DeepSpeed checkpoints: ZeRO stages 0 to 3, BF16_Optimizer, pipelines, experts; versions 0.3.17 to 0.19.

The folder map is in `files`, the flat buffers in `partitions`; Universal checkpoints have a row of their own
(`universal`). DeepSpeed stands inside of other folders as well: HF Trainer's `checkpoint-N`, accelerate's, Lightning's.
"""

from __future__ import annotations

from dataclasses import replace

from anyckpt.core.checkpoint import Checkpoint
from anyckpt.core.layout import FileLayout
from anyckpt.finding import Report
from anyckpt.formats.deepspeed.files import chosen_step, is_step, is_universal, steps_in, unfinished
from anyckpt.formats.table import WriteOptions
from anyckpt.io.place import Place


def matches(place: Place) -> bool:
    """A saved step, or a folder with one directly inside."""
    return is_step(place) or bool(steps_in(place))


def read(place: Place, report: Report) -> Checkpoint:
    """Describe the step that `latest` names, or that this folder is. Raises CheckpointError for a bad `latest`."""
    folder, tag = chosen_step(place, report)
    unfinished(place, report)
    if is_universal(folder):
        from anyckpt.formats.deepspeed.universal import read_universal

        checkpoint = read_universal(folder, report)
    else:
        from anyckpt.formats.deepspeed.step import read_step

        checkpoint = read_step(folder, report)
    from anyckpt.formats.deepspeed.around import with_surroundings

    checkpoint = with_surroundings(place, folder, checkpoint, report)
    return replace(checkpoint, path=str(place.path), facts={**checkpoint.facts, "tag": tag})


def write(checkpoint: Checkpoint, options: WriteOptions) -> list[FileLayout]:
    """ZeRO for the ranks and stage of `options.topology`, the source's where it names none; see `write_zero`."""
    from anyckpt.formats.deepspeed import write_zero

    return write_zero.write(checkpoint, options)
