"""What a pass that trains takes, and with which options it takes less."""

from collections.abc import Collection
from math import prod

import torch

from compress.checkpoint.outline import Outline
from compress.edits.distill import (
    DistillConfig,
    Student,
    row_length,
    smaller,
    trained_shapes,
    training_bytes,
)
from compress.edits.work import EditSize, Lessons, Work, optimizer_work, training_work
from compress.plan.training.data import drawn_data, held_rows
from compress.recipe import EditStage
from compress_calibration.config import CalibrationConfig


def training_size(
    name: str,
    stage: EditStage,
    student: Student,
    given: Outline,
    data: CalibrationConfig | None,
    dtype: torch.dtype,
) -> EditSize:
    """name: of the pass. given: the model that the teacher is. data: that the recipe calibrates on;
    dtype: of blocks."""
    config: DistillConfig = stage.config
    width, model = dtype.itemsize, student.model
    length = row_length(config, data)
    less = tuple(
        (words, training_bytes(student, given, other, data, width))
        for words, other in smaller(config, student, stage.label)
    )
    return EditSize(
        name,
        model,
        training_bytes(student, given, config, data, width),
        _work(config, student, given, length),
        length,
        drawn_data(data, config, given.spec.context, seed=0)[0],  # rows are as many with any
        less,
    )


def _work(config: DistillConfig, student: Student, given: Outline, length: int) -> Work:
    """Of all steps, all looks at held-out rows, the teacher and the optimizer."""
    rows, whole = config.rows(length), config.scope == ("model",)
    held = held_rows(rows)
    batch = min(config.batch, max(1, rows - held))
    steps = max(1, config.tokens // (batch * length))
    # Before the first step, after each `every` of them and the last, and of what is stored.
    looks = 2 + -(-steps // config.every)
    learned, measured = steps * batch * length, looks * held * length
    taught = learned + measured if whole and not config.by_cache else rows * length
    lessons = Lessons(learned, measured, taught, config.recompute)
    of_steps = optimizer_work(_moved(config, student), _matrices(config, student.model), steps)
    return training_work(student.model, given, lessons, head=whole) + of_steps


def _moved(config: DistillConfig, student: Student) -> int:
    """Numbers that a step moves; of scope block those of all blocks, one after the other."""
    if config.scope == ("model",):
        return sum(map(prod, trained_shapes(config, student)))
    model = student.model
    names = {name for block in model.spec.blocks for name, _ in block.modules}
    return sum(model.tensors[name].numel for name in names if name in model.tensors)


def _matrices(config: DistillConfig, model: Outline) -> Collection[tuple[int, ...]]:
    """Those that muon moves in its own way."""
    if config.optimizer != "muon" or config.tunes or config.train == ("lora",):
        return ()
    return [linear.shape for linear in model.spec.linears()]
