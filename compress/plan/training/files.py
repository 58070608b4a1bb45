"""Bytes of the files that a training keeps in OUT.partial while it works."""

from dataclasses import dataclass

from compress.checkpoint.outline import Outline
from compress.distill.memory import (
    WALKED_STATES,
    MicroBatch,
    model_bytes,
)
from compress.edits.distill import DistillConfig, Student, trained_shapes

IDS = 8 + 1  # bytes of a token: its id, and whether it is one
KEPT, REST = 4 + 2, 4  # of a token that the teacher finds likely: id and log p; of all others


@dataclass(frozen=True, slots=True)
class FileBytes:
    """Bytes of files: so many, and `each` for every one of `count` (rows of a calibration, tokens
    of a training); setting: the key of the recipe that says the count."""

    fixed: int
    each: int
    count: int
    setting: str

    @property
    def total(self) -> int:
        return self.fixed + self.each * self.count


def training_files(
    config: DistillConfig,
    student: Student,
    teacher: Outline,
    *,
    length: int,
    width: int,
) -> tuple[int, int]:
    """Of a pass of one scope: bytes, and bytes for each token of its rows.

    length: tokens of a row. width: bytes of a number of hidden states.
    """
    hidden, taught = student.model.spec.hidden, teacher.spec.hidden
    if config.scope == ("block",):
        # Two stores of each chain; where the stream is narrower, the source's in that basis.
        basis = hidden if hidden != taught else 0
        return 0, IDS + width * (2 * (hidden + taught) + basis)
    trained = trained_shapes(config, student)
    held = model_bytes(student.model, trained, MicroBatch(1, length), config.optimizer)
    # What is trained, best and as it is, and the optimizer; a new state lies beside the old one.
    state = 2 * (held.gradients + held.best + held.optimizer)
    if not config.by_cache:
        return state, IDS
    kept = KEPT * min(config.cache, teacher.spec.embedding_shape[0]) + REST
    rows = config.rows(length) * length
    states = width * taught
    return state, IDS + kept + (states if rows * states > WALKED_STATES else 0)
