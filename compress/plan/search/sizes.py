"""The sizes that an open `prune` chooses among: a grid on each axis, and what every point takes.

Blocks are alike, so what a model takes is what lies outside of them and so many times a block; and
of a block, attention and the MLP take their parts each by itself. So a grid of hundreds of points
is counted from some dozens of outlines, exactly.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from math import prod

from compress.arch.resize.entries import entries
from compress.arch.resize.shape import Shape, sizes_after
from compress.arch.sizes import BlockSizes
from compress.checkpoint.outline import Outline
from compress.checkpoint.shards.dtype_codes import itemsize
from compress.checkpoint.shards.layout import Entry, nbytes
from compress.edits.prune import Axis, PrunedSizes

GRID = 8  # values of an axis that are measured, the source's included

# How many stay on each axis, in the order of SizeSpace.axes. Of heads that share keys and values:
# query heads in each group.
Counts = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Counter:
    """Counts what a model of other sizes takes. measure: a field of SizeBudget. stored: what its
    tensors become, and header the bytes of its files beside them, where bytes are the result's."""

    source: Outline
    measure: str
    stored: Callable[[Entry], int] = nbytes
    header: int | None = None
    known: dict[Shape, int] = field(default_factory=dict)

    def of(self, shape: Shape, layers: int) -> int:
        """What the source takes with these widths and so many blocks."""
        whole = self._blocks(Shape())
        attention = self._blocks(Shape(heads=shape.heads, kv_heads=shape.kv_heads))
        inner = self._blocks(Shape(ffn=shape.ffn, experts=shape.experts))
        there = len(self.source.spec.blocks)
        return self._outside() + (attention + inner - whole) * layers // there

    def _blocks(self, shape: Shape) -> int:
        """Of all blocks with these widths; kept for the next call."""
        if shape not in self.known:
            self.known[shape] = self._counted(shape) - self._outside()
        return self.known[shape]

    def _counted(self, shape: Shape) -> int:
        model = self.source
        if self.measure == "kv_bytes_per_token":
            width = itemsize(model.tensors[model.spec.embedding].dtype)
            sizes = sizes_after(model.spec, shape)
            return sum(block.cache().nbytes(width) for block in sizes.blocks)
        left = entries(model.spec, model.entries, shape)
        if self.measure == "bytes":
            return sum(map(self.stored, left)) + self._header()
        return sum(prod(dims) for _, _, dims in left)

    def _outside(self) -> int:
        """What does not go with blocks."""
        if self.measure == "kv_bytes_per_token":
            return 0
        model = self.source
        inside = {name for block in model.spec.blocks for name, _ in block.modules}
        inside |= {name for block in model.spec.blocks for name in block.unrecognised}
        found = [x for x in model.entries if x[0] not in inside]
        if self.measure == "bytes":
            return sum(map(self.stored, found)) + self._header()
        return sum(prod(dims) for _, _, dims in found)

    def _header(self) -> int:
        model = self.source
        return model.file_bytes - model.nbytes if self.header is None else self.header


def whole_of(model: Outline, axis: Axis) -> int:
    """How many the model has on an axis."""
    sizes: BlockSizes = model.spec.blocks[0].sizes
    counts = {
        "ffn": sizes.intermediate if sizes.dense else sizes.expert,
        "heads": _in_group(sizes) if _grouped(sizes) else sizes.heads,
        "kv_heads": sizes.kv_heads,
        "experts": sizes.experts,
        "layers": len(model.spec.blocks),
    }
    return counts[axis]


def _grouped(sizes: BlockSizes) -> bool:
    return sizes.heads != sizes.kv_heads


def _in_group(sizes: BlockSizes) -> int:
    return sizes.heads // sizes.kv_heads


@dataclass(frozen=True, slots=True, eq=False)
class SizeSpace:
    """What there is to choose from.

    axes: for each the counts that the carrier and later stages take, ascending; the last is the
    source's. limit: of what the counter counts. points: combinations that meet it, of which none
    has more than another on every axis; or all on the grids that do, where the stages behind share
    the limit.
    """

    source: Outline
    axes: Mapping[Axis, tuple[int, ...]]
    counter: Counter
    limit: int
    points: tuple[Counts, ...] = ()
    shared: bool = False

    @property
    def whole(self) -> Counts:
        return tuple(values[-1] for values in self.axes.values())

    @property
    def least(self) -> Counts:
        return tuple(values[0] for values in self.axes.values())

    def takes(self, counts: Counts) -> int:
        """What a point takes, in the units of the limit."""
        asked = dict(zip(self.axes, counts, strict=True))
        layers = asked.get("layers", len(self.source.spec.blocks))
        return self.counter.of(self.shape(counts), layers)

    def shape(self, counts: Counts) -> Shape:
        """The widths of a point; None on axes on which nothing goes."""
        asked = dict(zip(self.axes, counts, strict=True))
        return widths_of(self.source, asked)

    def sizes(self, counts: Counts, layers: tuple[int, ...] | None) -> PrunedSizes:
        """The options that say a point. layers: the blocks that stay; None for all."""
        shape = self.shape(counts)
        return PrunedSizes(shape.ffn, shape.heads, shape.kv_heads, shape.experts, layers)

    def first_blocks(self, counts: Counts) -> tuple[int, ...] | None:
        """So many of the first blocks as stay; None for all. For plans: all blocks are alike."""
        asked = dict(zip(self.axes, counts, strict=True)).get("layers")
        whole = len(self.source.spec.blocks)
        return None if asked in (None, whole) else tuple(range(asked))


def widths_of(model: Outline, asked: Mapping[Axis, int]) -> Shape:
    """The widths of a block with so many on each axis; None where that is the model's own."""
    sizes = model.spec.blocks[0].sizes
    kv_heads = asked.get("kv_heads", sizes.kv_heads)
    heads = asked.get("heads", _in_group(sizes) if _grouped(sizes) else sizes.heads)
    heads = heads * kv_heads if _grouped(sizes) else min(heads, kv_heads * _in_group(sizes))
    ffn, experts = asked.get("ffn"), asked.get("experts")
    return Shape(
        ffn=None if ffn == whole_of(model, "ffn") else ffn,
        heads=None if heads == sizes.heads else heads,
        kv_heads=None if kv_heads == sizes.kv_heads else kv_heads,
        experts=None if experts == sizes.experts else experts,
    )


def grid_of(values: Sequence[int]) -> tuple[int, ...]:
    """At most GRID of them, evenly spread, the last one always."""
    if len(values) <= GRID:
        return tuple(values)
    places = {round((i + 1) * len(values) / GRID) - 1 for i in range(GRID)}
    return tuple(values[place] for place in sorted(places))


def with_points(space: SizeSpace) -> SizeSpace:
    """The space with its points; none where even the least is too much."""
    if space.shared:
        every = product(*map(grid_of, space.axes.values()))
        return replace(space, points=tuple(x for x in every if space.takes(x) <= space.limit))
    return replace(space, points=tuple(_maximal(list(_filled(space)))))


def fine_axis(space: SizeSpace) -> int:
    """Place of the axis on which a point takes what the others leave of the budget: the first one
    on which anything is saved. The others go by their grids."""
    for place in range(len(space.axes)):
        few = _with(space.whole, place, space.least[place])
        if space.takes(few) < space.takes(space.whole):
            return place
    return 0


def _filled(space: SizeSpace) -> Iterator[Counts]:
    fine, values = fine_axis(space), list(space.axes.values())
    grids = [v if i == fine else grid_of(v) for i, v in enumerate(values)]
    others = [(0,) if i == fine else grid for i, grid in enumerate(grids)]
    for point in product(*others):
        fits = _fitting(space, partial(_with, point, fine), grids[fine])
        if fits is not None:
            yield fits


def _with(point: Counts, place: int, value: int) -> Counts:
    return (*point[:place], value, *point[place + 1 :])


def _fitting(space: SizeSpace, at: Callable[[int], Counts], values: Sequence[int]) -> Counts | None:
    """The point with the largest of the values that meets the limit; by halves, as more of an axis
    never takes less."""
    low, high = 0, len(values)
    while low < high:
        middle = (low + high) // 2
        if space.takes(at(values[middle])) <= space.limit:
            low = middle + 1
        else:
            high = middle
    return at(values[low - 1]) if low else None


def _maximal(points: Sequence[Counts]) -> Iterator[Counts]:
    for point in points:
        above = (x for x in points if x != point)
        if not any(all(a >= b for a, b in zip(x, point, strict=True)) for x in above):
            yield point
