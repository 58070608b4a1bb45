"""What a pass that trains works with, and how its stage asks for it."""

from dataclasses import dataclass
from pathlib import Path

from compress.distill.loop import Training
from compress.distill.losses import Objective
from compress.edits.distill import MICRO, DistillConfig
from compress.formats import Weights
from compress.passes.context import PassContext
from compress.passes.structure.files import make_working
from compress.plan.passes import PassPlan
from compress.plan.training.data import drawn_data
from compress.recipe import Recipe
from compress_calibration.config import CalibrationConfig

# The peak for scales (as shares of themselves) and norms, whatever the damage. int4 g128 of tale-6m
# by GPTQ, 90 steps of 8 x 256 tokens: KL on stories from 0.0220 to 0.0210.
TUNING_RATE = 1e-3


@dataclass(frozen=True, slots=True, eq=False)
class TrainingPass:
    """source: the recipe's model. teacher: that, or another one. folder: OUT.partial. dense: what
    the stages that round have read, where codes move."""

    work: PassContext
    planned: PassPlan
    source: Weights
    teacher: Weights
    folder: Path
    dense: Weights | None = None

    @property
    def config(self) -> DistillConfig:
        stage = self.planned.stage
        config = None if stage is None else stage.config
        assert isinstance(config, DistillConfig), "the pass does not train"
        return config

    @property
    def working(self) -> Path:
        """The folder of files for the time being."""
        return make_working(self.folder)

    @property
    def seed(self) -> int:
        return self.work.plan.recipe.seed


def training_of(config: DistillConfig, rows: int, length: int, seed: int) -> Training:
    """How long and how fast. rows: to train on, each of `length` tokens."""
    batch = min(config.batch, rows)
    return Training(
        steps=max(1, config.tokens // (batch * length)),
        batch=batch,
        micro=min(MICRO, batch),
        optimizer=config.optimizer,
        schedule=config.schedule,
        rate=TUNING_RATE if config.tunes and config.rate is None else config.rate,
        every=config.every,
        patience=config.patience,
        seed=seed,
    )


def objective_of(config: DistillConfig) -> Objective:
    """What the student is held to."""
    return Objective(config.loss, config.ce, config.blocks)


def data_of(recipe: Recipe, config: DistillConfig, context: int) -> tuple[CalibrationConfig, int]:
    """As `compress.plan.training.data.drawn_data`, of a recipe."""
    return drawn_data(recipe.calibration, config, context, recipe.seed)
