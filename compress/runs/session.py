"""A run that has been checked and may begin."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from compress.checkpoint import Checkpoint, Output
from compress.events import Progress
from compress.formats import Weights
from compress.plan.plan import Plan
from compress.plan.training.teachers import NO_TEACHERS, Teachers
from compress.report.records.loads import StockLoad
from compress.report.schema import StageRecord
from compress.usercache.cache import UserCache


@dataclass(frozen=True, slots=True, eq=False)
class Session:
    """What the run reads, where it writes and how. sha256: of the source; dtype: of the blocks.

    measuring: the time that sensitivities took, where they were not known before.
    loads: how plain transformers loads what the edits left; None before it was asked.
    teachers: other models that passes train by, sealed.
    side_files: name -> sha256 of what goes along with the weights. shared: lines on texts that are
    learned from and evaluated on, in two files. kept: where text of the model's own and evaluations
    of the source lie. passed_over: a line where a GPU is not used.
    """

    plan: Plan
    checkpoint: Checkpoint
    weights: Weights
    output: Output
    dtype: torch.dtype
    device: str
    sha256: str
    side_files: Mapping[str, str]
    progress: Progress
    measuring: StageRecord | None = None
    loads: StockLoad | None = None
    teachers: Teachers = field(default_factory=lambda: NO_TEACHERS)
    shared: tuple[str, ...] = ()
    kept: UserCache | None = None
    passed_over: tuple[str, ...] = ()
