"""How fast each result is expected to write one text in this engine: predicted in one sitting, so
that all are of the same state of the machine."""

from collections.abc import Sequence
from pathlib import Path

from compress.errors import CompressError
from compress.events import Progress
from compress.runs.options import RunOptions
from compress.speed.setting import (
    SpeedSetting,
    SpeedTexts,
    asked_of,
    begin_facts,
    open_checkpoint,
    predicted,
)


def predicted_speeds(
    folders: Sequence[Path], options: RunOptions, progress: Progress
) -> tuple[list[float | None], str | None]:
    """Tokens a second of each checkpoint, None where it cannot be told; and why none can be."""
    found: list[float | None] = []
    reason: str | None = None
    place, texts = SpeedSetting(device=options.device), SpeedTexts(batches=(1,))
    here = None
    for folder in folders:
        try:
            weights = open_checkpoint(folder, sealed=False)
            asked = asked_of(weights, texts)
            if here is None:
                here = begin_facts(place, asked, progress)[1]
            facts = predicted(weights, asked, place, here, progress)[0]
            found.append(float(facts["steps"][0]["tokens_per_second"]))
        except CompressError as error:
            found.append(None)
            reason = reason or str(error)
    return found, reason if all(x is None for x in found) else None
