"""The artifacts that a recipe asks for: made of the result, each in a folder of it."""

import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from compress.arch.spec import DecoderSpec
from compress.artifacts.plan import check_options
from compress.artifacts.report import Made, row, size_of
from compress.checkpoint import Checkpoint, disk, free_bytes
from compress.errors import CompressError, OutputError
from compress.events import Progress, by_tenths
from compress.formats import open_weights
from compress.formats.weights import DenseWeights
from compress.machine.environment import peak_rss_bytes
from compress.machine.other_work import read_processor, share_since
from compress.recipe.schema import ExportConfig, Recipe
from compress.report.schema import Export, StageRecord
from compress.report.units import two_sizes
from compress_exporters.exporter import Options
from compress_exporters.table import EXPORTERS

STAGE = "export"


@dataclass(frozen=True, slots=True)
class Artifacts:
    """rows: of what was made. left_out: what could not be made, a line each. stage: time and
    memory, None where nothing was asked for."""

    rows: tuple[Export, ...] = ()
    left_out: tuple[str, ...] = ()
    stage: StageRecord | None = None


def check_artifact(config: ExportConfig, checkpoint: Checkpoint, spec: DecoderSpec) -> None:
    """Errors of a target that does not take the source as it is: its family, a missing package.
    What it makes of the schemes shows when there is a result."""
    exporter, options = EXPORTERS[config.to], _options(config)
    check_options(exporter, options)
    exporter.plan(DenseWeights(checkpoint, spec), options)


def make_artifacts(recipe: Recipe, partial: Path, out: Path, progress: Progress) -> Artifacts:
    """Every artifact of the result in `partial`, in the folder of its target's name.

    out: where the result will be. One that cannot be made is left out and named: the result is
    worth more.
    """
    if not recipe.export:
        return Artifacts()
    processor = read_processor()
    began, rows, left_out = time.perf_counter(), list[Export](), list[str]()
    for config in recipe.export:
        try:
            rows.append(_make(config, partial, out, progress))
        except CompressError as error:
            with suppress(OSError):
                disk.remove_tree(partial / config.to)
            left_out.append(f"export to {config.to} left out: {error}")
    others = share_since(processor)
    stage = StageRecord(STAGE, time.perf_counter() - began, peak_rss_bytes(), None, others=others)
    return Artifacts(tuple(rows), tuple(left_out), stage)


def _make(config: ExportConfig, partial: Path, out: Path, progress: Progress) -> Export:
    source, folder = open_weights(Checkpoint.open(partial)), partial / config.to
    planned = EXPORTERS[config.to].plan(source, _options(config))
    needed, free = planned.size, free_bytes(partial)
    if needed > free:
        needs, there = two_sizes(needed, free)
        raise OutputError(f"{needs} are needed in {partial}, and {there} are free")
    if folder.exists():  # of a run that was stopped
        disk.remove_tree(folder)
    with disk.refusing(f"make {folder}"):
        disk.mkdir(folder)
    count = by_tenths(progress, STAGE, f"tenth of {config.to}")
    written = planned.write(folder, lambda name, done, total: count(done, total))
    proof = planned.verify(folder) if config.verify else None
    made = Made(written, size_of(folder, written), proof)
    return row(config.to, config.to, made, planned.notes, planned.start(out / config.to))


def _options(config: ExportConfig) -> Options:
    return Options(
        dtype=config.dtype,
        max_context=config.max_context,
        round_scales=config.round_scales,
        accuracy_level=config.accuracy_level,
        embedding=config.embedding,
        type=config.type,
    )
