"""The pass of one edit: tensors of the model before, part by part, into the model behind it."""

import time
from collections.abc import Iterable, Iterator
from functools import partial

from torch import Tensor

from compress.checkpoint import Checkpoint, ShardWriter
from compress.checkpoint.outline import Outline
from compress.edits import EDITS
from compress.edits.edit import Part, Rows
from compress.events import Event
from compress.passes.context import PassContext, block_tensors
from compress.passes.copying import row_ranges
from compress.passes.units import OUTSIDE, block_unit, shown
from compress.plan.passes import PassPlan
from compress.recipe.placing import placed

WRITTEN = "written"  # what a unit's record says: tensors of the result


def edit_units(model: Outline) -> list[tuple[str, int | None, tuple[str, ...]]]:
    """(name, block, source tensors) of everything the pass works off, in order."""
    blocks = [(block_unit(b.index), b.index, tuple(block_tensors(b))) for b in model.spec.blocks]
    inside = {name for _, _, names in blocks for name in names}
    return [(OUTSIDE, None, tuple(x for x in model.tensors if x not in inside)), *blocks]


def apply_edit(work: PassContext, planned: PassPlan) -> None:
    """Every unit that the journal does not have."""
    stage = planned.stage
    assert stage is not None, "the pass is no edit"
    todo = edit_units(planned.source)
    for position, (unit, block, names) in enumerate(todo):
        if unit in work.journal.units:
            continue
        began = time.perf_counter()
        with placed(work.plan.recipe, stage.label):
            part = _part(planned.source, work.checkpoint, block, names)
            written = _write(work.writer, EDITS[stage.method].apply(part, stage.config))
        work.writer.flush(written)
        work.journal.record(unit, {WRITTEN: written})
        spent = time.perf_counter() - began
        work.progress(Event(stage.method, shown(unit), position + 1, len(todo), spent))


def _part(
    source: Outline, checkpoint: Checkpoint, block: int | None, names: tuple[str, ...]
) -> Part:
    return Part(
        source,
        None if block is None else source.spec.blocks[block],
        names,
        partial(checkpoint.read, check_finite=True),
        partial(_in_rows, checkpoint),
    )


def _in_rows(checkpoint: Checkpoint, name: str) -> Iterator[tuple[int, Tensor]]:
    """One run where a tensor has no rows."""
    shape = checkpoint.tensors[name].shape
    ranges = row_ranges(shape) if shape else []
    if len(ranges) < 2:
        yield 0, checkpoint.read(name, check_finite=True)
        return
    for start, stop in ranges:
        yield start, checkpoint.read_rows(name, start, stop, check_finite=True)


def _write(writer: ShardWriter, pieces: Iterable[Rows]) -> list[str]:
    """Put them in their places; the names of the tensors, in order."""
    written: dict[str, None] = {}
    for name, start, values in pieces:
        if tuple(values.shape) == writer.layout.tensors[name].shape:
            writer.write(name, values)
        else:
            writer.write_rows(name, start, values)
        written[name] = None
    return list(written)
