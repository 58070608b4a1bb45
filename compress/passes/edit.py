"""The pass of one edit: reads the model before it part by part, and writes the model after it."""

import time
from collections.abc import Iterable, Iterator
from functools import partial

from torch import Tensor

from compress.checkpoint import Checkpoint, ShardWriter
from compress.checkpoint.outline import Outline
from compress.edits import EDITS
from compress.edits.edit import ByConfig, ByTensor, Part, Rows, copied
from compress.events import Event
from compress.passes.context import PassContext, block_tensors, record_unit
from compress.passes.copying import row_ranges
from compress.passes.ranks import dealt
from compress.passes.units import OUTSIDE, block_unit, shown
from compress.plan.passes import PassPlan
from compress.recipe.placing import placed

WRITTEN = "written"  # key of a unit's record: names of the tensors that the unit wrote


def edit_units(model: Outline) -> list[tuple[str, int | None, tuple[str, ...]]]:
    """All units of the pass in order: (name, index of the block or None, tensors that it reads)."""
    blocks = [(block_unit(b.index), b.index, tuple(block_tensors(b))) for b in model.spec.blocks]
    inside = {name for _, _, names in blocks for name in names}
    return [(OUTSIDE, None, tuple(x for x in model.tensors if x not in inside)), *blocks]


def apply_edit(work: PassContext, planned: PassPlan) -> None:
    """Carry out every unit that the journal does not have as finished."""
    every = edit_units(planned.source)
    todo = [unit for unit in every if unit[0] not in work.journal.units]
    done, began = len(every) - len(todo), time.perf_counter()
    made = dealt(work.ranks, todo, partial(_apply, work, planned))
    for position, ((unit, _, _), written) in enumerate(zip(todo, made, strict=True), done + 1):
        work.writer.written |= set(written)
        record_unit(work, unit, {WRITTEN: written})
        now = time.perf_counter()
        work.progress(Event(planned.label, shown(unit), position, len(every), now - began))
        began = now


def _apply(
    work: PassContext, planned: PassPlan, unit: tuple[str, int | None, tuple[str, ...]]
) -> list[str]:
    """Carry out one unit and flush it; return the names of the tensors that it wrote."""
    stage, (_, block, names) = planned.stage, unit
    assert stage is not None, "the pass is no edit"
    with placed(work.plan.recipe, stage.label):
        part = _part(planned.source, work.checkpoint, block, names)
        kind = EDITS[stage.method].work
        assert isinstance(kind, ByTensor | ByConfig), "what looks at data is another pass"
        made = copied(part) if isinstance(kind, ByConfig) else kind.apply(part, stage.config)
        written = _write(work.writer, made)
    work.writer.flush(written)
    return written


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
    """Read a tensor in runs of rows; a tensor without rows is one run."""
    shape = checkpoint.tensors[name].shape
    ranges = row_ranges(shape) if shape else []
    if len(ranges) < 2:
        yield 0, checkpoint.read(name, check_finite=True)
        return
    for start, stop in ranges:
        yield start, checkpoint.read_rows(name, start, stop, check_finite=True)


def _write(writer: ShardWriter, pieces: Iterable[Rows]) -> list[str]:
    """Write the rows to their places; return the names of the tensors, in order."""
    written: dict[str, None] = {}
    for name, start, values in pieces:
        if tuple(values.shape) == writer.layout.tensors[name].shape:
            writer.write(name, values)
        else:
            writer.write_rows(name, start, values)
        written[name] = None
    return list(written)
