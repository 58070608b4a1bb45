"""Shape: the sizes that a structural edit changes, and the sizes of all blocks after it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from compress.arch.families.table import FAMILIES
from compress.arch.forward.table import FORWARDS
from compress.arch.sizes import BlockSizes, Sizes
from compress.arch.spec import DecoderSpec
from compress.errors import CheckpointError

SHOWN = 6  # counts that a refusal lists


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes that structural edits change, equal in all blocks. None: as the source has it.

    hidden: width of the residual. ffn: inner width of the MLP; in a mixture that of each expert,
    while its plain blocks keep theirs. heads: query heads. kv_heads: heads of keys and values;
    where each query head has its own, one of the two says both. pooled: all query heads stay and
    share the heads of keys and values that `kv_heads` says. experts: of each mixture.
    layers: indices of the source's blocks that stay, ascending.
    """

    hidden: int | None = None
    ffn: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    experts: int | None = None
    layers: tuple[int, ...] | None = None
    pooled: bool = False

    def widths(self) -> Iterator[tuple[str, int | None]]:
        """All sizes but `layers`, by name."""
        yield "hidden", self.hidden
        yield "ffn", self.ffn
        yield "heads", self.heads
        yield "kv_heads", self.kv_heads
        yield "experts", self.experts


def sizes_after(spec: DecoderSpec, shape: Shape) -> Sizes:
    """Sizes of the decoder that a shape leaves.

    Raises CheckpointError for a decoder in no table, and for sizes that are 0, above the source's,
    or not of equal groups of query heads; with the counts that would fit.
    """
    if spec.family not in FAMILIES:
        raise CheckpointError(
            f"model type {spec.model_type!r} is in no table of architectures, so its sizes cannot"
            f" be changed; known are {', '.join(FAMILIES)}"
        )
    _check_bounds(spec, shape)
    layers = kept_layers(spec, shape)
    blocks = tuple(_block(spec, spec.blocks[index].sizes, shape) for index in layers)
    return Sizes(
        hidden=shape.hidden or spec.hidden,
        layers=len(layers),
        vocab=spec.vocab,
        context=spec.context,
        experts_per_token=spec.experts_per_token,
        blocks=blocks,
    )


def kept_layers(spec: DecoderSpec, shape: Shape) -> tuple[int, ...]:
    """Indices of the source's blocks that stay. CheckpointError for none, or for unknown ones."""
    count = len(spec.blocks)
    if shape.layers is None:
        return tuple(range(count))
    if not shape.layers:
        raise CheckpointError(f"layers is empty; 1 to {count} of the source's blocks can stay")
    unknown = [index for index in shape.layers if not 0 <= index < count]
    if unknown:
        raise CheckpointError(f"layers has {unknown[0]}; the source's blocks are 0 to {count - 1}")
    assert list(shape.layers) == sorted(set(shape.layers)), "layers are not ascending"
    return shape.layers


def head_counts(spec: DecoderSpec, kv_heads: int) -> list[int]:
    """Numbers of query heads that can stay beside so many heads of keys and values."""
    sizes = spec.blocks[0].sizes
    if sizes.heads == sizes.kv_heads:
        return list(range(1, sizes.heads + 1))
    return [kv_heads * each for each in range(1, sizes.heads // sizes.kv_heads + 1)]


def listed(counts: Sequence[int], near: int) -> str:
    """The counts that are nearest to one, in words."""
    shown = sorted(sorted(counts, key=lambda count: abs(count - near))[:SHOWN])
    *most, last = map(str, shown)
    return f"{', '.join(most)} or {last}" if most else last


def _check_bounds(spec: DecoderSpec, shape: Shape) -> None:
    sizes = spec.blocks[0].sizes
    mixture = spec.experts > 0
    source = {
        "hidden": spec.hidden,
        "ffn": sizes.expert if mixture else sizes.intermediate,
        "heads": sizes.heads,
        "kv_heads": sizes.kv_heads,
        "experts": sizes.experts,
    }
    for name, wanted in shape.widths():
        if wanted is None:
            continue
        if name == "experts" and not mixture:
            raise CheckpointError(
                f"experts is {wanted}; the model is no mixture of experts, so leave it out"
            )
        chosen = _experts_per_token(spec) if name == "experts" else 1
        if not chosen <= wanted <= source[name]:
            each = f", as each token takes {chosen}" if chosen > 1 else ""
            raise CheckpointError(
                f"{name} is {wanted}; it must be {chosen} to {source[name]}, the source's{each}"
            )


def _experts_per_token(spec: DecoderSpec) -> int:
    return spec.experts_per_token or FORWARDS[spec.family].experts_per_token or 1


def _block(spec: DecoderSpec, sizes: BlockSizes, shape: Shape) -> BlockSizes:
    heads, kv_heads = _heads(spec, sizes, shape)
    changed = replace(sizes, heads=heads, kv_heads=kv_heads)
    if shape.experts is not None:
        changed = replace(changed, experts=shape.experts)
    if shape.ffn is None:
        return changed
    # A mixture with plain blocks beside its experts has a width of its own for each kind.
    apart = sizes.experts > 0 and FAMILIES[spec.family].dense
    return replace(
        changed, expert=shape.ffn, intermediate=sizes.intermediate if apart else shape.ffn
    )


def _pooled(sizes: BlockSizes, shape: Shape) -> int:
    """Heads of keys and values of which each stands for equally many."""
    there, left = sizes.kv_heads, shape.kv_heads
    assert left is not None, "nothing is pooled"
    if there % left:
        counts = [count for count in range(1, there) if there % count == 0]
        raise CheckpointError(
            f"{left} heads of keys and values do not stand for equally many of the model's"
            f" {there}; {listed(counts, left)} do"
        )
    return left


def _heads(spec: DecoderSpec, sizes: BlockSizes, shape: Shape) -> tuple[int, int]:
    """Heads of queries, and of keys and values. A group loses its query heads with its keys."""
    if shape.heads is None and shape.kv_heads is None:
        return sizes.heads, sizes.kv_heads
    if sizes.latent is not None:
        raise CheckpointError(
            f"{spec.model_type} has latent attention, whose keys and values are made of one latent;"
            " its heads stay, cut ffn or layers"
        )
    if shape.pooled:
        return sizes.heads, _pooled(sizes, shape)
    group = sizes.heads // sizes.kv_heads
    if group == 1:  # each query head has keys and values of its own, and takes them along
        kv_heads = shape.kv_heads or shape.heads or sizes.kv_heads
        heads = shape.heads or kv_heads
    else:
        kv_heads = shape.kv_heads or sizes.kv_heads
        heads = shape.heads or kv_heads * group
    if heads % kv_heads or heads > kv_heads * group:
        counts = [kv_heads * each for each in range(1, group + 1)]
        raise CheckpointError(
            f"heads is {heads}; with kv_heads {kv_heads} it must be {listed(counts, heads)}, as"
            f" each group keeps equally many query heads of its {group}"
        )
    return heads, kv_heads
