"""What the linears of a site read in the edited block, and what they should give beside what they
give now: what the source's residual stream, or its block, has and the edited one lacks."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from compress.arch.spec import BlockSpec, LinearSpec
from compress.blocks.capture import calls, collect
from compress.blocks.linear import linear_bias, linear_weight
from compress.blocks.walk import BlockInput, LoadedBlock
from compress.edits.learned import Site, SiteMoments
from compress.edits.repair.ridge import Affine
from compress.passes.ranks import Ranks, summed_count
from compress.passes.structure.chains import Chains
from compress_calibration.moments import MomentsAccumulator
from compress_calibration.sequences import SequenceAccumulator

# How far the sum of what a block read and wrote may be from its output, as a share of that, for its
# residual stream to be plain. A norm behind attention changes it by far more.
PLAIN = 1e-3


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    """A block of the edited model and its source block, each with the states that enter it.

    plain: whether the source block is, as `is_plain` says.
    """

    chains: Chains
    source: LoadedBlock
    edited: LoadedBlock
    plain: bool


def is_plain(block: LoadedBlock) -> bool:
    """Whether the block adds what attention and MLP give to its residual stream as they give it."""
    attention, mlp = writers(block.spec)
    entering = next(block.inputs())
    with torch.no_grad(), calls(block.module, [attention, mlp]) as seen:
        out = block.run(entering)
    written = entering.hidden + seen[attention][1] + seen[mlp][1].view_as(out)
    return bool((out - written).norm() <= PLAIN * out.norm())


def writers(block: BlockSpec) -> tuple[str, str]:
    """Paths of the output of attention and of the MLP; of a mixture the module with the router."""
    by_role = {linear.role: linear for linear in block.linears}
    router = by_role.get("router")
    mlp = by_role["down"].module if router is None else router.module.rpartition(".")[0]
    return by_role["o"].module, mlp


@dataclass(frozen=True, slots=True, eq=False)
class Sums:
    """What is summed of a linear: moments of rows to fit by and of rows held out, and its inputs
    sequence by sequence where the site asks.

    now: what it is. energy: of all that it should give on rows held out, fp64 [].
    """

    now: Affine
    fit: MomentsAccumulator
    held: MomentsAccumulator
    energy: Tensor
    sequences: SequenceAccumulator | None

    def add(self, x: Tensor, y: Tensor, *, is_held: bool) -> None:
        """Add tokens: what the linear reads, [tokens, K], and what it lacks, [tokens, N]."""
        if not is_held:
            self.fit.add(x, y)
            return
        self.held.add(x, y)
        weight, bias = self.now.weight, self.now.bias
        whole = nn.functional.linear(x.to(weight.dtype), weight, bias).float() + y
        self.energy.add_(whole.double().square().sum())

    def over(self, ranks: Ranks) -> SiteMoments:
        """What all ranks have seen."""
        sequences = self.sequences
        if sequences is not None:
            total, square = ranks.sum(sequences.total), ranks.sum(sequences.square)
            count = summed_count(ranks, sequences.sequences)
            sequences = replace(sequences, total=total, square=square, sequences=count)
        fit, held = (x.over(ranks.sum).moments() for x in (self.fit, self.held))
        return SiteMoments(fit, held, float(ranks.sum(self.energy)), sequences)


def observe(pair: Pair, site: Site, ranks: Ranks) -> dict[str, SiteMoments]:
    """What is seen of every linear of a site, by name.

    The site of the MLP is held to what the source's stored states behind the block are.
    """
    sums = {x.name: sums_of(pair.edited, x, site) for x in site.linears}
    for batch, entering in zip(pair.chains.batches, pair.edited.inputs(), strict=True):
        if site.own:
            _add_inputs(pair, site, entering, sums)
            continue
        (linear,) = site.linears
        each = sums[linear.name]
        x, _, y = missing(pair, linear.module, entering, last=linear.role == "down")
        if each.sequences is not None:
            each.sequences.add(x, entering.mask)
        real = slice(None) if entering.mask is None else entering.mask.to(x.device)
        is_held = pair.chains.is_held(batch)
        each.add(x[real].flatten(0, -2), y[real].flatten(0, -2), is_held=is_held)
    return {name: each.over(ranks) for name, each in sums.items()}


def affine_of(block: LoadedBlock, linear: LinearSpec) -> Affine:
    """A linear of a loaded block, as views."""
    has_bias = getattr(block.module.get_submodule(linear.module), "bias", None) is not None
    bias = linear_bias(block.module, linear) if has_bias else None
    return Affine(linear_weight(block.module, linear), bias)


def sums_of(block: LoadedBlock, linear: LinearSpec, site: Site) -> Sums:
    """Empty sums of a linear."""
    device, (outputs, inputs) = block.skeleton.device, linear.shape
    fit, held = (
        MomentsAccumulator.create(linear.name, inputs, outputs, device=device) for _ in range(2)
    )
    sequences = None
    if site.sequences is not None:
        name = linear.name
        sequences = SequenceAccumulator.create(name, inputs, by=site.sequences, device=device)
    energy = torch.zeros((), dtype=torch.float64, device=device)
    now = affine_of(block, linear)
    return Sums(now, fit, held, energy, sequences)


def _add_inputs(pair: Pair, site: Site, entering: BlockInput, sums: Mapping[str, Sums]) -> None:
    """Of linears that are held to themselves: nothing is missing of what they give."""
    block = pair.edited
    names = {linear.shared_input: linear.name for linear in site.linears}

    def add(key: str, x: Tensor) -> None:
        each = sums[names[key]]
        lacks = x.new_zeros(()).expand(len(x), len(each.now.weight))
        each.add(x, lacks, is_held=pair.chains.is_held(entering))
        if each.sequences is not None and len(x):
            each.sequences.add(x[None])  # of a batch, as rows behind a router are not in order

    run = partial(block.run, entering)
    collect(block.module, site.linears, run, add, mask=entering.mask, stop_after_last=True)


def missing(
    pair: Pair, path: str, entering: BlockInput, *, last: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """What a module reads in the edited block, [rows, length, K], what it gives, and what it lacks,
    [rows, length, N] each. last: whether it is what the block writes last."""
    read, gave, out = _run(pair.edited, path, entering)
    source, index, onto = pair.source, entering.index, pair.chains.onto
    if pair.plain and last:
        stored = source.target.read(index, 0, len(out)).to(out.device)
        return read, gave, onto(stored) - out.float()
    before = source.input(index)
    _, wanted, _ = _run(source, path, before)
    lacks = onto(wanted) - gave.float()
    return read, gave, lacks + (onto(before.hidden) - entering.hidden.float() if pair.plain else 0)


def _run(block: LoadedBlock, path: str, entering: BlockInput) -> tuple[Tensor, Tensor, Tensor]:
    """What a module reads and gives, and what its block gives."""
    with torch.no_grad(), calls(block.module, [path]) as seen:
        out = block.run(entering)
    return *seen[path], out
