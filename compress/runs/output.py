"""Where a run writes: whether it may, whether the disk has room, and what a failure leaves."""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from compress.checkpoint import Checkpoint, Output, ShardWriter, disk, free_bytes, locked
from compress.checkpoint.in_memory import SOURCE
from compress.errors import OutputError
from compress.formats import FORMATS
from compress.machine.environment import fingerprint
from compress.machine.memory import TOLERANCE
from compress.passes import journal as journals
from compress.passes import outliers
from compress.passes.identity import marks, refuse_other_result
from compress.passes.structure.files import WORKING as WORKING_FOLDER
from compress.plan.lengths import evaluated_tokens
from compress.plan.plan import Plan
from compress.plan.training.files import FileBytes
from compress.plan.training.teachers import marks_of
from compress.report.units import size, two_sizes
from compress.runs.passing import passing_files
from compress.runs.reading import models_needed
from compress.runs.requirements import Check, requirement_checks

CALIBRATION_FILE = "calibration.safetensors"
PROOF = "loading"  # the folder of what a fresh process is asked
# The run's own files inside OUT.partial, gone when it is published; stages' folders beside.
WORKING = (
    *("journal.json", CALIBRATION_FILE, "hidden.0", "hidden.1", "blocks.rounded", "evaluation"),
    SOURCE,
    WORKING_FOLDER,
    PROOF,
    outliers.WORKING,
)


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
        yield from requirement_checks(plan, checkpoint, dtype, device, drawn=False)
        return
    yield from requirement_checks(plan, checkpoint, dtype, device, drawn=is_drawn(output))
    if output.state == "publish":
        yield partial(require_same_result, plan, checkpoint, output)
        return
    yield partial(require_space, plan, output.partial, dtype)
    if output.state == "resume":
        yield partial(_require_same_run, plan, checkpoint, dtype, device, output)


def working_files(plan: Plan) -> tuple[str, ...]:
    """What is in OUT.partial and does not belong to the result."""
    return (*WORKING, *(planned.name for planned in plan.passes[:-1]))


def is_drawn(output: Output) -> bool:
    """Whether the run that this one resumes has its calibration text already."""
    return output.state == "resume" and (output.partial / CALIBRATION_FILE).is_file()


@dataclass(frozen=True, slots=True)
class DiskSpace:
    """Bytes of a disk: result, and what lies beside it on the way: between, models that one pass
    leaves for the next; files, that the pass which keeps most of its own has for the time being;
    evaluating, hidden states of evaluation, about. free: that there are."""

    folder: Path
    result: int
    between: int
    files: FileBytes
    evaluating: int
    free: int

    @property
    def passing(self) -> int:
        return self.files.total

    @property
    def needed(self) -> int:
        return self.result + self.between + self.passing + self.evaluating

    @property
    def is_refused(self) -> bool:
        """All are known to the byte but evaluation, which is an estimate."""
        known = self.needed - self.evaluating
        return known > self.free or self.needed > TOLERANCE * self.free

    def __str__(self) -> str:
        needed, free = two_sizes(self.needed, self.free)
        passing = size(self.between + self.passing + self.evaluating)
        return (
            f"disk space in {self.folder}: {needed} are needed ({passing} of them only while it"
            f" runs), {free} are free"
        )


def require_space(plan: Plan, folder: Path, dtype: torch.dtype) -> None:
    """OutputError unless the disk has room. folder: OUT.partial."""
    space = disk_space(plan, folder, dtype)
    if space.is_refused:
        raise OutputError(f"not enough {space}; {_less(plan, space)}")


def space_warnings(plan: Plan, folder: Path, dtype: torch.dtype) -> tuple[str, ...]:
    """A line where the disk may not do for evaluation. folder: OUT.partial."""
    space = disk_space(plan, folder, dtype)
    if space.is_refused or space.needed <= space.free:
        return ()
    return (f"little {space}: it is tried, as the estimate is not exact; {_less(plan, space)}",)


def disk_space(plan: Plan, folder: Path, dtype: torch.dtype) -> DiskSpace:
    """What a run into OUT.partial still has to write, and what there is.

    How many outlier columns calibration will find is not known; those of an interrupted run, which
    are to be joined into one file of the result, are counted.
    """
    side = FORMATS[plan.format].outliers
    pieces = _taken(folder / outliers.WORKING)
    joined = 0 if side is None else _taken(folder / side.folder)
    taken = _taken(folder) - pieces - joined - _taken(folder / SOURCE)
    result = plan.shards.total_bytes - taken + max(pieces - joined, 0)
    passing, evaluating = passing_files(plan, dtype), evaluation_bytes(plan)
    free = free_bytes(folder.parent)
    return DiskSpace(
        folder.parent,
        result,
        _between_bytes(plan, journals.whole(folder)),
        passing,
        evaluating,
        free,
    )


def _less(plan: Plan, space: DiskSpace) -> str:
    """What would fit."""
    files, ways = space.files, []
    if files.each:
        rest = space.result + space.between + space.evaluating + files.fixed
        count = (space.free - rest) // files.each
        least = 2 if files.setting.endswith(".samples") else 1  # rows: one of them is held out
        fits = least <= count < files.count
        ways += [f"--set {files.setting}={count} would fit"] if fits else []
    if space.evaluating and space.needed - space.evaluating <= space.free:
        ways.append("--set evaluation=null would fit")
    return ", or ".join([*ways, "make room or choose another disk"])


def _between_bytes(plan: Plan, whole: Collection[str]) -> int:
    """Of models that passes leave for others, beside the result: the most that is there at once of
    what they read and write, beyond the result's own bytes. whole: passes that are finished."""
    sizes = [planned.layout.total_bytes for planned in plan.passes]
    both = [
        sizes[i] + sum(sizes[j] for j in models_needed(plan.passes, i) if j < i)
        for i, planned in enumerate(plan.passes)
        if planned.name not in whole
    ]
    return max(both) - plan.shards.total_bytes


def evaluation_bytes(plan: Plan) -> int:
    """Hidden states of evaluation that go to disk, about: those of a model, and the final ones of
    both, each as far as they exceed what is kept in memory."""
    config = plan.recipe.evaluation
    if config is None:
        return 0
    width = 4 if config.dtype == "fp32" else 2
    stored = evaluated_tokens(config) * plan.spec.hidden * width
    return 3 * stored if stored > config.spill_bytes else 0


def _taken(folder: Path) -> int:
    """Bytes of disk that the files below a folder have; 0 where there is none."""
    return sum(p.stat().st_blocks * 512 for p in folder.rglob("*")) if folder.is_dir() else 0


def require_same_result(plan: Plan, checkpoint: Checkpoint, output: Output) -> None:
    """OutputError unless what waits for its publication is the result of this run."""
    sha256, side_files = checkpoint.sha256(), checkpoint.side_hashes()
    refuse_other_result(output.complete, plan.recipe, sha256, side_files, is_open=plan.is_open)


def _require_same_run(
    plan: Plan, checkpoint: Checkpoint, dtype: torch.dtype, device: str, output: Output
) -> None:
    """OutputError unless OUT.partial was begun by this run, is whole and nobody works in it."""
    with locked(output.partial):
        environment = fingerprint(device, dtype) | marks_of(plan.teachers)
        mine = marks(plan.asked, checkpoint.sha256(), checkpoint.side_hashes(), environment)
        journal = journals.found(output.partial, mine, device)
        last = plan.passes[-1]
        part = None if journal is None else journal.passes.get(last.name)
        if part is not None and part.has_written and not plan.is_open:
            ShardWriter.reopen(output.partial, last.layout)


@contextmanager
def leaving_no_beginning(folder: Path, *, made: bool) -> Iterator[None]:
    """Remove OUT.partial when work fails before its journal has a unit: there is nothing to go on
    with, and the corrected command would be refused. made: by this run; else it stays."""
    try:
        yield
    except (Exception, KeyboardInterrupt):
        disk.use_spare_handle()
        if made and journals.is_empty(folder):
            with suppress(OSError):
                disk.remove_tree(folder)
        raise
