"""prune: fewer heads, FFN channels, experts and blocks, so many of each as cost the least.

The recipe says what the model may take; which sizes it gets is measured, as `prune_depth` measures
which blocks go. Once they are known, all that goes is cut in one pass: a linear that loses columns
is refitted to the source's residual stream behind its block, or behind the gap that follows it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from compress.arch.resize.config import resized
from compress.arch.resize.cut import Kept
from compress.arch.resize.entries import entries
from compress.arch.resize.shape import Shape
from compress.arch.spec import BlockSpec, LinearSpec
from compress.checkpoint.outline import Outline
from compress.edits import prune_width
from compress.edits.counts import Amount, check_amount, listed
from compress.edits.edit import Edited
from compress.edits.learned import LinearChange, Site, SiteMoments
from compress.edits.prune_width import PruneWidthConfig
from compress.edits.repair.ridge import Affine
from compress.edits.select.experts import EXPERT_CHOICES
from compress.edits.writers import Repair, check_roles, refitted, writer_sites
from compress.errors import RecipeError

Axis = Literal["ffn", "heads", "kv_heads", "experts", "layers"]
# Without taylor, whose gradients of the whole model every size that is tried would ask for.
SearchedSelect = Literal["obs", "activation", "contribution", "fluctuation", "magnitude"]
WIDTHS = ("ffn", "heads", "kv_heads", "experts")
MEASURES = ("params", "bytes", "kv_bytes_per_token")


@dataclass(frozen=True, slots=True)
class SizeBudget:
    """What the model that the stage leaves takes at most, by one measure; with a point a share of
    the source's, without one a number.

    params: parameters of all tensors. bytes: of the weight files. kv_bytes_per_token: of keys and
    values in a runtime's cache.
    """

    params: Amount | None = None
    bytes: Amount | None = None
    kv_bytes_per_token: Amount | None = None

    def __post_init__(self) -> None:
        given = [name for name in MEASURES if getattr(self, name) is not None]
        if len(given) != 1:
            raise RecipeError(
                f"budget has {' and '.join(given) or 'nothing'}; it takes one of"
                f" {', '.join(MEASURES)}"
            )
        check_amount(*self.asked)

    @property
    def asked(self) -> tuple[str, Amount]:
        """The measure's name, and how much of it."""
        found = ((name, getattr(self, name)) for name in MEASURES)
        return next((name, amount) for name, amount in found if amount is not None)


@dataclass(frozen=True, slots=True)
class PrunedSizes:
    """Sizes that were chosen: counts as `prune_width` takes them, and the indices of the blocks
    that stay. None: as in the source."""

    ffn: Amount | None = None
    heads: Amount | None = None
    kv_heads: Amount | None = None
    experts: Amount | None = None
    layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name in WIDTHS:
            check_amount(name, getattr(self, name))
        kept = self.layers
        if kept is not None and (not kept or list(kept) != sorted(set(kept)) or kept[0] < 0):
            raise RecipeError(
                f"layers is {list(kept)}; it takes indices of blocks, each once, the lowest first"
            )


@dataclass(frozen=True, slots=True)
class PruneConfig:
    """budget: what is left at most. axes: what may go. multiple_of: of which channels of the MLP
    are left a multiple, where some go. select, repair: as `prune_width` has them. sizes: what was
    chosen, in place of the budget.
    """

    budget: SizeBudget | None = None
    axes: tuple[Axis, ...] = ("ffn", "heads", "layers")
    multiple_of: int = 1
    select: SearchedSelect = "obs"
    repair: Repair = "drift"
    sizes: PrunedSizes | None = None

    def __post_init__(self) -> None:
        if (self.budget is None) == (self.sizes is None):
            raise RecipeError(
                "budget is missing; say what may be left, {params: 0.6}"
                if self.budget is None
                else "sizes is given beside budget; one of them says what is left"
            )
        if not self.axes or len(set(self.axes)) < len(self.axes):
            raise RecipeError(f"axes is [{', '.join(self.axes)}]; it takes one or more, each once")
        if self.multiple_of < 1:
            raise RecipeError(f"multiple_of is {self.multiple_of}; it is 1 or more")
        experts = "experts" in self.axes or (self.sizes is not None and self.sizes.experts)
        if experts and self.select not in EXPERT_CHOICES:
            raise RecipeError(
                f"select is {self.select}, which says nothing of experts; with experts it is one of"
                f" {', '.join(EXPERT_CHOICES)}"
            )

    @property
    def is_open(self) -> bool:
        """Whether the sizes have yet to be measured."""
        return self.sizes is None

    def counted(self, source: Outline, model: Outline) -> "PruneConfig":
        """With sizes that are counts; see HasShares. A budget is counted by the search."""
        width = None if self.sizes is None else _width(self)
        if width is None:
            return self
        made = width.counted(source, model)
        counts: dict[str, Any] = {name: getattr(made, name) for name in WIDTHS}
        return replace(self, sizes=replace(_sizes(self), **counts))


def with_sizes(config: PruneConfig, sizes: PrunedSizes) -> PruneConfig:
    """The options with nothing left open."""
    return replace(config, budget=None, sizes=sizes)


def _sizes(config: PruneConfig) -> PrunedSizes:
    assert config.sizes is not None, "sizes are searched before a pass is planned"
    return config.sizes


def _width(config: PruneConfig) -> PruneWidthConfig | None:
    """What `prune_width` does of it; None where only blocks go."""
    sizes = _sizes(config)
    counts = {name: getattr(sizes, name) for name in WIDTHS}
    if all(count is None for count in counts.values()):
        return None
    return PruneWidthConfig(**counts, select=config.select, repair=config.repair)


def plan(source: Outline, config: PruneConfig) -> Edited:
    """The tensors of the blocks that stay, with fewer rows and columns.

    CheckpointError for sizes that transformers' class does not take, and for a decoder in no table.
    """
    check_roles(source.spec)
    width, layers = _width(config), _sizes(config).layers
    shape = Shape()
    if width is not None:
        shape = prune_width.shape_of(source.spec.blocks[0].sizes, width)
    shape = replace(shape, layers=layers)
    made = resized(source.config, source.spec, shape)
    left = entries(source.spec, source.entries, shape)
    notes, there = made.notes, len(source.spec.blocks)
    if layers is not None and len(layers) < there:
        notes = (*notes, f"{listed('block', layers)} of {there} stay")
    return Edited(made.config, left, notes, layers)


def sites(block: BlockSpec, config: PruneConfig) -> Iterator[Site]:
    """What writes to the residual stream, where it is cut or refitted."""
    width = _width(config)
    if width is None:
        yield from writer_sites(block, (), config.repair)
    else:
        yield from prune_width.sites(block, width)


def change(
    block: BlockSpec, linear: LinearSpec, now: Affine, seen: SiteMoments, config: PruneConfig
) -> LinearChange:
    """Choose what stays of the linear's columns, and refit it to what it should give."""
    width = _width(config)
    if width is not None:
        return prune_width.change(block, linear, now, seen, width)
    made = refitted(linear, now, seen, None, config.repair)
    return LinearChange(linear, made.now, Kept(), made.fact)


def neutral(config: PruneConfig) -> PruneConfig:
    """All that is named stays whole, and the first block stays."""
    sizes = _sizes(config)
    whole: dict[str, Any] = {x: 1.0 for x in WIDTHS if getattr(sizes, x) is not None}
    return with_sizes(config, PrunedSizes(**whole))
