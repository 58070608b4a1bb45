"""prune_depth: fewer blocks.

Which blocks go is measured: by what the model loses without them (`by: loss`), by how little they
change the residual stream (`influence`: ShortGPT, https://arxiv.org/abs/2403.03853), or by how
little a run of neighbours does (`angular`: https://arxiv.org/abs/2403.17887). The block before a
gap takes the gap over: with `repair: drift` its outputs, and those of all others, are refitted to
the source's residual stream behind the gap.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from compress.arch.resize.config import resized
from compress.arch.resize.entries import entries
from compress.arch.resize.shape import Shape
from compress.arch.spec import BlockSpec, LinearSpec
from compress.checkpoint.outline import Outline
from compress.edits.counts import Amount, check_amount, counted_of, listed
from compress.edits.edit import Edited
from compress.edits.learned import LinearChange, Site, SiteMoments
from compress.edits.repair.ridge import Affine
from compress.edits.writers import check_roles, mended, writer_sites
from compress.errors import CheckpointError, RecipeError

By = Literal["loss", "influence", "angular"]


@dataclass(frozen=True, slots=True)
class PruneDepthConfig:
    """layers: blocks that stay; with a point a share of the source's, without one a count.

    by: what is measured to choose them. keep: the blocks that stay, by index, in place of both.
    repair: what is refitted.
    """

    layers: Amount | None = None
    by: By = "loss"
    keep: tuple[int, ...] | None = None
    repair: Literal["drift", "none"] = "drift"

    def __post_init__(self) -> None:
        check_amount("layers", self.layers)
        if (self.layers is None) == (self.keep is None):
            raise RecipeError(
                "layers is missing; say how many blocks stay, or with keep which ones"
                if self.layers is None
                else "keep is given beside layers; one of them says what stays"
            )
        kept = self.keep
        if kept is not None and (not kept or list(kept) != sorted(set(kept)) or kept[0] < 0):
            raise RecipeError(
                f"keep is {list(kept)}; it takes indices of blocks, each once, the lowest first"
            )

    @property
    def is_open(self) -> bool:
        """Whether which blocks stay has yet to be measured."""
        return self.keep is None

    def counted(self, source: Outline, model: Outline) -> "PruneDepthConfig":
        """With a count; see HasShares."""
        if self.layers is None:
            return self
        there, of = len(model.spec.blocks), len(source.spec.blocks)
        return replace(self, layers=counted_of("layers", self.layers, there, source=of))


def count_of(source: Outline, config: PruneDepthConfig) -> int:
    """How many blocks stay; RecipeError for more than there are."""
    assert config.layers is not None, "the blocks that stay are known"
    return counted_of("layers", config.layers, len(source.spec.blocks))


def plan(source: Outline, config: PruneDepthConfig) -> Edited:
    """The tensors of the blocks that stay, which are numbered anew; of the first ones where it is
    not measured yet: all are alike in shape.

    CheckpointError for blocks that are not alike, and where config.json cannot say what is left.
    """
    check_roles(source.spec)
    keep, there = config.keep, len(source.spec.blocks)
    known = keep is not None
    if keep is None:
        require_alike(source)
        count = count_of(source, config)
        # Any may go, so what config.json cannot say of the last ones is refused before measuring.
        resized(source.config, source.spec, Shape(layers=tuple(range(there - count, there))))
        keep = tuple(range(count))
    shape = Shape(layers=keep)
    made = resized(source.config, source.spec, shape)
    left = entries(source.spec, source.entries, shape)
    notes = (*made.notes, f"{listed('block', keep)} of {there} stay") if known else made.notes
    return Edited(made.config, left, notes, keep)


def require_alike(source: Outline) -> None:
    """Only then is the result's size known before it is measured which blocks go."""

    def shapes(block: BlockSpec) -> list[tuple[str, tuple[int, ...]]]:
        return [(path, source.shapes[tensor]) for tensor, path in block.modules]

    first, *others = source.spec.blocks
    odd = next((x.index for x in others if shapes(x) != shapes(first)), None)
    if odd is not None:
        raise CheckpointError(
            f"block {odd} has other tensors than block 0, so the size of the result would depend on"
            " which blocks go; name those that stay with keep"
        )


def sites(block: BlockSpec, config: PruneDepthConfig) -> Iterator[Site]:
    """What writes to the residual stream, where it is refitted."""
    yield from writer_sites(block, (), config.repair)


def change(
    block: BlockSpec, linear: LinearSpec, now: Affine, seen: SiteMoments, config: PruneDepthConfig
) -> LinearChange:
    """Refit a linear to the source's residual stream."""
    return mended(linear, now, seen, config.repair)


def neutral(config: PruneDepthConfig) -> PruneDepthConfig:
    """The first block stays: nothing is to be mended behind it."""
    return replace(config, layers=1.0, keep=None)
