"""Linears as a plan sees them: to be quantized, or left with a reason."""

from dataclasses import dataclass

from compress.arch.spec import LinearSpec
from compress.quant.scheme import QuantScheme


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
