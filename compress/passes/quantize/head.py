"""The output head in a calibrated run: observed behind the last block, solved run by run of rows.

A head has as many rows as the vocabulary has tokens (152,064 x 3584 weights in Qwen2-7B), so it is
never in fp32 as a whole; its rows do not depend on each other.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from compress.blocks.walk import Chain
from compress.checkpoint.shards.dtypes import TORCH_DTYPES
from compress.methods import METHODS
from compress.methods.observed import Observed
from compress.methods.outcome import judge
from compress.passes.context import PassContext, finish_unit, read_in_rows, read_weight
from compress.passes.quantize.observe import needs_magnitudes, sum_over
from compress.passes.quantize.solve import write_solved
from compress.passes.quantize.stream import WeighedOutcome, join_runs
from compress.passes.ranks import decided
from compress.passes.units import HEAD
from compress.plan.layers import ModulePlan
from compress.plan.output_format import scale_dtype
from compress.report.schema import Layer
from compress_calibration.hessian import GramAccumulator, InputStats


def quantize_head(work: PassContext, chain: Chain, head: ModulePlan) -> None:
    """Observe, quantize and write the head; record it. chain: behind its last block."""
    stats = _observe(work, chain, head)
    layer = decided(work.ranks, partial(_write, work, head, stats))
    finish_unit(work, HEAD, [head.linear.tensor], [replace(layer, passes=1)])


def _write(work: PassContext, head: ModulePlan, stats: InputStats) -> Layer:
    outcome = join_runs(_solve(work, head, stats), head.scheme)
    dtype = TORCH_DTYPES[work.checkpoint.tensors[head.linear.tensor].dtype]
    return write_solved(work, head, outcome, stats, dtype)[1]


def _observe(work: PassContext, chain: Chain, head: ModulePlan) -> InputStats:
    """Statistics of the last block's outputs behind the final norm."""
    width = head.linear.shape[1]
    wanted = needs_magnitudes(work, head)
    gram = GramAccumulator.create(HEAD, width, device=work.device, magnitudes=wanted)
    for batch, read in zip(chain.batches, chain.final(), strict=True):  # read: [rows, length, K]
        mask = batch.mask
        gram.add(read.reshape(-1, width) if mask is None else read[mask.to(read.device)])
    return sum_over(work.ranks, gram).stats()


def _solve(work: PassContext, head: ModulePlan, stats: InputStats) -> Iterator[WeighedOutcome]:
    """From runs of its rows, each with the energy of what it gives."""
    stage = work.plan.recipe.stages[head.stage]
    for stored in _rows(work, head):
        rows = stored.to(work.device)
        (outcome,) = METHODS[stage.method].by_layer(
            [rows],
            head.scheme,
            stage.config,
            scale_dtype=scale_dtype(work.plan.format, stored.dtype),
            observed=Observed(stats.hessian, stats.absmax),
        )
        yield outcome, judge(rows, stats.hessian).whole


def _rows(work: PassContext, head: ModulePlan) -> Iterator[Tensor]:
    """Runs of rows; the head in one where a number of its scheme is for all of it."""
    return iter([read_weight(work, head)]) if head.scheme.is_fp4 else read_in_rows(work, head)


def round_rows(work: PassContext, embedding: ModulePlan, rows: Tensor) -> Tensor:
    """Rows of the embedding, in the source's dtype, as the result will mean them: in fp32."""
    stage = work.plan.recipe.stages[embedding.stage]
    (outcome,) = METHODS[stage.method].by_layer(
        [rows.float()], embedding.scheme, stage.config, scale_dtype=rows.dtype
    )
    weight: Tensor = outcome.quantized.dequantize(torch.float32)
    return weight
