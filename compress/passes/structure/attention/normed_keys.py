"""Keys that heads share behind a norm: fitted to the mean that they shall be, then their gain.

The mathematics is that of compress/edits/pool/normed.py. Where the plain mean of what makes the
keys, with the gain as it was, loses less, as it may where calibration hardly drives them, that is
taken.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from compress.arch.forward.forward import describe_forward
from compress.arch.spec import BlockSpec, LinearSpec
from compress.blocks.capture import calls
from compress.blocks.walk import BlockInput
from compress.edits.pool.evidence import HeadEvidence, SharedHead, key_energy
from compress.edits.repair.ridge import Affine, refit
from compress.edits.turned import Turned
from compress.formats import Weights
from compress.passes.ranks import Ranks, decided, summed_count
from compress.passes.structure.observe import Pair, affine_of
from compress_calibration.moments import MomentsAccumulator

TINY = 1e-30  # of the squares of a number of all keys that no query reads


@dataclass(frozen=True, slots=True, eq=False)
class HeadNorm:
    """A norm over each head, which divides by the root of the mean square and eps.

    tensor: its name. gain: what it multiplies with, fp32 [D]: the tensor and an offset.
    """

    tensor: str
    gain: Tensor
    offset: float
    eps: float

    def inverse(self, x: Tensor) -> Tensor:
        """What heads [..., D] are multiplied by before the gain: fp32 [..., 1]."""
        return (x.float().square().mean(dim=-1, keepdim=True) + self.eps).rsqrt()

    def units(self, x: Tensor) -> Tensor:
        """Heads [..., D] before the gain, fp32."""
        return x.float() * self.inverse(x)

    def normed(self, x: Tensor) -> Tensor:
        """Heads [..., D] behind it, fp32."""
        return self.units(x) * self.gain


@dataclass(frozen=True, slots=True, eq=False)
class HeadNorms:
    """Those of queries and of keys."""

    q: HeadNorm
    k: HeadNorm


def head_norms(weights: Weights, block: BlockSpec, device: str) -> HeadNorms | None:
    """Of a block as its checkpoint has it; None where no norm stands over each head."""
    how = describe_forward(weights.checkpoint.config, weights.spec)
    if how.grouped(block.index).qk_norm != "head":
        return None

    def norm(path: str | None) -> HeadNorm:
        assert path is not None, "queries and keys have norms"
        tensor = f"{block.prefix}.{path}.weight"
        gain = weights.read(tensor, check_finite=True).to(device, torch.float32)
        return HeadNorm(tensor, gain + how.norm_offset, how.norm_offset, how.eps)

    return HeadNorms(norm(how.norms.q), norm(how.norms.k))


@dataclass(frozen=True, slots=True, eq=False)
class FittedKeys:
    """linear: what makes the keys of all heads, those of a group alike. beside: the norm's tensor
    by name, where it changes. lost: of the scores' energy, as a share. instead: whether this is the
    plain mean, as it loses less than the fit."""

    linear: Affine
    beside: Mapping[str, Tensor]
    lost: float
    instead: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class KeyFit:
    """The edited block's keys, and what is known of them. linear: that makes them."""

    pair: Pair
    linear: LinearSpec
    norm: HeadNorm
    turned: Turned
    seen: HeadEvidence
    ranks: Ranks

    @property
    def now(self) -> Affine:
        return affine_of(self.pair.edited, self.linear)

    @property
    def energy(self) -> Tensor:
        """Of the queries that read each number of each head: fp32 [H, D]."""
        return self.turned.spread(self.seen.queries).float()

    def tokens(self, entering: BlockInput) -> tuple[Tensor, Tensor]:
        """What the linear reads, [T, in], and keys before the norm, fp32 [T, H, D]."""
        block, path = self.pair.edited, self.linear.module
        with torch.no_grad(), calls(block.module, [path]) as seen:
            block.run(entering)
        device = block.skeleton.device
        real = slice(None) if entering.mask is None else entering.mask.to(device)
        x, keys = (part[real].flatten(0, -2) for part in seen[path])
        return x, self._heads(keys)

    def made(self, linear: Affine, x: Tensor) -> Tensor:
        """Keys of groups before the norm, fp32 [T, G, D], of a linear that makes no others."""
        return self._heads(nn.functional.linear(x.float(), linear.weight, linear.bias))

    def _heads(self, keys: Tensor) -> Tensor:
        return torch.unflatten(keys.float(), 1, (-1, len(self.norm.gain)))


def fitted_keys(keys: KeyFit, shared: Sequence[SharedHead]) -> FittedKeys:
    """What makes the keys that groups of heads share, as far from theirs as it must be."""
    parts = [keys.turned.spread(each.key_in.real).float() for each in shared]  # [m, D] each
    fit, mean = _fit(keys, shared, parts), _mean(keys.now, shared, keys.seen.heads)
    gain, lost, lost_by_mean = _judged(keys, shared, fit, mean)
    whole = key_energy(keys.seen) or 1.0
    if lost_by_mean <= lost:
        linear = _for_all(mean, shared, keys.seen.heads)
        return FittedKeys(linear, {}, lost_by_mean / whole, instead=True)
    beside = {keys.norm.tensor: gain - keys.norm.offset}
    return FittedKeys(_for_all(fit, shared, keys.seen.heads), beside, lost / whole)


def mean_keys(keys: KeyFit, shared: Sequence[SharedHead]) -> FittedKeys:
    """The mean of what makes the keys of each group, which the norm makes as large as theirs."""
    mean = _mean(keys.now, shared, keys.seen.heads)
    _, _, lost = _judged(keys, shared, mean, mean)
    linear = _for_all(mean, shared, keys.seen.heads)
    return FittedKeys(linear, {}, lost / (key_energy(keys.seen) or 1.0))


def _fit(keys: KeyFit, shared: Sequence[SharedHead], parts: Sequence[Tensor]) -> Affine:
    """Fitted to the weighted means of units, each as large as the group's keys are there, which no
    norm sees: weight [G * D, in]. Of heads that are one it is what makes their keys."""
    outputs, inputs = len(shared) * len(keys.norm.gain), keys.linear.shape[1]
    device = keys.pair.edited.skeleton.device
    fit, held = (
        MomentsAccumulator.create(keys.linear.name, inputs, outputs, device=device)
        for _ in range(2)
    )
    ratios, count = torch.zeros(keys.seen.heads, dtype=torch.float64, device=device), 0
    for entering in keys.pair.edited.inputs():
        x, before = keys.tokens(entering)
        wanted, inverse = [], keys.norm.inverse(before)
        for each, part in zip(shared, parts, strict=True):
            index = list(each.members)
            ratio = inverse[:, index] / inverse[:, index].mean(dim=1, keepdim=True)
            wanted.append((before[:, index] * ratio * part).sum(dim=1))
            ratios[index] += ratio.double().sum(dim=(0, 2))
        into = held if keys.pair.chains.is_held(entering) else fit
        into.add(x, torch.cat(wanted, dim=1))
        count += len(x)
    mean = keys.ranks.sum(ratios) / max(1, summed_count(keys.ranks, count))
    first = _weighted(keys.now, shared, parts, mean.float())
    seen = (fit.over(keys.ranks.sum).moments(), held.over(keys.ranks.sum).moments())
    return decided(keys.ranks, partial(refit, *seen, first)).linear


def _weighted(
    now: Affine, shared: Sequence[SharedHead], parts: Sequence[Tensor], ratios: Tensor
) -> Affine:
    """The same were the keys of a head as large beside its group's everywhere as in the mean.
    ratios: [H], the group's to the head's."""
    joined = _joined(now, len(ratios)) * ratios[:, None, None]
    pairs = zip(shared, parts, strict=True)
    rows = [(joined[list(s.members)] * part[..., None]).sum(dim=0) for s, part in pairs]
    return _apart(torch.cat(rows), now)


def _mean(now: Affine, shared: Sequence[SharedHead], heads: int) -> Affine:
    """Of the rows of each group: weight [G * D, in]."""
    joined = _joined(now, heads)
    return _apart(torch.cat([joined[list(s.members)].mean(dim=0) for s in shared]), now)


def _for_all(groups: Affine, shared: Sequence[SharedHead], heads: int) -> Affine:
    """The rows of groups for each of their members: weight [H * D, in]."""
    of = torch.empty(heads, dtype=torch.int64)
    for group, each in enumerate(shared):
        of[list(each.members)] = group
    return _apart(_joined(groups, len(shared))[of].flatten(0, 1), groups)


def _joined(linear: Affine, heads: int) -> Tensor:
    """Rows head by head with the bias as one more column: fp32 [H, D, in]."""
    bias = [] if linear.bias is None else [linear.bias[:, None]]
    return torch.unflatten(torch.cat([linear.weight, *bias], dim=1).float(), 0, (heads, -1))


def _apart(rows: Tensor, like: Affine) -> Affine:
    inputs = like.weight.shape[1]
    return Affine(rows[:, :inputs], None if like.bias is None else rows[:, inputs])


def _judged(
    keys: KeyFit, shared: Sequence[SharedHead], fit: Affine, mean: Affine
) -> tuple[Tensor, float, float]:
    """The gain behind a fit, and what scores lose with both, and with the mean and its own gain."""
    norm, energy = keys.norm, keys.energy
    sums = torch.zeros(4, len(norm.gain), dtype=torch.float64, device=energy.device)
    for entering in keys.pair.edited.inputs():
        x, before = keys.tokens(entering)
        theirs, units = norm.normed(before), norm.units(keys.made(fit, x))
        means = norm.normed(keys.made(mean, x))
        for group, each in enumerate(shared):
            index = list(each.members)
            own, weight = theirs[:, index], energy[index]
            made = units[:, group, None]
            sums[0] += (weight * own.square()).double().sum(dim=(0, 1))
            sums[1] += (weight * own * made).double().sum(dim=(0, 1))
            sums[2] += (weight * made.square()).double().sum(dim=(0, 1))
            sums[3] += (weight * (own - means[:, group, None]).square()).double().sum(dim=(0, 1))
    whole, both, square, by_mean = keys.ranks.sum(sums)
    gain = both / square.clamp(min=TINY)
    return gain.float(), float((whole - both * gain).sum()), float(by_mean.sum())
