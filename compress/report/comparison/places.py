"""Where names of points go in a picture: beside their points, where nothing else lies."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Spot = tuple[float, float]
Segment = tuple[Spot, Spot]
Sides = Sequence[tuple[int, int]]  # of a point: to the right, and up
CHARACTER, LINE = 7.2, 15.0  # of a name, in pixels, at most
NEAR = 10.0  # from a point to its name
_AWAY = (NEAR, 18.0, 28.0)


@dataclass(frozen=True, slots=True)
class Box:
    """What is taken of the picture."""

    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: "Box") -> bool:
        apart = self.right <= other.left or other.right <= self.left
        return not (apart or self.bottom <= other.top or other.bottom <= self.top)

    def holds(self, other: "Box") -> bool:
        across = self.left <= other.left and other.right <= self.right
        return across and self.top <= other.top and other.bottom <= self.bottom

    def crossed_by(self, line: Segment) -> bool:
        """Whether a part of the line lies in it: the parts that lie between its sides and between
        its top and bottom have one in common."""
        (x, y), (x_end, y_end) = line
        first, last = 0.0, 1.0
        spans = ((x, x_end, self.left, self.right), (y, y_end, self.top, self.bottom))
        for start, end, low, high in spans:
            if start == end:
                if not low < start < high:
                    return False
                continue
            ends = sorted(((low - start) / (end - start), (high - start) / (end - start)))
            first, last = max(first, ends[0]), min(last, ends[1])
        return first < last


@dataclass(frozen=True, slots=True)
class Space:
    """Where a name may be. inside: of the axes. taken: what no name may cover. lines: what none
    covers where another place is left."""

    inside: Box
    taken: Sequence[Box]
    lines: Sequence[Segment] = ()

    def place(self, name: str, spot: Spot, sides: Sides) -> tuple[Box, bool] | None:
        """Of a name beside its point, and whether it is next to it; None where there is no room.
        sides: of the point, the best first."""
        free = [
            (box, away == NEAR)
            for away, box in _around(name, spot, sides)
            if self.inside.holds(box) and not any(map(box.meets, self.taken))
        ]
        clear = (x for x in free if not any(map(x[0].crossed_by, self.lines)))
        return next(clear, free[0] if free else None)


def _around(name: str, spot: Spot, sides: Sides) -> Iterator[tuple[float, Box]]:
    """Distances and places, the nearest first."""
    wide, (x, y) = CHARACTER * len(name), spot
    for away in _AWAY:
        for right, up in sides:
            left = x + (away if right > 0 else -away - wide if right < 0 else -wide / 2)
            middle = y - up * (away + 2)
            yield away, Box(left, middle - LINE / 2, left + wide, middle + LINE / 2)
