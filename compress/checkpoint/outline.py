"""Outline: a model without its weights, which is all that planning needs of one.

That of a checkpoint is read from its headers; that of one which a pass will write follows from its
layout, so passes are planned on results of each other before the first byte is written.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from compress.arch.describe import describe
from compress.arch.spec import DecoderSpec
from compress.checkpoint.reader import Checkpoint
from compress.checkpoint.shards.header import TensorInfo, count_params, main_dtype
from compress.checkpoint.shards.layout import Entry, ShardLayout, plan_shards


@dataclass(frozen=True, slots=True, eq=False)
class Outline:
    """config: config.json. tensors: name -> TensorInfo, in file order. file_bytes: of the weight
    files, headers included. checkpoint: what it is of; None for one that is yet to be written."""

    config: Mapping[str, Any]
    spec: DecoderSpec
    tensors: Mapping[str, TensorInfo]
    file_bytes: int
    checkpoint: Checkpoint | None = None

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: info.shape for name, info in self.tensors.items()}

    @property
    def entries(self) -> list[Entry]:
        """Name, dtype code and shape of every tensor, in file order."""
        return [(info.name, info.dtype, info.shape) for info in self.tensors.values()]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, headers left out."""
        return sum(info.nbytes for info in self.tensors.values())

    @property
    def params(self) -> int:
        """Elements of all tensors; of one that has two names, once."""
        return count_params(self.tensors.values())

    @property
    def main_dtype(self) -> str:
        """Dtype code that most of the bytes are stored in."""
        return main_dtype(self.tensors.values())


def outline_of(checkpoint: Checkpoint, spec: DecoderSpec | None = None) -> Outline:
    """Of a checkpoint whose weights are stored as they are; `spec` is derived when not given."""
    found = spec or describe(checkpoint.config, checkpoint.shapes)
    held = checkpoint.tensors
    return Outline(checkpoint.config, found, held, checkpoint.file_bytes, checkpoint)


def outline_from(
    config: Mapping[str, Any], entries: Iterable[Entry], shard_size: int
) -> tuple[Outline, ShardLayout]:
    """Of a checkpoint that is to be written, with its layout; CheckpointError where config and
    shapes do not go together."""
    entries = list(entries)
    layout = plan_shards(entries, shard_size)
    spec = describe(config, {name: shape for name, _, shape in entries})
    return Outline(config, spec, layout.tensors, layout.total_bytes), layout
