"""gqa: fewer heads of keys and values, which all query heads share; the cache shrinks with them.

GQA: Training generalized multi-query transformer models from multi-head checkpoints. Ainslie et al.
2023, https://arxiv.org/abs/2305.13245. There the heads of a group become their mean, neighbours
share, and 5 % of the pretraining mends it. Here a head is shared as scores and outputs lose least
(`pool: pca`, compress/edits/pool/principal.py), heads share that lose least together, and with
`repair: drift` the outputs of attention and MLP are refitted to the source's residual stream.
`align`, `mean` and `first` are there to compare with.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from compress.arch.forward.forward import describe_forward
from compress.arch.resize.config import resized
from compress.arch.resize.entries import entries
from compress.arch.resize.shape import Shape
from compress.arch.spec import BlockSpec, LinearSpec
from compress.checkpoint.outline import Outline
from compress.edits.counts import Amount, check_amount, counted_of
from compress.edits.edit import Edited
from compress.edits.learned import HeadChoice, LinearChange, Site, SiteMoments
from compress.edits.pool import POOLS, chosen_groups
from compress.edits.repair.ridge import Affine
from compress.edits.writers import check_roles, mended, writer_sites
from compress.errors import CheckpointError, RecipeError
from compress.report.units import counted

HEADS = ("q", "k", "v", "qkv", "o")  # roles of what becomes something else when heads share


@dataclass(frozen=True, slots=True)
class GqaConfig:
    """groups: heads of keys and values that stay; with a point a share of the source's, without one
    a count. pool: how several become one. repair: what is refitted."""

    groups: Amount | None = None
    pool: Literal["pca", "align", "mean", "first"] = "pca"
    repair: Literal["drift", "none"] = "drift"

    def __post_init__(self) -> None:
        check_amount("groups", self.groups)
        if self.groups is None:
            raise RecipeError("groups is missing; say how many heads of keys and values stay")

    def counted(self, source: Outline, model: Outline) -> "GqaConfig":
        """With a count; see HasShares."""
        check_roles(model.spec)
        there, of = (x.spec.blocks[0].sizes.kv_heads for x in (model, source))
        return replace(self, groups=counted_of("groups", _amount(self), there, source=of))


def plan(source: Outline, config: GqaConfig) -> Edited:
    """The same tensors with fewer rows of keys and values.

    CheckpointError for a class whose query heads have keys of their own, for norms over all heads
    of queries and of keys, for `align` behind norms over each, and for groups of unequal sizes;
    RecipeError where nothing would be saved.
    """
    check_roles(source.spec)
    there = source.spec.blocks[0].sizes.kv_heads
    left = counted_of("groups", _amount(config), there)
    if left == there:
        fewer = "; give fewer" if there > 1 else ", which all query heads share; leave gqa out"
        heads = counted(there, "head")
        raise RecipeError(
            f"groups is {config.groups}, and the model has {heads} of keys and values{fewer}"
        )
    shape = Shape(kv_heads=left, pooled=True)
    made = resized(source.config, source.spec, shape)
    _check_forward(source, config)
    return Edited(made.config, entries(source.spec, source.entries, shape), made.notes)


def _amount(config: GqaConfig) -> Amount:
    assert config.groups is not None, "the options are checked"
    return config.groups


def _check_forward(source: Outline, config: GqaConfig) -> None:
    """CheckpointError for what pooled keys would not pass through."""
    forward = describe_forward(source.config, source.spec)
    for block in source.spec.blocks:
        kind = forward.grouped(block.index)
        if kind.qk_norm == "full":
            raise CheckpointError(
                f"{source.spec.model_type} has norms over all heads of queries and of keys, which"
                " heads cannot share alone; gqa takes models with norms over each head, or without"
            )
        if kind.qk_norm == "head" and POOLS[config.pool].behind_norm is None:
            raise CheckpointError(
                f"{source.spec.model_type} has a norm behind queries and keys, through which what"
                f" turns them does not pass; take another pool than {config.pool}"
            )
        if kind.key_width % 2:
            raise CheckpointError(
                f"heads of keys have {kind.key_width} numbers; gqa takes them in twos"
            )


def sites(block: BlockSpec, config: GqaConfig) -> Iterator[Site]:
    """All linears of attention at once, then what writes to the residual stream."""
    left = counted_of("groups", _amount(config), block.sizes.kv_heads)
    choice = HeadChoice(left, chosen_groups, POOLS[config.pool])
    yield Site(tuple(x for x in block.linears if x.role in HEADS), heads=choice)
    yield from writer_sites(block, (), config.repair)


def change(
    block: BlockSpec, linear: LinearSpec, now: Affine, seen: SiteMoments, config: GqaConfig
) -> LinearChange:
    """Refit a linear to the source's residual stream."""
    return mended(linear, now, seen, config.repair)


def neutral(config: GqaConfig) -> GqaConfig:
    """Every head stays."""
    return replace(config, groups=1.0)
