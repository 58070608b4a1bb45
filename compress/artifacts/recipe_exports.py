"""The artifacts that a recipe asks for: made of the result, each in a folder of it."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from compress.arch.spec import DecoderSpec
from compress.artifacts.plan import check_options
from compress.artifacts.report import Made, row, size_of
from compress.checkpoint import Checkpoint, disk, free_bytes
from compress.checkpoint.ties import settled
from compress.errors import CompressError, OutputError
from compress.events import Progress, by_tenths
from compress.formats import open_weights
from compress.formats.weights import DenseWeights, Weights
from compress.machine.environment import peak_rss_bytes
from compress.machine.other_work import read_processor, share_since
from compress.recipe.schema import ExportConfig, Recipe
from compress.report.schema import Export, StageRecord
from compress.report.units import two_sizes
from compress_calibration.config import CalibrationConfig
from compress_exporters.exporter import CALIBRATION, Options, PlannedExport
from compress_exporters.gguf.plan import ALIKE
from compress_exporters.table import EXPORTERS

if TYPE_CHECKING:
    from compress.artifacts.rounding.prepare import RoundingTokens

STAGE = "export"


@dataclass(frozen=True, slots=True)
class Artifacts:
    """rows: of what was made. left_out: what could not be made, a line each. stage: time and
    memory, None where nothing was asked for."""

    rows: tuple[Export, ...] = ()
    left_out: tuple[str, ...] = ()
    stage: StageRecord | None = None


@dataclass(frozen=True, slots=True)
class Read:
    """What weights are rounded by in artifacts that round: data, as the recipe has it, and tokens
    of it, which are drawn when they are first needed."""

    data: CalibrationConfig
    tokens: Callable[[], "RoundingTokens"]


def check_artifact(
    config: ExportConfig, checkpoint: Checkpoint, spec: DecoderSpec, *, calibrated: bool
) -> None:
    """Errors of a target that does not take the source as it is: its family, a missing package.
    What it makes of the schemes shows when there is a result."""
    exporter, options = EXPORTERS[config.to], _options(config, calibrated=calibrated)
    check_options(exporter, options)
    exporter.plan(DenseWeights(checkpoint, spec), options)


def make_artifacts(
    recipe: Recipe, partial: Path, out: Path, progress: Progress, read: Read | None = None
) -> Artifacts:
    """Every artifact of the result in `partial`, in the folder of its target's name.

    out: where the result will be. read: None for a recipe without calibration. One that cannot be
    made is left out and named: the result is worth more.
    """
    if not recipe.export:
        return Artifacts()
    processor = read_processor()
    began, rows, left_out = time.perf_counter(), list[Export](), list[str]()
    for config in recipe.export:
        try:
            rows.append(_make(config, partial, out, progress, read))
        except CompressError as error:
            with suppress(OSError):
                disk.remove_tree(partial / config.to)
            left_out.append(f"export to {config.to} left out: {error}")
    others = share_since(processor)
    stage = StageRecord(STAGE, time.perf_counter() - began, peak_rss_bytes(), None, others=others)
    return Artifacts(tuple(rows), tuple(left_out), stage)


def _make(
    config: ExportConfig, partial: Path, out: Path, progress: Progress, read: Read | None
) -> Export:
    source, folder = open_weights(Checkpoint.open(partial)), partial / config.to
    source = source.with_checkpoint(settled(source.checkpoint, source.spec))
    read = read if config.type is not None else None
    planned = EXPORTERS[config.to].plan(source, _options(config, calibrated=read is not None))
    needed, free = planned.size + _beside(source, planned, read), free_bytes(partial)
    if needed > free:
        needs, there = two_sizes(needed, free)
        raise OutputError(f"{needs} are needed in {partial}, and {there} are free")
    if folder.exists():  # of a run that was stopped
        disk.remove_tree(folder)
    with disk.refusing(f"make {folder}"):
        disk.mkdir(folder)
    count = by_tenths(progress, STAGE, f"tenth of {config.to}")
    with _rounded(source, planned, read, folder, progress) as (planned, told):
        written = planned.write(folder, lambda name, done, total: count(done, total))
    proof = planned.verify(folder) if config.verify else None
    written = replace(written, notes=(*written.notes, *told))
    made, notes = Made(written, size_of(folder, written), proof), planned.notes
    made_row = row(config.to, config.to, made, notes, planned.start(out / config.to))
    return replace(made_row, notes=tuple(map(_said, made_row.notes)))


def _said(line: str) -> str:
    """A note as a recipe's user can follow it."""
    if line != ALIKE:
        return line
    return (
        "rounded without calibration: the errors of all columns weigh alike; `calibration` in the"
        " recipe rounds by what they multiply and makes up for losses, as the stage k_quants does"
    )


def _beside(source: Weights, planned: PlannedExport, read: Read | None) -> int:
    """What lies beside the artifact while it is made."""
    if read is None:
        return 0
    from compress.artifacts.rounding.of_export import bytes_beside

    return bytes_beside(source, planned, read.data)


@contextmanager
def _rounded(
    source: Weights,
    planned: PlannedExport,
    read: Read | None,
    folder: Path,
    progress: Progress,
) -> Iterator[tuple[PlannedExport, tuple[str, ...]]]:
    """What was planned with its weights rounded, and what there is to tell of them."""
    if read is None:
        yield planned, ()
        return
    # Late: blocks of transformers' own run for it.
    from compress.artifacts.rounding.of_export import rounded

    with rounded(source, planned, read.tokens(), folder, progress) as found:
        yield found.planned, found.told


def _options(config: ExportConfig, *, calibrated: bool = False) -> Options:
    return Options(
        dtype=config.dtype,
        max_context=config.max_context,
        round_scales=config.round_scales,
        accuracy_level=config.accuracy_level,
        embedding=config.embedding,
        type=config.type,
        text=CALIBRATION if calibrated and config.type is not None else None,
    )
