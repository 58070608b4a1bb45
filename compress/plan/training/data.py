"""The rows that a training draws, and how many of them it only measures on."""

from dataclasses import replace

from compress.edits.distill import DistillConfig
from compress_calibration.config import CalibrationConfig

# Of rows that a training draws, one of so many, and at least one, is measured on; so many at most.
TRAINING_ROWS_PER_HELD, MOST_HELD = 16, 64


def drawn_data(
    base: CalibrationConfig | None, config: DistillConfig, context: int, seed: int
) -> tuple[CalibrationConfig, int]:
    """The rows that are drawn, at most, and how many of the first of them are calibration's.

    base: that the recipe calibrates on. context: of the model that the run is given. seed: of the
    recipe, for a training with sources of its own beside no calibration.
    """
    own = config.sources
    if base is None:
        assert own is not None, "the recipe parser asks for texts"
        base = CalibrationConfig(own, seed=seed)
        base = replace(base, length=min(base.length, context or base.length))
    length = config.length or base.length
    # Rows of another length than the calibration's begin behind its last token.
    skip = -(-base.samples * base.length // length) if own is None else 0
    sources = base.sources if own is None else own
    samples = skip + config.rows(length)
    return replace(base, sources=sources, length=length, samples=samples), skip


def held_rows(rows: int) -> int:
    """Of so many drawn rows those that are held out."""
    return max(1, min(MOST_HELD, rows // TRAINING_ROWS_PER_HELD))
