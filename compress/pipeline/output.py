"""Where a run writes: whether it may, whether the disk has room, and what a failure leaves."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import torch

from compress.checkpoint import Checkpoint, Output, ShardWriter, disk, free_bytes, locked
from compress.errors import OutputError
from compress.formats import bitsandbytes
from compress.pipeline import journal as journals
from compress.pipeline import outliers
from compress.pipeline.environment import fingerprint
from compress.pipeline.identity import marks, refuse_other_result
from compress.pipeline.inputs import Check, input_checks
from compress.pipeline.plan import Plan

CALIBRATION_FILE = "calibration.safetensors"


def run_checks(
    plan: Plan,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: str,
    prepare: Callable[[], Output],
) -> Iterator[Check]:
    """All that a run into a folder refuses before work, each by itself; nothing is changed.

    prepare: `prepare_output` with its arguments. dtype, device: of the calibrated passes.
    """
    yield prepare
    try:
        output = prepare()
    except OutputError:
        yield from input_checks(plan, checkpoint, dtype, device, drawn=False)
        return
    yield from input_checks(plan, checkpoint, dtype, device, drawn=is_drawn(output))
    if output.state == "publish":
        yield partial(_require_same_result, plan, checkpoint, output)
        return
    yield partial(require_space, plan, output.partial, dtype)
    if output.state == "resume":
        yield partial(_require_same_run, plan, checkpoint, dtype, device, output)


def is_drawn(output: Output) -> bool:
    """Whether the run that this one resumes has its calibration text already."""
    return output.state == "resume" and (output.partial / CALIBRATION_FILE).is_file()


def require_space(plan: Plan, folder: Path, dtype: torch.dtype) -> None:
    """OutputError unless the disk has room for the result and for what lies beside it on the way:
    the hidden states of the calibration set, twice. folder: OUT.partial.

    How many outlier columns calibration will find is not known; those of an interrupted run, which
    are to be joined into one file of the result, are counted.
    """
    passing, config = 0, plan.recipe.calibration
    if plan.needs_calibration and config is not None:
        tokens = config.samples * config.length
        passing = 2 * tokens * plan.spec.hidden * dtype.itemsize
    pieces, joined = (_taken(folder / x) for x in (outliers.WORKING, bitsandbytes.FOLDER))
    taken = _taken(folder) - pieces - joined
    needed = plan.shards.total_bytes + passing - taken + max(pieces - joined, 0)
    free = free_bytes(folder.parent)
    if needed > free:
        raise OutputError(
            f"not enough disk space in {folder.parent}: {needed} bytes are needed ({passing} of"
            f" them only while it runs), {free} are free; make room or choose another disk"
        )


def _taken(folder: Path) -> int:
    """Bytes of disk that the files below a folder have; 0 where there is none."""
    return sum(p.stat().st_blocks * 512 for p in folder.rglob("*")) if folder.is_dir() else 0


def _require_same_result(plan: Plan, checkpoint: Checkpoint, output: Output) -> None:
    refuse_other_result(output.complete, plan.recipe, checkpoint.sha256(), checkpoint.side_hashes())


def _require_same_run(
    plan: Plan, checkpoint: Checkpoint, dtype: torch.dtype, device: str, output: Output
) -> None:
    """OutputError unless OUT.partial was begun by this run, is whole and nobody works in it."""
    with locked(output.partial):
        environment = fingerprint(device, dtype)
        mine = marks(plan.recipe, checkpoint.sha256(), checkpoint.side_hashes(), environment)
        journal = journals.found(output.partial, mine, device)
        if journal is not None and journal.has_work:
            ShardWriter.reopen(output.partial, plan.shards)


@contextmanager
def leaving_no_beginning(folder: Path, *, made: bool) -> Iterator[None]:
    """Remove OUT.partial when work fails before its journal has a unit: there is nothing to go on
    with, and the corrected command would be refused. made: by this run; else it stays."""
    try:
        yield
    except (Exception, KeyboardInterrupt):
        if made and journals.is_empty(folder):
            with suppress(OSError):
                disk.remove_tree(folder)
        raise
