"""The tensors of a decoder with other sizes, from those of the source: what a plan needs."""

from collections.abc import Iterable

from compress.arch.families.table import FAMILIES
from compress.arch.resize.names import block_name, expert_name
from compress.arch.resize.shape import Shape, kept_layers, sizes_after
from compress.arch.sizes import BlockSizes, Sizes
from compress.arch.spec import DecoderSpec
from compress.errors import CheckpointError

# Name, dtype code and shape, as compress.checkpoint.shards.layout has them.
StoredTensor = tuple[str, str, tuple[int, ...]]


def entries(
    spec: DecoderSpec, tensors: Iterable[StoredTensor], shape: Shape
) -> tuple[StoredTensor, ...]:
    """Name, dtype and shape of every tensor that a shape leaves, in the source's order.

    tensors: of the source. `describe` takes them together with the config of `resized`.

    Raises CheckpointError as `resized` does for sizes, and where a tensor that no table knows may
    have to change with the widths.
    """
    sizes, layers = sizes_after(spec, shape), kept_layers(spec, shape)
    _refuse_unknown(spec, sizes, layers)
    axes = _axes(spec, sizes, layers)
    outside = {name for name, _ in spec.outside}
    experts = None if shape.experts is None else range(shape.experts)
    found = []
    for name, dtype, old in tensors:
        within = expert_name(spec, name, experts)
        new = None if within is None else block_name(spec, within, layers)
        if new is None:
            continue
        if name in axes:
            block, dims = axes[name]
            found.append((new, dtype, tuple(sizes.of(dim, block) for dim in dims)))
        elif name in outside:
            found.append((new, dtype, (*old[:-1], sizes.hidden)))
        else:
            _refuse_reader(spec, sizes, name, old)
            found.append((new, dtype, old))
    return tuple(found)


def _axes(
    spec: DecoderSpec, sizes: Sizes, layers: Iterable[int]
) -> dict[str, tuple[BlockSizes, tuple[str, ...]]]:
    """New sizes and names of dimensions of every tensor of the blocks that stay, by name."""
    return {
        name: (sizes.blocks[place], dims)
        for place, index in enumerate(layers)
        for name, dims in spec.blocks[index].axes
    }


def _refuse_unknown(spec: DecoderSpec, sizes: Sizes, layers: Iterable[int]) -> None:
    same = sizes.blocks == tuple(spec.blocks[index].sizes for index in layers)
    unknown = [name for block in spec.blocks for name in block.unrecognised]
    if unknown and not (same and sizes.hidden == spec.hidden):
        raise CheckpointError(
            f"tensor {unknown[0]} is in no row of {spec.model_type}'s table, so nobody knows what"
            " it becomes at other widths; only blocks can be taken out of this model"
        )


def _refuse_reader(spec: DecoderSpec, sizes: Sizes, name: str, dims: tuple[int, ...]) -> None:
    """A tower beside the decoder that writes or reads the residual would no longer fit."""
    buffer = any(name.endswith(f".{x}") for x in FAMILIES[spec.family].buffers)
    if sizes.hidden != spec.hidden and spec.hidden in dims and not buffer:
        raise CheckpointError(
            f"tensor {name} lies outside of the decoder and has shape {list(dims)}, as wide as the"
            f" residual ({spec.hidden}); hidden cannot be cut in this model, leave it out"
        )
