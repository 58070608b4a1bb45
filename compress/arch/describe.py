"""Config + tensor names and shapes -> DecoderSpec, by the tables of `families`.

Works on names and numbers only: no weights are read, torch and transformers are not needed.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from compress.arch.assemble import DecoderKind, Outside, assemble
from compress.arch.families.family import Family, TensorRow
from compress.arch.families.table import FAMILIES
from compress.arch.folds import KnownBlock, resolve
from compress.arch.generic import describe_generic
from compress.arch.names import (
    Shapes,
    check_recognised,
    find_head,
    group_blocks,
    join,
    shape_of,
)
from compress.arch.sizes import BlockSizes, Sizes, read_sizes
from compress.arch.spec import BlockSpec, DecoderSpec, LinearSpec
from compress.arch.text_config import text_config
from compress.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class _Source:
    family: Family
    text: Mapping[str, Any]  # the decoder's own config
    sizes: Sizes
    tensors: Shapes
    prefix: str  # of the decoder: "model", ""


@dataclass(frozen=True, slots=True)
class _Place:
    """Path of a block and its sizes, or of the decoder, which has those of the model."""

    prefix: str
    sizes: BlockSizes | None


@dataclass(frozen=True, slots=True)
class _Found:
    tensor: str
    parameter: str
    shape: tuple[int, ...]  # logical
    axes: tuple[str, ...]  # as stored


def describe(config: Mapping[str, Any], tensors: Shapes) -> DecoderSpec:
    """What kind of decoder a checkpoint holds.

    config: config.json. tensors: shape of every tensor by its name on disk.

    Tied means that no head tensor is stored. Where the config says tied and a head is stored all
    the same, the stored one is used and kept (transformers does so when the two differ, and when
    they are equal it makes no difference).

    Raises CheckpointError when the model_type is missing, when a tensor is missing or has another
    shape than the config asks for, and when more than 5 % of a block's elements belong to tensors
    that nobody recognises.
    """
    path, text = text_config(config)
    model_type = text.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise CheckpointError(f"config.json: model_type is {model_type!r}; it must name the model")
    family = FAMILIES.get(model_type)
    if family is None or not fits(family, text):
        return describe_generic(text, tensors, model_type, path)
    sizes = read_sizes(text, family.sizes)
    prefix = _find_prefix(family, tensors, sizes.layers, model_type)
    source = _Source(family, text, sizes, tensors, prefix)
    inside = group_blocks(tensors, join(prefix, family.blocks))
    blocks = [_block(source, index, inside.get(index, ())) for index in range(sizes.layers)]
    kind = DecoderKind(model_type, model_type, path)
    return assemble(kind, sizes, _outside(source), blocks, tensors)


def fits(family: Family, text: Mapping[str, Any]) -> bool:
    """Whether a checkpoint is as the family's table takes for granted."""
    equal = all(
        text.get(key) in (None, text.get(value) if isinstance(value, str) else value)
        for key, value in family.assumes.items()
    )
    return equal and all(_reaches(text, *keys) for keys in family.at_least.items())


def _reaches(text: Mapping[str, Any], key: str, other: str) -> bool:
    value, least = text.get(key), text.get(other)
    return isinstance(value, int) and isinstance(least, int) and value >= least


def _find_prefix(family: Family, tensors: Shapes, layers: int, model_type: str) -> str:
    """Path of the decoder that holds the blocks and the embedding: "model", "", ..."""
    anchor = f"{family.blocks}.0.{family.anchor}.weight"
    found = [
        name.removesuffix(anchor).removesuffix(".")
        for name in tensors
        if name == anchor or name.endswith("." + anchor)
    ]
    # Vision towers have blocks of the same names, but no token embedding; a multi-token-prediction
    # module may have both, but fewer blocks.
    embedding = family.outside[0].disk + ".weight"
    found = [prefix for prefix in found if join(prefix, embedding) in tensors] or found
    last = f"{family.blocks}.{layers - 1}.{family.anchor}.weight"
    found = [prefix for prefix in found if join(prefix, last) in tensors] or found
    if not found:
        raise CheckpointError(
            f"no tensor is called '...{anchor}', which every {model_type} checkpoint has; config"
            " and weights are of different models, or a shard is missing"
        )
    return min(found, key=len)


def _outside(source: _Source) -> Outside:
    pairs = [
        (found.tensor, f"{source.family.root}.{found.parameter}")
        for row in source.family.outside
        for found in _row_tensors(row, None, source, _Place(source.prefix, None))
    ]
    head = find_head(source.tensors, source.prefix, source.family.head)
    if head is not None:
        shape_of(source.tensors, head, (source.sizes.vocab, source.sizes.hidden))
        pairs.append((head, "lm_head.weight"))
    elif not source.text.get("tie_word_embeddings", True):
        raise CheckpointError(
            f"tensor {source.family.head[0]} is missing, and config.json says tie_word_embeddings"
            " false; fetch the missing shard, or set it to true if the head is the embedding"
        )
    names = {row.role: join(source.prefix, row.disk) + ".weight" for row in source.family.outside}
    return Outside(names["embedding"], names["norm"], head, tuple(pairs))


def _block(source: _Source, index: int, present: Sequence[str]) -> BlockSpec:
    family, tensors = source.family, source.tensors
    prefix = join(source.prefix, f"{family.blocks}.{index}")
    sizes = source.sizes.block(index)
    place = _Place(prefix, sizes)
    linears: list[LinearSpec] = []
    modules: list[tuple[str, str]] = []
    axes: list[tuple[str, tuple[str, ...]]] = []
    for row, expert in rows_of(family, sizes):
        found = _row_tensors(row, expert, source, place)
        modules += [(each.tensor, each.parameter) for each in found]
        axes += [(each.tensor, each.axes) for each in found]
        if row.shared_input:
            linears.append(_linear(row, expert, prefix, found[0].shape))
    buffers = {f"{prefix}.{name}" for name in family.buffers}
    weighed = [name for name in present if name not in buffers]
    recognised = {tensor for tensor, _ in modules}
    unrecognised = tuple(name for name in weighed if name not in recognised)
    check_recognised(prefix, unrecognised, tensors, sum(prod(tensors[n]) for n in weighed))
    known = KnownBlock(prefix, sizes, linears, recognised, source.sizes.hidden)
    folds = resolve(family, source.text, known)
    return BlockSpec(
        index, prefix, tuple(linears), tuple(modules), unrecognised, folds, sizes, tuple(axes)
    )


def rows_of(family: Family, sizes: BlockSizes) -> Iterator[tuple[TensorRow, int | None]]:
    """The rows of a block, those of experts repeated for each (expert by expert)."""
    dense = bool(family.dense) and sizes.dense
    rows = family.attention + (family.dense if dense else family.sparse)
    rows = tuple(x for x in rows if x.where is None or bool(sizes.of(x.where[0])) == x.where[1])
    each = [row for row in rows if "{e}" in row.disk]
    yield from ((row, None) for row in rows if row not in each)
    yield from ((row, expert) for expert in range(sizes.experts) for row in each)


def _linear(row: TensorRow, expert: int | None, prefix: str, shape: tuple[int, ...]) -> LinearSpec:
    name = f"{prefix}.{expand(row.disk, expert)}"
    return LinearSpec(
        name=name,
        tensor=name + ".weight",
        shape=(shape[0], shape[1]),
        role=row.role,
        shared_input=expand(row.shared_input, expert),
        module=expand(row.target, expert),
        transposed=row.transposed,
        fused=None if row.fused is None else expand(row.fused, expert),
        expert=expert,
    )


def _row_tensors(
    row: TensorRow, expert: int | None, source: _Source, place: _Place
) -> list[_Found]:
    """The row's weight, and its bias if it has one, both checked."""
    disk, target = join(place.prefix, expand(row.disk, expert)), expand(row.target, expert)
    logical = tuple(source.sizes.of(name, place.sizes) for name in row.dims)
    order = -1 if row.transposed else 1
    shape_of(source.tensors, disk + ".weight", logical[::order])
    found = [_Found(disk + ".weight", target + ".weight", logical, row.dims[::order])]
    wanted = source.text.get(row.bias) if isinstance(row.bias, str) else row.bias
    if wanted or disk + ".bias" in source.tensors:
        shape_of(source.tensors, disk + ".bias", logical[:1])
        found.append(_Found(disk + ".bias", target + ".bias", logical[:1], row.dims[:1]))
    return found


def expand(path: str, expert: int | None) -> str:
    return path if expert is None else path.replace("{e}", str(expert))
