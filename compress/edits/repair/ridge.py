"""Ridge least squares: the weight of a linear that reads fewer columns than it did.

The new weight is argmin Σ |y - W x - b|² + penalty Σ_c G_cc |W_c - W0_c|², over x of the columns
that stay, with their gram G and their weights W0 in the source. y is what the linear should give:
its own output before the cut, or what the edited model lacks of the source's residual stream.

The penalty draws to W0, not to zero, so that a column which calibration hardly drives keeps what
the source knew of it. It measures each column in its own unit: a channel that is 256 times as large
as its neighbours, as activations of LLMs are, changes nothing for them. A column that gives less
than a tenth of what columns give on average, G_cc ‖W0_c‖², counts as if it gave that much: else one
that is hardly driven grows without a cost, on tale-6m to 3,900 times its size, which gains nothing
and which no 4 bits hold (rounded behind `mla` at a quarter of the cache: KL 0.63; so it is 0.15).
On tale-6m (FFN 768 to 512 and heads 8 to 4 by `obs`, against the source's residual stream, 128 x
256 tokens): perplexity +3.5 % and +17.5 %; with no such least +3.5 % and +17.3 %.

The penalty of a small grid is taken whose fit has the least error on held-out rows; then all rows
are fitted with it. Where no penalty beats W0 on the held-out rows, W0 stays. A bias is refitted
with the weight and never penalised.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.errors import DataError
from compress_calibration.moments import Moments

PENALTIES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
LEAST_UNIT = 1e-12  # of the mean of the gram's diagonal: the unit of a column that no token drove
LEAST_GIVEN = 0.1  # of what columns give in their mean: what each counts for at least
OUTPUTS = 512  # of a linear that are solved together: what is held of them in fp64 follows
STRIP = 1024  # rows of a gram of which there is a copy at a time


@dataclass(frozen=True, slots=True, eq=False)
class Affine:
    """A weight [N, K] and a bias [N]; None where the linear has no bias."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Refit:
    """A linear after its repair.

    linear: fp32, weight [N, k]. penalty: what was chosen; None where the source's weights stay.
    before, after: squared error on the held-out rows, with the source's weights and with the fit
    that saw none of these rows. dead: columns that no token drove; they keep the source's weights.
    singular: penalties with which the fit has no unique solution in fp64; they were not tried.
    """

    linear: Affine
    penalty: float | None
    before: float
    after: float
    dead: int
    singular: tuple[float, ...]

    @property
    def gain(self) -> float:
        """The share of the held-out error that the repair takes away, 0 to 1."""
        return 1 - self.after / self.before if self.before > 0 else 0.0


def refit(
    fit: Moments,
    held: Moments,
    source: Affine,
    *,
    kept: Tensor | None = None,
    penalties: Sequence[float] = PENALTIES,
) -> Refit:
    """Fit a linear to its targets on the columns that stay.

    fit, held: moments of inputs [tokens, K] and targets [tokens, N] of the rows to fit on, and of
    held-out rows. source: the linear before, weight [N, K]. kept: int64 [k], None for all columns.
    Raises DataError without held-out tokens.
    """
    left = remainder(fit, source), remainder(held, source)
    return refit_to_lack(*left, source, kept=kept, penalties=penalties)


def refit_to_lack(
    fit: Moments,
    held: Moments,
    source: Affine,
    *,
    kept: Tensor | None = None,
    penalties: Sequence[float] = PENALTIES,
) -> Refit:
    """As `refit`, from moments of what the targets have beyond what the source's linear gives. What
    was given by columns that go lacks, too.

    With K = 5504, k = 3671 and N = 2048 a penalty takes 3.1 s of a core (AMD EPYC).
    """
    if held.tokens == 0:
        raise DataError("no held-out tokens to choose the penalty of a repair by; take more rows")
    if kept is not None and len(kept) < source.weight.shape[1]:
        fit, held = without(fit, source, kept), without(held, source, kept)
        source = Affine(source.weight[:, kept], source.bias)
    best, gain, singular = None, 0.0, []
    for penalty in penalties if bool(fit.energy.any()) else ():
        saved = _saved(fit, held, penalty, source)
        if saved is None:
            singular.append(penalty)
        elif saved > gain:
            best, gain = penalty, saved
    linear = _changed(source, (fit, held), best)
    before = max(float(held.energy.sum()), gain)
    dead = int((fit.gram.diagonal() + held.gram.diagonal() <= 0).sum())
    return Refit(linear, best, before, before - gain, dead, tuple(singular))


def _saved(fit: Moments, held: Moments, penalty: float, source: Affine) -> float | None:
    """By how much the fit of one lowers the squared error of the other; None without a solution."""
    bias = source.bias is not None
    factor = _factor((fit,), penalty, source)
    if factor is None:
        return None
    parts = (
        error_saved(held.outputs(some), _solve((fit.outputs(some),), factor, bias=bias))
        for some in _outputs(fit)
    )
    return sum(parts, 0.0)


def _changed(source: Affine, seen: tuple[Moments, Moments], penalty: float | None) -> Affine:
    """The linear with its fit to all rows added, fp32; to those of the first moments alone, should
    rounding be in the way; as it is without a penalty."""
    weight = source.weight.to(torch.float32, copy=True)
    bias = None if source.bias is None else source.bias.to(torch.float32, copy=True)
    if penalty is None:
        return Affine(weight, bias)
    moments: tuple[Moments, ...] = seen
    factor = _factor(moments, penalty, source)
    if factor is None:
        moments = seen[:1]
        factor = _factor(moments, penalty, source)
        assert factor is not None, "the penalty was chosen by this fit"
    for some in _outputs(seen[0]):
        part = tuple(x.outputs(some) for x in moments)
        change = _solve(part, factor, bias=bias is not None)
        weight[some] = (source.weight[some].double() + change.weight).float()
        if bias is not None and source.bias is not None and change.bias is not None:
            bias[some] = (source.bias[some].double() + change.bias).float()
    return Affine(weight, bias)


def _outputs(moments: Moments) -> Iterator[slice]:
    """Runs of outputs that are solved together."""
    count = moments.cross.shape[1]
    yield from (slice(a, min(a + OUTPUTS, count)) for a in range(0, count, OUTPUTS))


def refit_bytes(n: int, k: int, kept: int) -> int:
    """Most bytes that `refit_to_lack` has beside moments and weight of a linear [n, k]."""
    some = min(OUTPUTS, n) * kept
    left = 2 * 4 * (kept * kept + n * kept) if kept < k else 0  # as `without` gives them
    strips = 2 * 4 * min(STRIP, k) * k
    # The factor, what is solved of some outputs and judged, the linear before and after.
    return left + max(strips + 4 * n * (k - kept), 8 * kept * kept + 5 * 8 * some + 3 * 4 * n * k)


def remainder(moments: Moments, linear: Affine) -> Moments:
    """The moments of what a linear leaves of its targets, y - W x - b; cross in fp64."""
    weight, x_sum, tokens = linear.weight.double(), moments.x_sum, moments.tokens
    cross = moments.cross.double()
    through = _through(moments.gram, weight)  # G Wᵀ: [K, N]
    energy = moments.energy + (weight.T * (through - 2 * cross)).sum(dim=0)
    cross = cross - through
    y_sum = moments.y_sum - weight @ x_sum
    if linear.bias is not None:
        bias = linear.bias.double()
        energy = energy - bias * (2 * y_sum - tokens * bias)
        cross = cross.addr_(x_sum, bias, alpha=-1)
        y_sum = y_sum - tokens * bias
    return Moments(moments.gram, cross, energy, x_sum, y_sum, tokens)


def without(moments: Moments, linear: Affine, kept: Tensor) -> Moments:
    """The moments of the columns that stay, and of what lacks when the others give nothing.

    moments: of inputs [tokens, K] and of what lacks of a linear [N, K]. kept: int64 [k].
    """
    stays = torch.zeros(len(moments.x_sum), dtype=torch.bool, device=kept.device)
    stays[kept] = True
    gone = (~stays).nonzero().flatten()
    weight = linear.weight[:, gone].T.to(moments.gram.dtype)  # [gone, N]
    gram = moments.gram.new_empty(len(kept), len(kept))
    cross = moments.cross[kept]
    for start in range(0, len(kept), STRIP):
        rows = moments.gram[kept[start : start + STRIP]]
        gram[start : start + STRIP] = rows[:, kept]
        cross[start : start + STRIP] += rows[:, gone] @ weight
    energy = moments.energy.clone()
    for start in range(0, len(gone), STRIP):
        some = gone[start : start + STRIP]
        given = 2 * moments.cross[some].double() + moments.gram[some][:, gone] @ weight
        energy += (given * weight[start : start + STRIP]).sum(dim=0)
    x_sum = moments.x_sum[kept]
    y_sum = moments.y_sum + moments.x_sum[gone] @ weight.double()
    return Moments(gram, cross, energy, x_sum, y_sum, moments.tokens)


def ridge(moments: Moments, penalty: float, source: Affine) -> Affine | None:
    """The fit of y by W x + b with the least penalised squared error, fp64.

    The penalty draws to zero: of the moments of what `source` leaves, the fit is a change of it.
    None where rounding leaves more than one solution.
    """
    factor = _factor((moments,), penalty, source)
    bias = source.bias is not None
    return None if factor is None else _solve((moments,), factor, bias=bias)


def _factor(seen: Sequence[Moments], penalty: float, source: Affine) -> Tensor | None:
    """L of L Lᵀ, the penalised gram of all tokens, fp64 [K, K]."""
    gram = seen[0].gram.to(torch.float64, copy=True)
    for other in seen[1:]:
        for start in range(0, len(gram), STRIP):  # or torch makes an fp64 copy of all of it
            gram[start : start + STRIP] += other.gram[start : start + STRIP]
    unit = _units(gram.diagonal(), source.weight)
    if source.bias is not None:  # of what lies around the means
        x_sum, tokens = _sums(seen)
        gram.addr_(x_sum, x_sum, alpha=-1 / tokens)
    gram.diagonal().add_(unit, alpha=penalty)
    failed = torch.empty((), dtype=torch.int32, device=gram.device)
    columns = gram.mT  # the order of LAPACK; of the other, torch makes a copy
    torch.linalg.cholesky_ex(columns, out=(columns, failed))
    return None if int(failed) else columns


def _units(energy: Tensor, weight: Tensor) -> Tensor:
    """What a change of a column is measured in: fp64 [K]. energy: of the columns, the gram's
    diagonal; weight: [N, K] of the source."""
    unit = energy.clamp(min=LEAST_UNIT * float(energy.mean()))
    size = weight.float().square().sum(dim=0).double()
    given = energy * size
    least = LEAST_GIVEN * given.mean() / size.clamp(min=torch.finfo(torch.float64).tiny)
    return torch.where(size > 0, torch.maximum(unit, least), unit)


def _sums(seen: Sequence[Moments]) -> tuple[Tensor, int]:
    """Sum of x over all tokens, fp64 [K], and their number, at least 1."""
    return torch.stack([x.x_sum for x in seen]).sum(dim=0), max(1, sum(x.tokens for x in seen))


def _solve(seen: Sequence[Moments], factor: Tensor, *, bias: bool) -> Affine:
    """The fit of some outputs of all tokens, fp64."""
    cross = seen[0].cross.to(torch.float64, copy=True)
    for other in seen[1:]:
        cross += other.cross
    x_sum, tokens = _sums(seen)
    y_sum = torch.stack([x.y_sum for x in seen]).sum(dim=0)
    if bias:
        cross.addr_(x_sum, y_sum, alpha=-1 / tokens)
    # Not cholesky_solve, which copies the factor.
    half = torch.linalg.solve_triangular(factor, cross, upper=False)
    weight = torch.linalg.solve_triangular(factor.mT, half, upper=True).T
    return Affine(weight, (y_sum - weight @ x_sum) / tokens if bias else None)


def error_saved(moments: Moments, change: Affine) -> float:
    """By how much a change of the linear lowers the squared error.

    moments: of what the linear leaves of its targets before. Only the change is summed, so that a
    small gain does not drown in the energy of the targets.
    """
    weight = change.weight.double()
    saved = (weight.T * (2 * moments.cross - _through(moments.gram, weight))).sum()
    if change.bias is not None:
        left = moments.y_sum - weight @ moments.x_sum
        bias = change.bias.double()
        saved = saved + (bias * (2 * left - moments.tokens * bias)).sum()
    return float(saved)


def _through(gram: Tensor, weight: Tensor) -> Tensor:
    """G Wᵀ [K, N] in fp64, multiplied in the gram's dtype."""
    return (gram @ weight.T.to(gram.dtype)).double()
