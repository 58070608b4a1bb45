"""Mixed precision by budget: one option for each unit so that the summed loss is least.

A unit is what must be stored alike (q/k/v of a block, its gate/up, any other layer alone); its loss
under an option is what was measured with only that unit compressed. Summing them is the additive
model, and for it the choice is exact: partial choices are kept unit by unit as (bytes, loss), and
one goes only when another has no more of both (dominance), or when even the linear relaxation of
the units to come cannot bring it below a choice already known (bound). Rounded sums keep their
order, so this holds for floats as they are added, from the first unit to the last.

The number of partial choices is at most that of distinct sums of bytes. Blocks are alike, so sums
coincide, and the bound leaves those near the optimum: some hundreds for 320 units of a 70B shape.
Should they be more than STATES over all units, neighbours in loss are merged, and `Choice.gap` says
by how much the loss may exceed the least one; otherwise it is 0.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from compress.errors import RecipeError

STATES = 1 << 24  # partial choices that are remembered, 5 bytes each; 84 MB
_LEAST = 256  # of them that a unit may have, however many units there are
_ROUNDING = 1e-9  # of all losses together: no partial choice goes by less than this

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Places = npt.NDArray[np.int32]
Picks = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Option:
    """A way to store a unit. label: its scheme; bytes: exact; loss: finite, of any unit."""

    label: str
    bytes: int
    loss: float


@dataclass(frozen=True, slots=True)
class Unit:
    """Layers that are stored alike, with one option or more."""

    name: str
    options: tuple[Option, ...]

    def __post_init__(self) -> None:
        assert 0 < len(self.options) < 256, self.name
        assert all(math.isfinite(o.loss) and o.bytes >= 0 for o in self.options), self.name


@dataclass(frozen=True, slots=True)
class Allocation:
    """picked: place of each unit's option. bytes, loss: their sums, in the order of the units.
    gap: no other choice within the budget has a loss below `loss - gap`."""

    picked: tuple[int, ...]
    bytes: int
    loss: float
    gap: float = 0.0


@dataclass(frozen=True, slots=True)
class _States:
    """Partial choices by rising bytes and falling loss. parent: place among those of the units
    before; option: of the last unit."""

    bytes: Ints
    loss: Floats
    parent: Places
    option: Picks


def bytes_for(bits_per_weight: float, weights: int) -> int:
    """Bytes that so many weights may take at that many bits each, scales and zeros included.

    RecipeError for bits that are no positive number.
    """
    if not (math.isfinite(bits_per_weight) and bits_per_weight > 0):
        raise RecipeError(
            f"target: bits_per_weight is {bits_per_weight}; it is a number above 0, such as 4.25"
        )
    return int(Fraction(bits_per_weight) * weights / 8)


def choose(units: Sequence[Unit], budget_bytes: int, *, weights: int | None = None) -> Allocation:
    """The choice of least loss whose bytes are at most `budget_bytes`; the one of fewest bytes
    where several have it, and always the same one.

    weights: of all units, for the message. RecipeError with the least possible bytes when the
    budget is below them.
    """
    _check(units, budget_bytes, weights)
    bound = _Relaxation(units, budget_bytes)
    known = bound.rounded_down()
    slack = _ROUNDING * sum(max(abs(o.loss) for o in unit.options) for unit in units)
    most = max(STATES // max(len(units), 1), _LEAST)
    states = _States(_ints([0]), np.zeros(1), np.zeros(1, np.int32), np.zeros(1, np.uint8))
    steps: list[tuple[Places, Picks]] = []
    merged = 0.0
    for index, unit in enumerate(units):
        states = _pruned(_extended(states, unit))
        least = states.loss + bound.of_the_rest(index + 1, states.bytes)
        states = _taken(states, least <= known.loss + slack)
        if len(states.bytes) > most:
            states, width = _thinned(states, most)
            merged += width
        if not len(states.bytes):  # merging can lose what led to the known choice, nothing else
            return Allocation(known.picked, known.bytes, known.loss, merged)
        steps.append((states.parent, states.option))
    best = len(states.bytes) - 1
    picked = _traced(steps, best)
    return Allocation(picked, int(states.bytes[best]), float(states.loss[best]), merged)


def _check(units: Sequence[Unit], budget: int, weights: int | None) -> None:
    least = sum(min(o.bytes for o in unit.options) for unit in units)
    if least <= budget:
        return
    bits = f" ({8 * least / weights:.3f} bits a weight)" if weights else ""
    raise RecipeError(
        f"target: the budget is {budget:,} bytes, but the smallest schemes of all layers together"
        f" take {least:,}{bits}; raise the target or allow smaller schemes"
    )


def _extended(states: _States, unit: Unit) -> _States:
    """Every partial choice with every option of the next unit."""
    count = len(states.bytes)
    return _States(
        np.concatenate([states.bytes + o.bytes for o in unit.options]),
        np.concatenate([states.loss + o.loss for o in unit.options]),
        np.tile(np.arange(count, dtype=np.int32), len(unit.options)),
        np.repeat(np.arange(len(unit.options), dtype=np.uint8), count),
    )


def _pruned(states: _States) -> _States:
    """Without those that another one equals or beats in both bytes and loss."""
    states = _taken(states, np.lexsort((states.loss, states.bytes)))
    before = np.minimum.accumulate(states.loss)[:-1]
    return _taken(states, np.concatenate([[True], states.loss[1:] < before]))


def _thinned(states: _States, most: int) -> tuple[_States, float]:
    """At most so many, and how much more loss one of them may have than one that it stands for.

    Losses are cut into equal intervals; of each the choice of fewest bytes stays.
    """
    low, high = float(states.loss[-1]), float(states.loss[0])
    width = (high - low) / (most - 1)
    interval = np.floor((states.loss - low) / width)
    first = np.concatenate([[True], interval[1:] != interval[:-1]])
    return _taken(states, first), width


def _taken(states: _States, which: Any) -> _States:
    return _States(
        states.bytes[which], states.loss[which], states.parent[which], states.option[which]
    )


def _traced(steps: Sequence[tuple[Places, Picks]], last: int) -> tuple[int, ...]:
    """Options of the choice that is at place `last` after the last unit."""
    picked = []
    for parent, option in reversed(steps):
        picked.append(int(option[last]))
        last = int(parent[last])
    return tuple(reversed(picked))


@dataclass(frozen=True, slots=True, order=True)
class _Step:
    """From one corner of a unit's hull to the next. slope: loss added for each byte more."""

    slope: float
    unit: int
    before: int
    after: int
    more: int
    added: float


class _Relaxation:
    """The same choice with mixtures of options allowed: units start at their smallest option and
    take steps along their lower convex hulls, over all units the steepest first.

    No choice of whole options has less loss, so it bounds what the units to come can give.
    """

    def __init__(self, units: Sequence[Unit], budget: int) -> None:
        self.units, self.budget = units, budget
        hulls = [_hull(unit) for unit in units]
        self.first = [hull[0] for hull in hulls]
        smallest = [unit.options[i] for unit, i in zip(units, self.first, strict=True)]
        self.least = _from_behind(_ints([o.bytes for o in smallest]))
        self.loss = _from_behind(np.array([o.loss for o in smallest], np.float64))
        self.steps = sorted(
            step for i, hull in enumerate(hulls) for step in _steps(i, units[i], hull)
        )
        self.unit = _ints([step.unit for step in self.steps])
        self.more = _ints([step.more for step in self.steps])
        self.added = np.array([step.added for step in self.steps], np.float64)

    def of_the_rest(self, start: int, taken: Ints) -> Floats:
        """Least relaxed loss of the units from `start`, after so many bytes; inf for too many."""
        left = self.budget - taken - self.least[start]
        mine = self.unit >= start
        more = np.concatenate([[0], np.cumsum(self.more[mine])])
        added = np.concatenate([[0.0], np.cumsum(self.added[mine])])
        return np.where(left < 0, np.inf, self.loss[start] + np.interp(left, more, added))

    def rounded_down(self) -> Allocation:
        """A choice of whole options: every step that still fits, the steepest first."""
        picked, left = list(self.first), self.budget - int(self.least[0])
        for step in self.steps:
            if step.more <= left and picked[step.unit] == step.before:
                picked[step.unit], left = step.after, left - step.more
        chosen = [unit.options[i] for unit, i in zip(self.units, picked, strict=True)]
        return Allocation(tuple(picked), sum(o.bytes for o in chosen), _sum(o.loss for o in chosen))


def _hull(unit: Unit) -> list[int]:
    """Options on the lower convex hull, by rising bytes and falling loss."""
    order = sorted(range(len(unit.options)), key=lambda i: _key(unit.options[i]))
    hull: list[int] = []
    for index in order:
        option = unit.options[index]
        if hull and option.loss >= unit.options[hull[-1]].loss:
            continue
        while len(hull) > 1 and not _convex(unit.options[hull[-2]], unit.options[hull[-1]], option):
            hull.pop()
        hull.append(index)
    return hull


def _key(option: Option) -> tuple[int, float]:
    return option.bytes, option.loss


def _convex(a: Option, b: Option, c: Option) -> bool:
    """Whether b lies below the line from a to c; bytes rise from one to the next."""
    return (b.loss - a.loss) * (c.bytes - a.bytes) < (c.loss - a.loss) * (b.bytes - a.bytes)


def _steps(index: int, unit: Unit, hull: Sequence[int]) -> Iterator[_Step]:
    for before, after in pairwise(hull):
        a, b = unit.options[before], unit.options[after]
        more, added = b.bytes - a.bytes, b.loss - a.loss
        yield _Step(added / more, index, before, after, more, added)


def _from_behind(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Sums of the values from each place on, and 0 after the last."""
    return np.concatenate([np.cumsum(values[::-1])[::-1], np.zeros(1, values.dtype)])


def _sum(values: Iterator[float]) -> float:
    """From left to right, as the partial choices are added; `sum` would compensate."""
    total = 0.0
    for value in values:
        total += value
    return total


def _ints(values: Sequence[int]) -> Ints:
    return np.array(values, np.int64)
