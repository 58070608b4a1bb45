"""The artifacts that a recipe asks for: made of the result, each in a folder of it."""

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from compress.arch.spec import DecoderSpec
from compress.checkpoint import Checkpoint, disk, free_bytes
from compress.errors import CompressError, OutputError
from compress.formats import open_weights
from compress.formats.weights import DenseWeights
from compress.pipeline.artifact_report import UNPROVED
from compress.pipeline.environment import peak_rss_bytes
from compress.pipeline.events import Progress, by_tenths
from compress.recipe.schema import ExportConfig, Recipe
from compress.report.schema import Export, Stage
from compress_exporters.exporter import Options
from compress_exporters.table import EXPORTERS

STAGE = "export"


@dataclass(frozen=True, slots=True)
class Artifacts:
    """rows: of what was made. notes: of it, and of what could not be made, a line each. stage: time
    and memory, None where nothing was asked for."""

    rows: tuple[Export, ...] = ()
    notes: tuple[str, ...] = ()
    stage: Stage | None = None


def check_artifact(config: ExportConfig, checkpoint: Checkpoint, spec: DecoderSpec) -> None:
    """Errors of a target that does not take the source as it is: its family, a missing package.
    What it makes of the schemes shows when there is a result."""
    EXPORTERS[config.to].check(DenseWeights(checkpoint, spec), _options(config))


def make_artifacts(recipe: Recipe, partial: Path, progress: Progress) -> Artifacts:
    """Every artifact of the result in `partial`, in the folder of its target's name.

    One that cannot be made is left out and noted: the result is worth more.
    """
    if not recipe.export:
        return Artifacts()
    began, rows, notes = time.perf_counter(), list[Export](), list[str]()
    for config in recipe.export:
        try:
            row, found = _make(config, partial, progress)
        except CompressError as error:
            with suppress(OSError):
                disk.remove_tree(partial / config.to)
            notes.append(f"export to {config.to} left out: {error}")
        else:
            rows.append(row)
            notes += [f"export to {config.to}: {line}" for line in found]
    stage = Stage(STAGE, time.perf_counter() - began, peak_rss_bytes(), None)
    return Artifacts(tuple(rows), tuple(notes), stage)


def _make(config: ExportConfig, partial: Path, progress: Progress) -> tuple[Export, Sequence[str]]:
    exporter, options, folder = EXPORTERS[config.to], _options(config), partial / config.to
    source = open_weights(Checkpoint.open(partial))
    exporter.check(source, options)
    needed, free = exporter.size(source, options), free_bytes(partial)
    if needed > free:
        raise OutputError(f"{needed} bytes are needed in {partial}, and {free} are free")
    if folder.exists():  # of a run that was stopped
        disk.remove_tree(folder)
    with disk.refusing(f"make {folder}"):
        disk.mkdir(folder)
    count = by_tenths(progress, STAGE, f"tenth of {config.to}")
    written = exporter.write(source, folder, options, lambda name, done, total: count(done, total))
    proof = exporter.verify(source, folder, options) if config.verify else None
    level = UNPROVED if proof is None else proof.level
    error = None if proof is None else proof.max_logit_error
    size = sum((folder / name).stat().st_size for name in written.files)
    return Export(config.to, config.to, size, level, error, written.files), written.notes


def _options(config: ExportConfig) -> Options:
    return Options(
        dtype=config.dtype,
        max_context=config.max_context,
        round_scales=config.round_scales,
        accuracy_level=config.accuracy_level,
    )
