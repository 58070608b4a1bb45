"""FoldRows of a family's table -> FoldPairs of one block."""

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

from compress.arch.families.family import Family, FoldRow
from compress.arch.names import join
from compress.arch.sizes import BlockSizes
from compress.arch.spec import FoldPair, LinearSpec


@dataclass(frozen=True, slots=True)
class KnownBlock:
    """What the tables know of a block: its path and sizes, its linears, its recognised tensors on
    disk, the width of the residual."""

    prefix: str
    sizes: BlockSizes
    linears: Sequence[LinearSpec]
    tensors: AbstractSet[str]
    hidden: int

    def channels(self, name: str) -> int:
        """Their number, by its name in the tables."""
        return self.hidden if name == "hidden" else self.sizes.of(name)


def resolve(family: Family, text: Mapping[str, Any], block: KnownBlock) -> tuple[FoldPair, ...]:
    """The fold pairs of a block, in order; pairs of experts one expert at a time.

    text: the decoder's own config.
    """
    return tuple(
        pair
        for row in family.folds
        if row.only is None or text.get(row.only[0]) in (None, row.only[1])
        for expert in _experts(row, block.sizes)
        for pair in _pair(row, expert, family, block)
    )


def _experts(row: FoldRow, sizes: BlockSizes) -> Sequence[int | None]:
    return range(sizes.experts) if "{e}" in row.writer else (None,)


def _pair(
    row: FoldRow, expert: int | None, family: Family, block: KnownBlock
) -> Iterator[FoldPair]:
    """The row's pair, if the block has its writer."""
    linears, tensors = block.linears, block.tensors
    disk = row.writer if expert is None else row.writer.replace("{e}", str(expert))
    writer = join(block.prefix, disk)
    if f"{writer}.weight" not in tensors:
        return
    readers = [x for x in linears if x.role in row.readers and expert in (None, x.expert)]
    linear = any(x.name == writer for x in linears)
    channels, skipped = block.channels(row.channels), sum(map(block.channels, row.skip))
    run = block.sizes.value_width if row.by_head else channels
    repeat = readers[0].shape[1] // channels
    yield FoldPair(
        writer=writer,
        kind="linear" if linear else "norm",
        tensors=tuple(t for t in (f"{writer}.weight", f"{writer}.bias") if t in tensors),
        rows=(skipped, skipped + channels + skipped * (channels // run - 1)),
        readers=tuple(x.name for x in readers),
        shared_input=readers[0].shared_input,
        repeat=repeat,
        head_dim=block.sizes.value_width if repeat > 1 else 0,
        run=run if row.by_head else 0,
        gap=skipped if row.by_head else 0,
        offset=0.0 if linear else family.norm_offset,
    )
