"""Linears as a plan sees them: to be quantized, or left with a reason."""

from collections.abc import Iterable
from dataclasses import dataclass

from compress.arch.spec import LinearSpec
from compress.methods import METHODS
from compress.quant.scheme import QuantScheme
from compress.recipe import Recipe


@dataclass(frozen=True, slots=True)
class ModulePlan:
    """One linear that will be quantized, by which stage of the recipe, and its bytes on disk.

    folds: stages that scale its channels before.
    """

    linear: LinearSpec
    block: int | None
    stage: int
    method: str
    scheme: QuantScheme
    g_idx: bool
    bytes_before: int
    bytes_after: int
    folds: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Skipped:
    """A linear that stays as it is, and why."""

    linear: LinearSpec
    block: int | None
    reason: str


def calibrated_head(recipe: Recipe, modules: Iterable[ModulePlan]) -> ModulePlan | None:
    """The output head, where a stage quantizes it by what it reads."""
    head = next((m for m in modules if m.linear.role == "head"), None)
    if head is None:
        return None
    stage = recipe.stages[head.stage]
    calibrated = METHODS[stage.method].needs_calibration(stage.config, stage.scheme)
    return head if calibrated or head.folds else None
