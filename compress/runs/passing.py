"""Files that passes keep in OUT.partial for the time being: hidden states, what a teacher says, the
state of a training, bases."""

from collections.abc import Iterator

import torch

from compress.edits.distill import DistillConfig, row_length
from compress.plan.passes import PassPlan, choosing_of
from compress.plan.plan import Plan
from compress.plan.search.trials import choosing_files
from compress.plan.training.files import FileBytes, training_files

SAMPLES = "calibration.samples"
BASIS_NUMBER = 8  # bytes of a number of a basis


def passing_files(plan: Plan, dtype: torch.dtype) -> FileBytes:
    """Of the pass that keeps most, with what earlier ones leave for it."""
    found, bases = [FileBytes(0, 0, 0, SAMPLES)], 0
    for planned in plan.passes:
        for files in _of_pass(plan, planned, dtype):
            found.append(FileBytes(files.fixed + bases, files.each, files.count, files.setting))
        bases += _basis(planned)
    return max(found, key=lambda files: files.total)


def _of_pass(plan: Plan, planned: PassPlan, dtype: torch.dtype) -> Iterator[FileBytes]:
    """What a pass keeps, and what is kept before it while it is chosen what it does."""
    width, data = dtype.itemsize, plan.recipe.calibration
    given, stage = plan.source, planned.stage
    if stage is not None and isinstance(stage.config, DistillConfig):
        teacher, length = plan.model.taught_by(planned), row_length(stage.config, data)
        student = plan.model.student_of(planned)
        fixed, each = training_files(stage.config, student, teacher, length=length, width=width)
        rows, bound = stage.config.rows(length), stage.config.samples
        key = "tokens" if bound is None else "samples"
        each, count = (each, rows * length) if bound is None else (each * length, rows)
        yield FileBytes(fixed, each, count, f"{stage.label}.{key}")
        return
    # Rounded rows, until all of them go into one file.
    rounded = () if stage is not None or plan.file is None else plan.file.modules
    blocks = sum(m.bytes_after for m in rounded)
    if data is None:
        yield FileBytes(blocks, 0, 0, SAMPLES)
        return
    row = data.length * width
    if stage is None and plan.needs_calibration:
        yield FileBytes(blocks, 2 * row * plan.spec.hidden, data.samples, SAMPLES)
    if planned.needs_data:
        hidden = given.spec.hidden + planned.result.spec.hidden
        # Where the stream is narrower, also the source's in that basis.
        basis = planned.result.spec.hidden if planned.narrowed else 0
        yield FileBytes(_basis(planned), row * (2 * hidden + basis), data.samples, SAMPLES)
    choosing = choosing_of(planned, given, data)
    if choosing is not None:
        yield FileBytes(choosing_files(choosing, dtype), 0, 0, SAMPLES)


def _basis(planned: PassPlan) -> int:
    """Of the basis that a pass finds, which stays until the run ends."""
    if not planned.narrows:
        return 0
    return BASIS_NUMBER * planned.source.spec.hidden * (planned.result.spec.hidden + 1)
