"""`compress-model roofline`: how fast a checkpoint is expected to be on this machine."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from compress.checkpoint.output.report_folder import report_folder
from compress.events import Progress, silent
from compress.machine.device import settle
from compress.machine.other_work import read_processor
from compress.speed.setting import (
    SpeedSetting,
    SpeedTexts,
    add_disturbance,
    asked_of,
    begin,
    begin_facts,
    math_of,
    open_checkpoint,
    predicted,
    speed_report,
    threads,
    write_report,
)


def predict_speed(
    checkpoint: str | Path,
    texts: SpeedTexts | None = None,
    *,
    against: str | Path | None = None,
    place: SpeedSetting | None = None,
    out: str | Path | None = None,
    progress: Progress = silent,
) -> dict[str, Any]:
    """What a checkpoint is expected to do on this machine; its weights are not loaded.

    against: its source, predicted too. out: a new or empty folder for report.json and report.html.
    Raises a CompressError for what the user can mend.
    """
    given = place or SpeedSetting()
    place, started = begin(given)
    with report_folder(out) as folder, threads(place):
        # The report has the sha256 of the source, or else of the checkpoint itself.
        reported = folder is not None
        result = open_checkpoint(checkpoint, sealed=reported and against is None)
        source = None if against is None else open_checkpoint(against, sealed=reported)
        math_of(result, place)  # refused before anything is measured
        settle(given.device, progress)
        processor = read_processor()
        asked = asked_of(result, texts or SpeedTexts())
        facts, here = begin_facts(place, asked, progress)
        facts["checkpoint"] = predicted(result, asked, place, here, progress)[0]
        if source is not None:
            # What was asked for the checkpoint may be nothing for its source.
            own = replace(place, math=None if place.math != "exact" else "exact")
            facts["source"] = predicted(source, asked, own, here, progress)[0]
        add_disturbance(facts, processor)
        if folder is not None:
            report = speed_report("roofline", facts, result, source or result, place, started)
            write_report(report, folder)
        return facts
