"""prune_hidden: a narrower residual stream, one basis for the whole model.

`basis: pca` keeps the directions in which the normalised stream is largest. It asks for RMS norms
before attention and MLP, whose gains go into what reads them. `channels` keeps channels as they
are, those of the highest score (Minitron, https://arxiv.org/abs/2407.14679), with any norm.

Every linear that reads the stream is refitted to what it gave on the source's stream, and every one
that writes it to what brings the narrow stream to the source's. A head that is the embedding stays
it, or with `head: own` gets weights of its own.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from compress.arch.forward.norms import stream_norms
from compress.arch.resize.config import resized
from compress.arch.resize.entries import entries
from compress.arch.resize.shape import Shape
from compress.checkpoint.outline import Outline
from compress.checkpoint.shards.layout import Entry, nbytes
from compress.checkpoint.ties import head_name, tied_config
from compress.edits.counts import Amount, check_amount, counted_of
from compress.edits.edit import Edited
from compress.edits.narrowing import BasisKind
from compress.edits.writers import Repair, check_roles
from compress.errors import CheckpointError, RecipeError


@dataclass(frozen=True, slots=True)
class PruneHiddenConfig:
    """hidden: what stays of the residual's width; with a point a share of the source's, without one
    a count. multiple_of: what a share is rounded down to a multiple of.

    basis: pca or channels; None for pca where the model's norms take it. head: `own` parts it from
    the embedding where it is that; None leaves it. repair: what is refitted.
    """

    hidden: Amount
    basis: BasisKind | None = None
    head: Literal["own"] | None = None
    multiple_of: int = 1
    repair: Repair = "drift"

    def __post_init__(self) -> None:
        check_amount("hidden", self.hidden)
        if self.multiple_of < 1:
            raise RecipeError(f"multiple_of is {self.multiple_of}; it is 1 or more")

    def counted(self, source: Outline, model: Outline) -> "PruneHiddenConfig":
        """With a count; see HasShares."""
        there, of = model.spec.hidden, source.spec.hidden
        keep = counted_of("hidden", self.hidden, there, self.multiple_of, source=of)
        return replace(self, hidden=keep)


def kind(source: Outline, config: PruneHiddenConfig) -> BasisKind:
    """The basis that the model gets; CheckpointError for pca where its norms do not take it."""
    turns = stream_norms(source.config, source.spec).pass_rotations
    if config.basis == "pca" and not turns:
        raise CheckpointError(
            f"basis is pca, and {source.spec.model_type} has other norms than RMS norms before"
            " attention and MLP, which a rotation does not pass; take basis channels"
        )
    return config.basis or ("pca" if turns else "channels")


def plan(source: Outline, config: PruneHiddenConfig) -> Edited:
    """The same tensors for a narrower residual, and a head where it is parted from the embedding.

    CheckpointError for a width that transformers' class does not take, and where the model cannot
    have the basis or has a head of its own already.
    """
    check_roles(source.spec)
    kind(source, config)
    if config.head == "own" and not source.spec.tied:
        raise CheckpointError(
            f"head is own, and the model has one already ({source.spec.head}); take it out"
        )
    keep = counted_of("hidden", config.hidden, source.spec.hidden, config.multiple_of)
    shape = Shape(hidden=keep)
    made = resized(source.config, source.spec, shape)
    left = entries(source.spec, source.entries, shape)
    if config.head is None:
        return Edited(made.config, left, made.notes)
    parted, own = tied_config(made.config, tied=False), (*left, _head(source, keep))
    return Edited(parted, own, (*made.notes, *_same_bytes(source, own, keep)))


def _same_bytes(source: Outline, own: Sequence[Entry], keep: int) -> Iterator[str]:
    """A line that names the width which takes these bytes where the embedding stays the head: to
    part them costs a width of its own, and which loses less differs from model to model."""
    most = sum(map(nbytes, own))

    def fits(hidden: int) -> bool:
        left = entries(source.spec, source.entries, Shape(hidden=hidden))
        return sum(map(nbytes, left)) <= most

    widths = range(keep, source.spec.hidden + 1)
    wide = widths[bisect_left(widths, True, key=lambda hidden: not fits(hidden)) - 1]
    while wide > keep and not _is_carried(source, wide):
        wide -= 1
    if wide == source.spec.hidden:
        yield f"with a head of its own hidden {keep} takes no less than hidden {wide}, all of it"
    elif wide > keep:
        yield (
            f"with a head of its own hidden {keep} takes the bytes of hidden {wide} without: try"
            " both, and take what loses less"
        )


def _is_carried(source: Outline, hidden: int) -> bool:
    """Whether a class of transformers takes the width."""
    try:
        resized(source.config, source.spec, Shape(hidden=hidden))
    except CheckpointError:
        return False
    return True


def _head(source: Outline, keep: int) -> Entry:
    embedding = source.tensors[source.spec.embedding]
    return head_name(source.spec), embedding.dtype, (embedding.shape[0], keep)
