"""What open edits are measured by, and what that settles."""

from pathlib import Path
from typing import Any

from compress.formats import Weights
from compress.passes.structure.tokens import Looking
from compress.recipe.schema import EditStage


def choose(look: Looking, stage: EditStage, source: Weights, folder: Path) -> None:
    """Measure what an open edit has to know of the model, and record it."""
    ...


def chosen(config: Any, record: Any) -> Any:
    """The options with what was measured in place."""
    ...
