"""What a pass that trains takes, and with which options it takes less."""

import torch

from compress.checkpoint.outline import Outline
from compress.edits.distill import DistillConfig, Student, row_length, smaller, training_bytes
from compress.edits.work import EditSize, training_work
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
    rows = config.rows(row_length(config, data)) * row_length(config, data)
    work = training_work(model, given, config.tokens, rows, head=config.scope == ("model",))
    less = tuple(
        (words, training_bytes(student, given, other, data, width))
        for words, other in smaller(config, student, stage.label)
    )
    return EditSize(name, model, training_bytes(student, given, config, data, width), work, less)
