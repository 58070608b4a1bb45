"""What a combination of sizes promises to lose, by what each of its axes loses alone."""

import math
from collections.abc import Iterator, Mapping
from itertools import pairwise

from compress.plan.search.sizes import Counts, SizeSpace, fine_axis, grid_of


def points_alone(space: SizeSpace) -> Iterator[Counts]:
    """Points at which one axis is cut, as far as they say something of the combinations."""
    fine = fine_axis(space)
    for place, values in enumerate(space.axes.values()):
        used = {point[place] for point in space.points}
        grid = grid_of(values)
        if place == fine:  # what lies between is interpolated
            low = max((x for x in grid if x <= min(used)), default=grid[0])
            high = min(x for x in grid if x >= max(used))
            used = {x for x in grid if low <= x <= high}
        for value in sorted(used - {values[-1]}):
            yield (*space.whole[:place], value, *space.whole[place + 1 :])


def predicted_loss(space: SizeSpace, point: Counts, alone: Mapping[Counts, float]) -> float:
    """The sum of what each axis loses by itself."""
    return sum(_lost(space, place, value, alone) for place, value in enumerate(point))


def _lost(space: SizeSpace, place: int, value: int, alone: Mapping[Counts, float]) -> float:
    """What an axis loses at a value; between two that were measured it follows a power law of what
    goes."""
    whole = space.whole
    if value == whole[place]:
        return 0.0
    rest = whole[:place] + whole[place + 1 :]
    known = {x[place]: loss for x, loss in alone.items() if x[:place] + x[place + 1 :] == rest}
    known.pop(whole[place], None)
    if value in known:
        return known[value]
    curve = sorted((whole[place] - x, max(loss, 1e-9)) for x, loss in known.items())
    ends = [pair for pair in pairwise(curve) if pair[1][0] >= whole[place] - value] or [
        *pairwise(curve)
    ][-1:]
    gone = whole[place] - value
    if not ends:  # one point: losses grow about with the square of what goes
        return curve[0][1] * (gone / curve[0][0]) ** 2
    (first, low), (last, high) = ends[0]
    power = math.log(high / low) / math.log(last / first)
    return low * float((gone / first) ** power)
