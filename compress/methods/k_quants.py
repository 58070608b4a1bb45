"""k-quants: llama.cpp's blocks, whose sub-blocks have scales and minima of few bits themselves.

Kawrakow 2023 and 2024, https://github.com/ggml-org/llama.cpp/pull/1684 (the types) and
https://github.com/ggml-org/llama.cpp/pull/4861 (errors weighed by an importance matrix)

A super-block holds 256 numbers of a row in sub-blocks of 16 or 32; a number is
d * scale * code - dmin * minimum, with d and dmin in fp16 for all and small whole numbers scale and
minimum for each sub-block. compress_kernels.round_blocks chooses them all with the weighted squared
error in view: the range of each sub-block is searched, its step and offset are refitted to its
codes, whole numbers and codes are chosen for exactly the d and dmin that are stored, and those by
least squares over the super-block.

What differs from llama.cpp, and why:
* An error weighs what calibration says of its column, not that times sqrt(sigma² + x²): the aim is
  the output of the layer, and large weights have no more of it. (Their factor stands in for what an
  importance matrix does not know.)
* d and dmin are chosen with the whole numbers and the codes, not each alone.
* What a column loses is made up for by the columns not rounded yet, as GPTQ does (gptq.py): block
  after block, scales chosen from the weights as updated so far with R_ii² as importance, then codes
  column by column. Blocks are visited by falling sum of H_ii, their columns by falling H_ii; both
  stay where they are in the file. Where this loses more than rounding alone, that is kept.

KL divergence on tale-6m is 0.53 to 0.63 of that of llama-quantize with llama-imatrix at equal
bytes, type by type (benchmarks/results/export_k_quants.json).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from compress.errors import RecipeError
from compress.methods.gptq import DAMPING_STEPS, LEAST_DAMPING, NO_FACTOR, PLAIN_IS_BETTER
from compress.methods.observed import UNOBSERVED, Needs, Observed
from compress.methods.outcome import Judge, judge
from compress.methods.rtn import UNSEEN
from compress.quant.ggml_kinds import KINDS, SUPER_BLOCK
from compress.quant.ggml_mixtures import mixture_of, type_of
from compress_kernels import decode_blocks, hessian_factor, round_blocks, settle_blocks


@dataclass(frozen=True, slots=True)
class KQuantsConfig:
    """How weights are rounded into blocks.

    compensate: whether what a column loses is made up for by the later ones, as GPTQ does, where
        that lowers the error. Needs calibration data.
    importance: whether errors weigh what calibration says of their columns. Needs it, too.
    damping: added to the Hessian's diagonal, as a share of its mean.
    min_tokens: tokens per input column under which an expert is not compensated.
    """

    compensate: bool = True
    importance: bool = True
    damping: float = 0.01
    min_tokens: float = 2.0

    def __post_init__(self) -> None:
        for name in ("damping", "min_tokens"):
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise RecipeError(f"{name} is {value}; it is 0 or more")


@dataclass(frozen=True, slots=True)
class TypeOfLayers:
    """A type of blocks, a key of compress.quant.ggml_mixtures.PURE, and patterns of the layers that
    have it."""

    type: str
    layers: tuple[str, ...]

    def __post_init__(self) -> None:
        type_of(self.type, "type")
        if not self.layers:
            raise RecipeError("layers is empty; name those that have the type, or take it out")


@dataclass(frozen=True, slots=True)
class KQuantsStageConfig(KQuantsConfig):
    """Options of a `k_quants` stage.

    type: a mixture of types by llama.cpp's name, a key of compress.quant.ggml_mixtures.MIXTURES or
        of its ALIASES.
    types: layers that have another type than the mixture gives them; the first that names a layer
        counts.
    candidates: types of which each linear of the blocks gets one, by the stage's target; embedding
        and head have what `type` and `types` give them.
    """

    type: str = "Q4_K_M"
    types: tuple[TypeOfLayers, ...] = ()
    candidates: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        KQuantsConfig.__post_init__(self)
        mixture_of(self.type, "type")
        known = [type_of(name, "candidates") for name in self.candidates]
        if known and len(set(known)) < max(2, len(known)):
            raise RecipeError(
                f"candidates are {', '.join(known)}, of which {len(set(known))} differ; give two"
                " types or more, each once"
            )


@dataclass(frozen=True, slots=True, eq=False)
class RoundedBlocks:
    """A weight in blocks.

    data: uint8 [N, bytes]. error: `relative_error` under the inputs that calibration showed.
    method: what made the codes, "k_quants" or "k_quants+gptq". kept: why compensation was left out
    although it was asked for, None otherwise. damping: share of the mean diagonal added to H.
    plain: error of each number's nearest code, scales chosen with the same data.
    """

    kind: str
    data: Tensor
    error: float
    method: str
    kept: str | None = None
    damping: float | None = None
    plain: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class BlockFactor:
    """The damped Hessian as R Rᵀ in the order in which columns are visited.

    factor: R, fp32 [K, K]. runs: storage columns of each run of blocks, int64, as visited.
    damping: share of the mean diagonal that was needed.
    """

    factor: Tensor
    runs: list[Tensor]
    damping: float

    @property
    def order(self) -> Tensor:
        """Storage column of each visited one, int64 [K]."""
        return torch.cat(self.runs)


def needs(config: KQuantsConfig) -> Needs:
    """A Hessian, for weighing columns and for compensation."""
    return Needs(hessian=config.compensate or config.importance)


def round_weights(
    weights: Sequence[Tensor],
    kind: str,
    config: KQuantsConfig,
    observed: Observed = UNOBSERVED,
) -> list[RoundedBlocks]:
    """Blocks of one kind (a key of compress.quant.ggml_kinds) for weights [N_i, K] that share an
    input, observed or not.

    An expert that no token reached has its columns count alike; one that too few reached is not
    compensated.
    """
    hessian = observed.driven
    factor, kept = None, UNSEEN if observed.nothing and needs(config).hessian else None
    if hessian is not None and config.compensate:
        kept = _too_few(config, observed, hessian.shape[0])
        factor = None if kept else factorise(hessian, KINDS[kind].block, config.damping)
        kept = kept or (NO_FACTOR if factor is None else None)
    found = []
    for weight in weights:
        layer = judge(weight, hessian)
        plain = replace(_plain(layer, kind, config), kept=kept)
        found.append(plain if factor is None else _better(layer, plain, factor))
    return found


def _too_few(config: KQuantsConfig, observed: Observed, width: int) -> str | None:
    tokens = observed.expert_tokens
    if tokens is None or tokens >= max(1.0, config.min_tokens * width):
        return None
    return f"{tokens} tokens reached the expert, {config.min_tokens:g} x {width} wanted"


def _plain(layer: Judge, kind: str, config: KQuantsConfig) -> RoundedBlocks:
    """Each number to its nearest code."""
    importance = None
    if layer.hessian is not None and config.importance:
        importance = layer.hessian.diagonal().float().contiguous()
    data = round_blocks(kind, layer.weight, importance)
    error = layer.error(decode_blocks(kind, data))
    return RoundedBlocks(kind, data, error, "k_quants", plain=error)


def _better(layer: Judge, plain: RoundedBlocks, factor: BlockFactor) -> RoundedBlocks:
    data = compensate(layer.weight, plain.kind, factor)
    error = layer.error(decode_blocks(plain.kind, data))
    if error > plain.error:
        return replace(plain, kept=PLAIN_IS_BETTER)
    made = RoundedBlocks(plain.kind, data, error, "k_quants+gptq", damping=factor.damping)
    return replace(made, plain=plain.error)


def factorise(hessian: Tensor, block: int, damping: float) -> BlockFactor | None:
    """Factor of a Hessian [K, K] for blocks of so many columns; None if no damping makes it
    positive definite."""
    diagonal = hessian.diagonal()
    width, mean = len(diagonal), float(diagonal.mean())
    columns = torch.arange(width, device=hessian.device)
    # What is updated at once: a super-block, or as many columns of smaller blocks.
    runs = sorted(
        torch.split(columns, max(block, SUPER_BLOCK)), key=lambda c: -float(diagonal[c].sum())
    )
    runs = [run[diagonal[run].argsort(descending=True, stable=True)] for run in runs]
    order = torch.cat(runs)
    dead = diagonal[order] <= 0
    for _ in range(DAMPING_STEPS):
        damped = hessian[order][:, order]
        damped.diagonal().add_(damping * mean)
        damped.diagonal()[dead] = max(mean, 1e-30)
        try:
            factor = hessian_factor(damped)
            if bool(torch.isfinite(factor.diagonal()).all()):
                return BlockFactor(factor, runs, damping)
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            pass
        damping = max(10 * damping, LEAST_DAMPING)
    return None


def compensate(weight: Tensor, kind: str, factor: BlockFactor) -> Tensor:
    """Blocks of weight, fp32 [N, K], each run of columns at its optimum behind the ones before.

    With D what visited columns P have lost and A = D_P R_PF their pull at the later ones F, the
    next run g is W_g + A_g R_gg⁻¹ (compress_kernels.gptq.lazy).
    """
    visited = weight[:, factor.order]
    pull = torch.zeros_like(visited)
    found: dict[int, Tensor] = {}
    start = 0
    for run in factor.runs:
        stop, first = start + len(run), int(run.min())
        place = run - first
        square = factor.factor[start:stop, start:stop].contiguous()
        updated = visited[:, start:stop]
        if start:
            updated = updated + torch.linalg.solve_triangular(
                square, pull[:, start:stop], upper=True, left=False
            )
        back = place.argsort()
        cost = square.diagonal().square()[back].contiguous()
        data = round_blocks(kind, updated[:, back].contiguous(), cost)
        found[first], lost = settle_blocks(kind, updated.contiguous(), data, square, place)
        lost += visited[:, start:stop] - updated
        pull[:, stop:].addmm_(lost, factor.factor[start:stop, stop:])
        start = stop
    return torch.cat([found[first] for first in sorted(found)], 1)
