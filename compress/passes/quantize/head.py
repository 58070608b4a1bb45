"""The output head in a calibrated run: observed behind the last block, solved run by run of rows.

A head has as many rows as the vocabulary has tokens (152,064 x 3584 weights in Qwen2-7B), so it is
never in fp32 as a whole; its rows do not depend on each other.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from compress.blocks.skeleton import BlockContext
from compress.checkpoint.shards.dtypes import TORCH_DTYPES
from compress.methods import METHODS
from compress.methods.observed import Observed
from compress.methods.outcome import Outcome, judge
from compress.passes.context import PassContext, finish_unit, read_in_rows, read_weight
from compress.passes.hidden_states import HiddenStates
from compress.passes.quantize.observe import Batches, needs_magnitudes
from compress.passes.quantize.solve import write_solved
from compress.passes.quantize.stream import join_outcomes
from compress.passes.units import HEAD
from compress.plan.layers import ModulePlan
from compress.plan.output_format import scale_dtype
from compress_calibration.hessian import GramAccumulator, InputStats


def quantize_head(
    work: PassContext, batches: Batches, head: ModulePlan, source: HiddenStates
) -> None:
    """Observe, quantize and write the head; record it. source: what the last block gives."""
    stats = _observe(work, batches, head, source)
    outcome = _solve(work, head, stats)
    dtype = TORCH_DTYPES[work.checkpoint.tensors[head.linear.tensor].dtype]
    _, layer = write_solved(work, head, outcome, stats, dtype)
    finish_unit(work, HEAD, [head.linear.tensor], [replace(layer, passes=1)])


def _observe(
    work: PassContext, batches: Batches, head: ModulePlan, source: HiddenStates
) -> InputStats:
    """Statistics of the last block's outputs behind the final norm."""
    width = head.linear.shape[1]
    wanted = needs_magnitudes(work, head)
    gram = GramAccumulator.create(HEAD, width, device=work.device, magnitudes=wanted)

    def add(hidden: Tensor, mask: Tensor | None, context: BlockContext, start: int) -> None:
        read = batches.skeleton.final_hidden(work.weights, hidden)  # [rows, length, width]
        gram.add(read.reshape(-1, width) if mask is None else read[mask.to(read.device)])

    batches.forward(source, add)
    return gram.stats()


def _solve(work: PassContext, head: ModulePlan, stats: InputStats) -> Outcome:
    """The whole head, from runs of its rows."""
    stage = work.plan.recipe.stages[head.stage]
    outcomes, cost, energy = [], 0.0, 0.0
    for stored in _rows(work, head):
        rows = stored.to(work.device)
        (outcome,) = METHODS[stage.method].quantize(
            [rows],
            head.scheme,
            stage.config,
            scale_dtype=scale_dtype(work.plan.format, stored.dtype),
            observed=Observed(stats.hessian, stats.absmax),
        )
        whole = judge(rows, stats.hessian).whole
        cost, energy = cost + outcome.error * whole, energy + whole
        outcomes.append(outcome)
    return join_outcomes(outcomes, head.scheme, cost / energy if energy > 0 else 0.0)


def _rows(work: PassContext, head: ModulePlan) -> Iterator[Tensor]:
    """Runs of rows; the head in one where a number of its scheme is for all of it."""
    return iter([read_weight(work, head)]) if head.scheme.is_fp4 else read_in_rows(work, head)


def round_rows(work: PassContext, embedding: ModulePlan, rows: Tensor) -> Tensor:
    """Rows of the embedding, in the source's dtype, as the result will mean them: in fp32."""
    stage = work.plan.recipe.stages[embedding.stage]
    (outcome,) = METHODS[stage.method].quantize(
        [rows.float()], embedding.scheme, stage.config, scale_dtype=rows.dtype
    )
    weight: Tensor = outcome.quantized.dequantize(torch.float32)
    return weight
