"""What stays of one tensor, as it lies on disk, when heads, channels, experts or blocks go."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.arch.resize.names import block_name, expert_name
from compress.arch.sizes import BlockSizes
from compress.arch.spec import BlockSpec, DecoderSpec, LinearSpec

# Dimensions of inner channels of an MLP, by their names in the tables.
INNER = frozenset({"mlp", "mlp2", "expert"})


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """What stays of one block: int64 indices in the source, ascending but for pooled heads; None
    for all.

    heads: query heads, equally many of each group that stays. kv_heads: heads of keys and values;
    their query heads go with them, and where each query head has its own keys, `heads` or
    `kv_heads` says both; where heads are pooled, all query heads stay, those that share one behind
    the other, and `kv_heads` has the one that stands for each group. ffn: inner channels, one
    entry, or one for each expert that stays, in order; None in a plain block of a mixture. experts:
    of the block. hidden: channels of the residual, the same in all blocks.
    """

    heads: Tensor | None = None
    kv_heads: Tensor | None = None
    ffn: tuple[Tensor, ...] | None = None
    experts: Tensor | None = None
    hidden: Tensor | None = None


def cut(block: BlockSpec | None, name: str, value: Tensor, kept: Kept) -> Tensor:
    """What stays of one tensor, as it lies on disk: the same values, fewer of them.

    block: that the tensor lies in; None for one of `spec.outside`, whose last dimension is the
    residual. Tensors that belong to no part of the decoder (`spec.copied`) are not for this
    function. name, value: of the source. An expert must be one of those that stay. A tensor of the
    block that its family does not know stays whole.

    Nothing is rescaled. Without the channels that go, the result computes what the source computes
    when these are zero, except for norms over all heads or over the residual: they divide by the
    mean of fewer squares.
    """
    if block is None:
        return _take(value, -1, kept.hidden)
    axes = dict(block.axes).get(name, ())
    linear = _linear(block, name)
    for dim, index in enumerate(_indices(axes, block, linear, kept)):
        value = _take(value, dim, index)
    return value


def cut_name(
    spec: DecoderSpec, name: str, kept: Kept, layers: Sequence[int] | None = None
) -> str | None:
    """What a tensor is called when experts (of its own block) or blocks before it have gone; None
    for a tensor that goes.

    layers: indices of the source's blocks that stay, None for all.
    """
    experts = None if kept.experts is None else kept.experts.tolist()
    within = expert_name(spec, name, experts)
    return None if within is None else block_name(spec, within, layers)


def _take(value: Tensor, dim: int, index: Tensor | None) -> Tensor:
    return value if index is None else value.index_select(dim, index.to(value.device))


def _linear(block: BlockSpec, name: str) -> LinearSpec | None:
    module = name.rpartition(".")[0]
    return next((x for x in block.linears if x.name == module), None)


def _ffn(linear: LinearSpec, sizes: BlockSizes, kept: Kept) -> Tensor | None:
    """The inner channels that stay: of the block, or of the linear's expert."""
    if kept.ffn is None:
        return None
    if linear.expert is None:
        assert len(kept.ffn) == 1, "one set of channels is for a plain MLP"
        return kept.ffn[0]
    experts = range(sizes.experts) if kept.experts is None else kept.experts.tolist()
    assert linear.expert in experts, f"expert {linear.expert} does not stay"
    assert len(kept.ffn) == len(experts), "not one set of channels for each expert that stays"
    return kept.ffn[experts.index(linear.expert)]


def _indices(
    axes: Sequence[str], block: BlockSpec, linear: LinearSpec | None, kept: Kept
) -> list[Tensor | None]:
    """What stays along each dimension; None for all."""
    sizes = block.sizes
    found: dict[str, Tensor | None] = {"hidden": kept.hidden, "experts": kept.experts}
    if linear is not None and not INNER.isdisjoint(axes):
        ffn = _ffn(linear, sizes, kept)
        found |= {"mlp": ffn, "expert": ffn}
        if ffn is not None:  # two linears, one behind the other
            found["mlp2"] = torch.cat([ffn, ffn + sizes.intermediate])
    if kept.heads is not None or kept.kv_heads is not None:
        heads, kv_heads = kept_heads(sizes, kept)
        found |= {
            "q": _runs(heads, sizes.key_width),
            "attended": _runs(heads, sizes.value_width),
            "k": _runs(kv_heads, sizes.key_width),
            "v": _runs(kv_heads, sizes.value_width),
        }
        if linear is not None and "qkv" in axes:
            found["qkv"] = _fused(block, linear, heads, kv_heads)
    return [found.get(axis) for axis in axes]


def kept_heads(sizes: BlockSizes, kept: Kept) -> tuple[Tensor, Tensor]:
    """Heads of queries, and of keys and values, that stay; each says what it can of the other."""
    group = sizes.heads // sizes.kv_heads
    own = kept.heads if group == 1 else None
    kv_heads = next(x for x in (kept.kv_heads, own, torch.arange(sizes.kv_heads)) if x is not None)
    heads = _runs(kv_heads, group) if kept.heads is None else kept.heads
    if len(heads) == sizes.heads:  # none goes: they share what stays
        runs = heads.view(len(kv_heads), -1)
        assert len(torch.unique(heads)) == len(heads), "a query head is there twice"
        assert bool((runs[:, 0] // group == kv_heads).all()), "heads of others"
        return heads, kv_heads
    each = torch.bincount(heads // group, minlength=sizes.kv_heads)
    left = each.new_zeros(sizes.kv_heads).index_fill(0, kv_heads, len(heads) // len(kv_heads))
    assert bool(each.eq(left).all()), "not equally many query heads of each group that stays"
    return heads, kv_heads


def _runs(heads: Tensor, width: int) -> Tensor:
    """Indices of all numbers of some heads: [len(heads) * width]."""
    return (heads[:, None] * width + torch.arange(width)).flatten()


def _fused(block: BlockSpec, linear: LinearSpec, heads: Tensor, kv_heads: Tensor) -> Tensor:
    """Rows of q, k and v in one linear: one part behind the other, or head by head."""
    sizes = block.sizes
    if any(fold.run for fold in block.folds if fold.writer == linear.name):
        return _runs(heads, 2 * sizes.key_width + sizes.value_width)
    keys = sizes.of("q")
    values = keys + sizes.of("k")
    q, k = _runs(heads, sizes.key_width), _runs(kv_heads, sizes.key_width)
    return torch.cat([q, k + keys, _runs(kv_heads, sizes.value_width) + values])
