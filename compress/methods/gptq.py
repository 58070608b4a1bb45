"""GPTQ: accurate post-training quantization for generative pre-trained transformers.

Frantar, Ashkboos, Hoefler, Alistarh 2022, https://arxiv.org/abs/2210.17323

For a layer y = W x seen through its inputs, H = mean(x xᵀ) and the cost of storing Q for W is
tr((W - Q) H (W - Q)ᵀ), the objective of eq. (1). Columns are rounded one after the other; what a
column loses is made up for by the columns not rounded yet (eq. 2), with all that is needed of the
inverse Hessian in one Cholesky factor (section 3.3, step 3) and the later columns updated lazily in
blocks (step 2). compress_kernels.gptq_columns is that loop (Algorithm 1).

What differs from the paper, and why:
* Layers that read the same input (q/k/v; gate/up; all experts) have the same H: it is factored
  once and the loop runs over their stacked rows. Rows never interact, so this is exact.
* A group's scale comes from the weights as updated when the loop reaches the group, by a search
  that weighs each column as the objective does (R_ii², the cost of an error there).
* Act-order (the authors' code, not the paper): `static` visits columns by falling H_ii with scales
  fixed up front, so the storage order stays; `group` also groups columns in that order, which
  needs g_idx at run time.
* Dead columns (H_ii = 0) keep their nearest code instead of zero: calibration never saw them, a
  later text may.
* Damping starts at `damping` times mean(H_ii) and grows tenfold (from 0: starts again at 1e-4)
  until the factorisation succeeds.
* Where plain rounding has the lower objective, it is kept, and the report says so.

Left out: nothing of Algorithm 1. True-sequential order is the run's business.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from compress.errors import RecipeError
from compress.methods import rtn
from compress.methods.observed import UNOBSERVED, Experts, Needs, Observed
from compress.methods.outcome import Judge, Outcome, judge
from compress.methods.rtn import RtnConfig, ScaleSearch
from compress.quant.rounding import choose_scales, clip_ratios
from compress.quant.scheme import QuantScheme, Signs
from compress.quant.tensor import QuantizedTensor
from compress_kernels import FixedScales, Grid, SearchedScales, gptq_columns, hessian_factor

ActOrder = Literal["none", "static", "group"]
NO_FACTOR = "the Hessian is not positive definite under any damping"
PLAIN_IS_BETTER = "plain rounding has the lower objective"
STACKED = 1 << 26  # elements of stacked rows at once: 256 MB in fp32
LEAST_DAMPING = 1e-4  # of the ladder's second step on
DAMPING_STEPS = 5  # 0.01 to 100 times the mean diagonal; beyond that GPTQ is plain rounding


@dataclass(frozen=True, slots=True)
class GptqConfig:
    """Options of a `gptq` stage.

    damping: added to the Hessian's diagonal, as a share of its mean.
    block_size: columns between two lazy updates.
    act_order: order in which columns are rounded (see the module).
    scale_search, signs: as in `rtn`.
    true_sequential: observe each group of layers behind the already quantized ones of its block.
    experts: "all" shows every token to every expert; "routed" only those its router sends.
    min_tokens: tokens per input column under which an expert keeps plain rounding.
    """

    damping: float = 0.01
    block_size: int = 128
    act_order: ActOrder = "static"
    scale_search: ScaleSearch = "importance"
    signs: Signs = "auto"
    true_sequential: bool = False
    experts: Experts = "all"
    min_tokens: float = 2.0

    def __post_init__(self) -> None:
        if not 0 <= self.damping < math.inf:
            raise RecipeError(
                f"damping is {self.damping}; it is a share of 0 or more, such as 0.01"
            )
        if self.block_size < 1:
            raise RecipeError(f"block_size is {self.block_size}; a block holds 1 column or more")
        if not 0 <= self.min_tokens < math.inf:
            raise RecipeError(f"min_tokens is {self.min_tokens}; it is 0 or more")


def needs(config: GptqConfig) -> Needs:
    """The Hessian; and a g_idx where columns are grouped in the order they are visited."""
    return Needs(
        hessian=True,
        sequential=config.true_sequential,
        experts=config.experts,
        g_idx=config.act_order == "group",
    )


@dataclass(frozen=True, slots=True)
class GridChoice:
    """How the scales of a layer's groups are chosen: under which scheme and options, in which
    dtype."""

    scheme: QuantScheme
    config: GptqConfig
    dtype: torch.dtype

    @property
    def ratios(self) -> Tensor:
        """Clipped ranges that the search tries, as shares of the full one."""
        return clip_ratios(self.config.scale_search, self.scheme, self.config.signs)


@dataclass(frozen=True, slots=True, eq=False)
class Factor:
    """The damped Hessian as R Rᵀ, R upper triangular, columns in the order they are visited.

    R is the inverse of the paper's U (H⁻¹ = UᵀU), so an error in column i costs (error · R_ii)².
    order: int64 [K], columns by visit, None for storage order.
    damping: share of the mean diagonal that was needed.
    dead: columns that calibration never drove.
    """

    factor: Tensor
    order: Tensor | None
    damping: float
    dead: int


def factorise(hessian: Tensor, config: GptqConfig) -> Factor | None:
    """Factor of hessian [K, K], damped; None if no damping makes it positive definite."""
    diagonal = hessian.diagonal()
    dead = diagonal <= 0
    mean = float(diagonal.mean())
    order = torch.argsort(diagonal, descending=True) if config.act_order != "none" else None
    damping = config.damping
    for _ in range(DAMPING_STEPS):
        h = hessian.clone() if order is None else _columns(hessian[order], order)
        h.diagonal().add_(damping * mean)
        h.diagonal()[dead if order is None else dead[order]] = max(mean, 1e-30)
        try:
            factor = hessian_factor(h)
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            factor = None
        # A row that holds an Inf or NaN has one on the diagonal, which is what it leaves.
        if factor is not None and bool(torch.isfinite(factor.diagonal()).all()):
            return Factor(factor, order, damping, int(dead.sum()))
        damping = max(10 * damping, LEAST_DAMPING)
    return None


def _columns(matrix: Tensor, order: Tensor) -> Tensor:
    # A gather: matrix[:, order] takes 4 to 7 times as long (8 against 1.5 ms for 2816 x 512).
    return matrix.gather(1, order.expand_as(matrix))


def quantize(
    weights: Sequence[Tensor],
    scheme: QuantScheme,
    config: GptqConfig,
    *,
    scale_dtype: torch.dtype,
    observed: Observed = UNOBSERVED,
) -> list[Outcome]:
    """Quantize layers [N_i, K] that share an input.

    An expert that too few tokens reached keeps plain rounding.
    """
    hessian, expert_tokens = observed.hessian, observed.expert_tokens
    assert hessian is not None, "a pass observes every layer of a gptq stage"
    k, grid = hessian.shape[0], GridChoice(scheme, config, scale_dtype)
    if expert_tokens is not None and expert_tokens < max(1.0, config.min_tokens * k):
        reason = f"{expert_tokens} tokens reached the expert, {config.min_tokens:g} x {k} wanted"
        return [_plain(judge(w, observed.driven), grid, reason) for w in weights]
    factor = factorise(hessian, config)
    if factor is None:
        judges = (judge(w, hessian) for w in weights)
        return [_plain(layer, grid, NO_FACTOR) for layer in judges]
    outcomes = []
    for stack in _stacks(weights):
        for weight, q in zip(stack, _compensate(stack, factor, grid), strict=True):
            layer = judge(weight, hessian)
            best = Outcome(q, layer.error(q.dequantize()), "gptq", damping=factor.damping)
            plain = _plain(layer, grid, PLAIN_IS_BETTER)
            better = plain if plain.error < best.error else best
            outcomes.append(replace(better, dead=factor.dead, plain=plain.error))
    return outcomes


def _plain(layer: Judge, grid: GridChoice, reason: str) -> Outcome:
    """Round to nearest with the same grid, as the fallback; groups are named if the file wants."""
    config = grid.config
    search: ScaleSearch = "minmax" if config.scale_search == "minmax" else "importance"
    rounding = RtnConfig(search, config.signs)
    outcome = rtn.nearest(layer, grid.scheme, rounding, grid.dtype)
    q = outcome.quantized
    if config.act_order == "group":
        q = replace(q, g_idx=q.column_groups().to(torch.int32))
    return replace(outcome, quantized=q, kept=reason)


def _stacks(weights: Sequence[Tensor]) -> list[list[Tensor]]:
    """Cut a run of layers so that the rows stacked in one column loop stay within STACKED."""
    stacks: list[list[Tensor]] = []
    filled = STACKED
    for weight in weights:
        if filled + weight.numel() > STACKED:
            stacks.append([])
            filled = 0
        stacks[-1].append(weight)
        filled += weight.numel()
    return stacks


def _compensate(
    weights: Sequence[Tensor], factor: Factor, grid: GridChoice
) -> list[QuantizedTensor]:
    """Algorithm 1 over the stacked rows of all layers, split again into one tensor a layer."""
    scheme, config = grid.scheme, grid.config
    rows = torch.cat([w.float() for w in weights])  # rows: [sum N_i, K]
    k = rows.shape[1]
    step = scheme.columns_per_scale(k)
    importance = _importance(factor, config)
    fixed = _fixed_scales(weights, factor, importance, grid)
    result = gptq_columns(
        rows if factor.order is None else _columns(rows, factor.order),
        factor.factor,
        Grid(scheme.bits, scheme.symmetric, grid.dtype),
        step,
        SearchedScales(grid.ratios, importance) if fixed is None else fixed,
        config.block_size,
    )
    codes = result.codes
    g_idx = None
    if factor.order is not None:
        back = torch.argsort(factor.order)
        codes = _columns(codes, back)
        if config.act_order == "group":
            g_idx = (back // step).to(torch.int32)
    return _split(weights, codes, result.scale.to(grid.dtype), result.zero, g_idx, scheme)


def _importance(factor: Factor, config: GptqConfig) -> Tensor | None:
    """What an error in each visited column costs, [K]: R_ii² = 1 / [U_ii]² by eq. (2)."""
    if config.scale_search != "importance":
        return None
    return factor.factor.diagonal().square()


def _fixed_scales(
    weights: Sequence[Tensor],
    factor: Factor,
    importance: Tensor | None,
    grid: GridChoice,
) -> FixedScales | None:
    """Scales of all layers' rows, sum N_i, and the group of each visited column, where they are
    chosen before the loop (static order, one scale a tensor); else None."""
    scheme, ratios = grid.scheme, grid.ratios
    if grid.config.act_order != "static" and scheme.granularity != "tensor":
        return None
    k = weights[0].shape[1]
    order = factor.order
    by_storage = importance
    if importance is not None and order is not None:
        by_storage = importance[torch.argsort(order)]
    scales, zeros = [], []
    for weight in weights:
        scale, zero = choose_scales(weight, scheme, ratios, grid.dtype, by_storage)
        scales.append(scale.float().expand(weight.shape[0], -1))
        if zero is not None:
            zeros.append(zero.expand(weight.shape[0], -1))
    columns = torch.arange(k, device=factor.factor.device)
    groups = (columns // scheme.columns_per_scale(k)).to(torch.int32)
    groups = groups if order is None else groups[order]
    return FixedScales(torch.cat(scales), torch.cat(zeros) if zeros else None, groups)


def _split(
    weights: Sequence[Tensor],
    codes: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    g_idx: Tensor | None,
    scheme: QuantScheme,
) -> list[QuantizedTensor]:
    parts, start = [], 0
    for weight in weights:
        # One scale a tensor was repeated for every row; it is stored once.
        rows = slice(start, start + weight.shape[0])
        kept = slice(start, start + 1) if scheme.granularity == "tensor" else rows
        z = None if zero is None else zero[kept].contiguous()
        parts.append(
            QuantizedTensor(codes[rows].contiguous(), scale[kept].contiguous(), z, g_idx, scheme)
        )
        start += weight.shape[0]
    return parts
