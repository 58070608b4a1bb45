"""What the linears of a block read while the calibration set runs through it."""

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from compress.arch.spec import LinearSpec
from compress.blocks.capture import collect
from compress.blocks.walk import LoadedBlock
from compress_calibration.hessian import GramAccumulator, SquareSums

# Hessians held at once; a block with more (a wide mixture) is observed in several forwards.
HESSIAN_BYTES = 2 << 30


def block_grams(
    block: LoadedBlock, linears: Sequence[LinearSpec], *, magnitudes: bool = False
) -> dict[str, GramAccumulator]:
    """Sums over what linears of a block read, by shared input, in one pass over its inputs.

    magnitudes: whether to keep them beside the Hessians.
    """
    grams = {
        x.shared_input: GramAccumulator.create(
            x.shared_input, x.shape[1], device=block.skeleton.device, magnitudes=magnitudes
        )
        for x in linears
    }
    _observe(block, linears, lambda key, x: grams[key].add(x))
    return grams


def block_squares(block: LoadedBlock, linears: Sequence[LinearSpec]) -> dict[str, SquareSums]:
    """As `block_grams`, of squares alone."""
    sums = {
        x.shared_input: SquareSums.create(x.shared_input, x.shape[1], device=block.skeleton.device)
        for x in linears
    }
    _observe(block, linears, lambda key, x: sums[key].add(x))
    return sums


def _observe(
    block: LoadedBlock, linears: Sequence[LinearSpec], on_input: Callable[[str, Tensor], None]
) -> None:
    for entering in block.inputs():
        collect(
            block.module,
            linears,
            partial(block.run, entering),
            on_input,
            mask=entering.mask,
            stop_after_last=True,
        )
