"""Which tensors of a model are no longer the source's."""

from collections.abc import Iterable, Iterator

import torch

from compress.arch.resize.names import block_name
from compress.checkpoint import Checkpoint
from compress.passes.copying import row_ranges
from compress.passes.structure.streams import outside_factors
from compress.passes.training.setting import TrainingPass


def changed_tensors(each: TrainingPass, names: Iterable[str]) -> list[str]:
    """Those of `names` whose values or shape differ from the tensor that they were made of."""
    spec, origin = each.source.spec, each.planned.origin
    before = each.source.checkpoint
    was = {block_name(spec, name, origin): name for name in before.tensors}
    # What only goes with the stream's factor is as it was.
    factors = outside_factors(spec, each.planned.streamed)
    after = each.work.checkpoint
    return [
        name
        for name in names
        if _differ(before, was.get(name), after, name, factors.get(was.get(name, ""), 1.0))
    ]


def _differ(
    before: Checkpoint, old: str | None, after: Checkpoint, new: str, factor: float
) -> bool:
    if old is None:
        return True
    one, other = before.tensors[old], after.tensors[new]
    if one.shape != other.shape:
        return True
    return any(not same for same in _same(before, old, after, new, factor))


def _same(
    before: Checkpoint, old: str, after: Checkpoint, new: str, factor: float
) -> Iterator[bool]:
    """Of runs of rows; what was cast is the same where the cast values are."""
    for start, stop in row_ranges(before.tensors[old].shape):
        rows = before.read_rows(old, start, stop)
        now = after.read_rows(new, start, stop)
        rows = rows if factor == 1 else rows * factor
        yield torch.equal(rows.to(now.dtype), now)
