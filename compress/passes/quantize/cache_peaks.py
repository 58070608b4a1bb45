"""Largest keys and values of a block over the calibration set, and the scales they ask for."""

import math

import torch
from torch import Tensor

from compress.arch.spec import BlockSpec
from compress.blocks.kv_states import PassingCache, Peak
from compress.checkpoint.shards.dtypes import TORCH_DTYPES
from compress.errors import DataError
from compress.formats import FORMATS
from compress.passes.context import PassContext
from compress.passes.ranks import largest
from compress.quant.inputs import static_scale


class Peaks:
    """Largest key and value of one block while it runs over the calibration set."""

    def __init__(self) -> None:
        self.key, self.value = Peak(), Peak()

    def cache(self, mask: Tensor | None) -> PassingCache:
        """For one call of the block. mask: bool [batch, seq], False for padding."""
        self.key.mask = self.value.mask = mask
        return PassingCache(self.key.see, self.value.see)

    def write(self, work: PassContext, block: BlockSpec) -> None:
        """Write the scales that these peaks ask for, with those of all ranks.

        Raises DataError when a key or value was NaN or infinite.
        """
        how = work.plan.kv_cache
        assert how is not None, "peaks are measured for a cache scheme"
        # fp64, as Python's numbers are: one rank's peak comes back as it is.
        mine = torch.tensor([self.key.absmax, self.value.absmax], dtype=torch.float64)
        peaks = dict(zip(("keys", "values"), largest(work.ranks, mine).tolist(), strict=True))
        for name, peak in peaks.items():
            if not math.isfinite(peak):
                raise DataError(
                    f"{name} of block {block.index} are not finite (largest magnitude: {peak});"
                    " run with --dtype fp32"
                )
        if work.ranks.rank != 0:
            return
        dtype = TORCH_DTYPES[work.checkpoint.main_dtype]
        k, v = (static_scale(torch.tensor([peak]), how, dtype) for peak in peaks.values())
        places = FORMATS[work.plan.format].cache
        assert places is not None, "the plan refuses a format that has no place for them"
        for name, tensor in places.encode(block, k, v).items():
            work.writer.write(name, tensor)
