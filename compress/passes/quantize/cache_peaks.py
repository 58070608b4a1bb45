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
        """Write the scales that these peaks ask for.

        Raises DataError when a key or value was NaN or infinite.
        """
        how = work.plan.kv_cache
        assert how is not None, "peaks are measured for a cache scheme"
        for name, peak in (("keys", self.key), ("values", self.value)):
            if not math.isfinite(peak.absmax):
                raise DataError(
                    f"{name} of block {block.index} are not finite (largest magnitude:"
                    f" {peak.absmax}); run with --dtype fp32"
                )
        dtype = TORCH_DTYPES[work.checkpoint.main_dtype]
        k, v = (
            static_scale(torch.tensor([peak.absmax]), how, dtype) for peak in (self.key, self.value)
        )
        places = FORMATS[work.plan.format].cache
        assert places is not None, "the plan refuses a format that has no place for them"
        for name, tensor in places.encode(block, k, v).items():
            work.writer.write(name, tensor)
