"""The calibration tokens of a pass that looks at data: all such passes of a run see the same."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from compress.blocks.author import Author
from compress.blocks.skeleton import Skeleton
from compress.events import Progress
from compress.formats import Weights
from compress.passes import calibration_tokens
from compress.passes.context import record_unit
from compress.passes.journal import CALIBRATION, PassJournal
from compress.passes.ranks import ONE_RANK, Ranks, decided
from compress.plan.plan import Plan
from compress.plan.search.bits import SharedBytes
from compress.usercache.cache import UserCache


class ReadsModel(Protocol):
    """What looking at a model takes; a pass that writes has it too."""

    @property
    def plan(self) -> Plan: ...
    @property
    def weights(self) -> Weights: ...
    @property
    def journal(self) -> PassJournal: ...
    @property
    def progress(self) -> Progress: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> str: ...
    @property
    def ranks(self) -> Ranks: ...
    @property
    def kept(self) -> UserCache | None: ...


@dataclass(frozen=True, slots=True, eq=False)
class Looking:
    """A pass that is not known well enough yet to write anything; as PassContext. shared: what it
    shares with the stage behind it, where it does. kept: as of PassContext."""

    plan: Plan
    weights: Weights
    journal: PassJournal
    progress: Progress
    dtype: torch.dtype
    device: str
    ranks: Ranks = ONE_RANK
    shared: SharedBytes | None = None
    kept: UserCache | None = None


def skeleton_of(work: ReadsModel, weights: Weights) -> Skeleton:
    """A decoder without weights, in the run's arithmetic."""
    config = weights.checkpoint.config
    return Skeleton(config, weights.spec, dtype=work.dtype, device=work.device)


def tokens_of(work: ReadsModel, source: Weights, folder: Path) -> tuple[Tensor, Tensor | None]:
    """Ids [rows, length] and mask; they are drawn where no pass of the run has drawn them.

    source: the recipe's, which writes text of its own where the recipe asks for it.
    """
    config = work.plan.recipe.calibration
    assert config is not None, "the recipe parser asks for calibration where an edit needs it"
    if CALIBRATION not in work.journal.units:
        author = Author(source, partial(skeleton_of, work, source), work.kept)
        place = (folder, work.journal.journal, work.progress)
        draw = partial(calibration_tokens.of_run, config, author, *place)
        record_unit(work, CALIBRATION, decided(work.ranks, draw))
    return calibration_tokens.reload(folder, work.journal.units[CALIBRATION]["sha256"])
