"""Tensors that go from one checkpoint into another as they are, in pieces that fit in memory."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType

import torch

from compress.checkpoint import Checkpoint, ShardWriter
from compress.plan.row_counts import ROWS_AT_ONCE

NONE: Mapping[str, str] = MappingProxyType({})
ONES: Mapping[str, float] = MappingProxyType({})


def copy(
    checkpoint: Checkpoint,
    writer: ShardWriter,
    names: Iterable[str],
    called: Mapping[str, str] = NONE,
    factors: Mapping[str, float] = ONES,
) -> None:
    """Carry tensors over in pieces; NaN or Inf in one is a CheckpointError that names it.

    called: what each is called from now on, where that is another name. factors: what some are
    multiplied by.
    """
    for name in names:
        to, factor = called.get(name, name), factors.get(name, 1.0)
        shape = checkpoint.tensors[name].shape
        if torch.Size(shape).numel() <= ROWS_AT_ONCE:
            whole = checkpoint.read(name, check_finite=True)
            writer.write(to, whole if factor == 1 else whole * factor)
            continue
        for start, stop in row_ranges(shape):
            rows = checkpoint.read_rows(name, start, stop, check_finite=True)
            writer.write_rows(to, start, rows if factor == 1 else rows * factor)


def row_ranges(shape: tuple[int, ...], multiple: int = 1) -> list[tuple[int, int]]:
    """Cut dimension 0 so that a piece stays within ROWS_AT_ONCE elements, unless `multiple` rows,
    of which pieces before the last have whole multiples, are more."""
    row = max(1, torch.Size(shape[1:]).numel())
    step = max(1, ROWS_AT_ONCE // row // multiple) * multiple
    return [(start, min(start + step, shape[0])) for start in range(0, shape[0], step)]
