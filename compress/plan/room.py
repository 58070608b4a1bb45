"""Whether a run fits the memory, and what would.

The estimate is compared with all memory that this process may have: what is more than that by the
tolerance of estimates is refused, what is between is tried, with a warning.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from compress.errors import DataError
from compress.machine.memory import resident_bytes, room_bytes, too_much
from compress.plan.memory_needs import WRITING, MemoryNeed, RunSize, memory_needs
from compress.quant.scheme import PRESETS
from compress.report.units import size, two_sizes

# A recipe without data, for what is calibrated and does not fit.
DATA_FREE = "int4-rtn"
# Lengths that a message names are multiples of this.
LENGTH_STEP = 32
# Ways out that a message names.
NAMED = 3

Fits = Callable[[RunSize], bool]


@dataclass(frozen=True, slots=True)
class Room:
    """bytes: that a run may have, None where nobody knows; held: those that this process has.

    assumed: it is of a machine that the user named, and not of this one. drawn: the calibration
    text is there already.
    """

    bytes: int | None = None
    held: int = 0
    assumed: bool = False
    drawn: bool = False


UNKNOWN = Room()


@dataclass(frozen=True, slots=True)
class Shortage:
    """A part of a run that asks for more memory than there is."""

    need: MemoryNeed
    room: int
    held: int

    @property
    def is_refused(self) -> bool:
        return too_much(self.need.bytes, self.held, self.room)

    def __str__(self) -> str:
        needed, room = two_sizes(self.need.bytes, self.room)
        return f"{self.need.part} needs {needed} of memory, {room} are free"


def find_room(device: str, given: int | None = None) -> Room:
    """What a run may have. given: of another machine, in bytes.

    Of a GPU nothing is known before a model is loaded: its memory is looked at then.
    """
    if given is not None:
        return Room(given, assumed=True)
    return Room(room_bytes(), resident_bytes()) if device == "cpu" else UNKNOWN


def shortages(run_size: RunSize, room: Room) -> tuple[Shortage, ...]:
    """Every part that asks for more than there is."""
    if room.bytes is None:
        return ()
    return tuple(
        Shortage(need, room.bytes, room.held)
        for need in _needs(run_size, room)
        if need.bytes > room.bytes
    )


def check_room(run_size: RunSize, room: Room) -> None:
    """DataError where a part that the run cannot do without is refused; names what would fit."""
    refused = [x for x in shortages(run_size, room) if x.need.required and x.is_refused]
    if refused:
        worst = max(refused, key=lambda shortage: shortage.need.bytes)
        raise DataError(f"{worst}; {_remedy(run_size, room)}")


def memory_warnings(run_size: RunSize, room: Room) -> tuple[str, ...]:
    """A line about each part that is tried with less memory than it is expected to need."""
    return tuple(
        f"{x}: it is tried, as the estimate is not exact; {_remedy(run_size, room)}"
        for x in shortages(run_size, room)
        if x.need.required and not x.is_refused
    )


def left_out(run_size: RunSize, room: Room) -> tuple[str, ...]:
    """A line about each part of the report that the memory does not allow."""
    return tuple(f"{x}: it will be left out" for x in _without(run_size, room))


def fitting_needs(run_size: RunSize, room: Room) -> tuple[MemoryNeed, ...]:
    """Of the parts that are not left out."""
    gone = {shortage.need for shortage in _without(run_size, room)}
    return tuple(need for need in _needs(run_size, room) if need not in gone)


def _without(run_size: RunSize, room: Room) -> list[Shortage]:
    return [x for x in shortages(run_size, room) if not x.need.required and x.is_refused]


def _needs(run_size: RunSize, room: Room) -> list[MemoryNeed]:
    needs = memory_needs(run_size, room.held)
    return [need for need in needs if not (room.drawn and need.part == WRITING)]


def _peak(run_size: RunSize, room: Room) -> int:
    """Of the parts that a run cannot do without."""
    return max(need.bytes for need in _needs(run_size, room) if need.required)


def _remedy(run_size: RunSize, room: Room) -> str:
    """What would fit, each tried with the same estimate, or what is needed at least."""
    assert room.bytes is not None, "a shortage is of known memory"
    most = room.bytes

    def fits(other: RunSize) -> bool:
        return _peak(other, room) <= most

    found = list(_smaller(run_size, fits))
    for words, other in _changes(run_size):
        # No change is named on top of one that does alone.
        if fits(other) and not any(words.startswith(f"{alone} with ") for alone in found):
            found.append(words)
    trained = {words: _peak(other, room) for words, other in _trained_otherwise(run_size)}
    if found:
        count = max(NAMED, sum(words in trained for words in found))
        return f"what would fit: {', or '.join(_told(found[:count], trained))}"
    peaks = [_peak(other, room) for other in (run_size, *(x for _, x in _changes(run_size)))]
    if min(trained.values(), default=peaks[0]) < peaks[0]:
        least = sorted(trained, key=trained.__getitem__)[:NAMED]
        return f"no option of the training fits; the least take {', '.join(_told(least, trained))}"
    return f"the least that any recipe needs for this model is {size(min(peaks))}"


def _told(named: Iterable[str], trained: Mapping[str, int]) -> Iterator[str]:
    """Changes, those of a training with the bytes of the run that has them."""
    for words in named:
        yield f"{words} ({size(trained[words])})" if words in trained else words


def _smaller(run_size: RunSize, fits: Fits) -> Iterator[str]:
    """The most calibration data that fits, where less of it does."""
    config = run_size.calibration
    if config is None:
        return
    samples = largest_fitting(
        config.samples, lambda n: fits(replace(run_size, calibration=replace(config, samples=n)))
    )
    if samples is not None:
        yield f"--set calibration.samples={samples}"
    steps = largest_fitting(
        config.length // LENGTH_STEP,
        lambda n: fits(replace(run_size, calibration=replace(config, length=n * LENGTH_STEP))),
    )
    if steps is not None:
        yield f"--set calibration.length={steps * LENGTH_STEP}"


def _changes(run_size: RunSize) -> Iterator[tuple[str, RunSize]]:
    """What else could be asked for, the mildest first: in words, and the job."""
    if run_size.calibration is not None:
        yield from _calibrated_otherwise(run_size)
    yield from _trained_otherwise(run_size)
    if run_size.evaluation is not None:
        less = replace(
            run_size.evaluation, batch_tokens=max(1, run_size.evaluation.batch_tokens // 8)
        )
        yield (
            f"--set evaluation.batch_tokens={less.batch_tokens}",
            replace(run_size, evaluation=less),
        )
    if run_size.calibration is not None:
        yield f"the recipe {DATA_FREE}", _data_free(run_size)
    if run_size.evaluation is not None:
        yield "--set evaluation=null", replace(run_size, evaluation=None)
    if run_size.calibration is not None and run_size.evaluation is not None:
        words = f"the recipe {DATA_FREE} with --set evaluation=null"
        yield words, replace(_data_free(run_size), evaluation=None)


def _calibrated_otherwise(run_size: RunSize) -> Iterator[tuple[str, RunSize]]:
    config = run_size.calibration
    assert config is not None
    narrow, is_wide = replace(run_size, dtype=torch.bfloat16), run_size.dtype == torch.float32
    if is_wide:
        yield "--dtype bf16", narrow
    if any(source.kind == "self" for source in config.sources):
        sources = tuple(
            replace(source, kind="text", path="-") if source.kind == "self" else source
            for source in config.sources
        )
        file = replace(config, sources=sources)
        yield "a text file in place of 'self'", replace(run_size, calibration=file)
        if is_wide:
            words = "a text file in place of 'self' with --dtype bf16"
            yield words, replace(narrow, calibration=file)


def _trained_otherwise(run_size: RunSize) -> Iterator[tuple[str, RunSize]]:
    """Trainings with options that take less."""
    edits = tuple(run_size.edits)
    for place, edit in enumerate(edits):
        for words, held in edit.otherwise:
            less = replace(edit, bytes=held, otherwise=())
            yield words, replace(run_size, edits=(*edits[:place], less, *edits[place + 1 :]))


def _data_free(run_size: RunSize) -> RunSize:
    """Plain rounding of the linears in the blocks."""
    scheme = PRESETS["W4A16"]
    inside = [(x, scheme) for x, _ in run_size.linears if x.role not in ("head", "embedding")]
    linears = inside or run_size.linears
    return replace(run_size, linears=linears, calibration=None, head=None, measured=None)


def largest_fitting(value: int, fits: Callable[[int], bool]) -> int | None:
    """The largest number from 1 to `value` that fits, None where none does. What is smaller fits
    where a larger one does."""
    low, high = 0, value
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low or None
