"""What the linears of a block read while the calibration set runs through it."""

from collections.abc import Sequence
from functools import partial

from compress.arch.spec import LinearSpec
from compress.blocks.capture import collect
from compress.blocks.walk import LoadedBlock
from compress_calibration.hessian import GramAccumulator

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
    for entering in block.inputs():
        collect(
            block.module,
            linears,
            partial(block.run, entering),
            lambda key, x: grams[key].add(x),
            mask=entering.mask,
            stop_after_last=True,
        )
    return grams
