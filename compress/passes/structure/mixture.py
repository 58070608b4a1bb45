"""What is looked at in a mixture: what each expert makes of a token, and, once some are gone, what
those that stay should make up for.

The experts of a block write one output together, Σ share_e W_e h_e. What that lacks of what it
should be, r, all that stay are refitted to at once. With shares a_e of a token that add up to 1,
|r - Σ share_e D_e h_e|² ≤ Σ a_e |r - (share_e / a_e) D_e h_e|²: so changes D_e of the weights that
each lessen their own part of the right side lessen the error of the mixture. Here a_e is share_e as
a part of all shares of the token.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from compress.arch.forward.forward import routing_of
from compress.arch.spec import LinearSpec
from compress.blocks.capture import calls
from compress.blocks.experts import mixture_of, told_routes
from compress.blocks.linear import linear_weight
from compress.blocks.walk import BlockInput
from compress.edits.learned import Site, SiteMoments
from compress.edits.select.experts import ANSWERS, ExpertEvidence, missed, tokens_asked
from compress.passes.ranks import Ranks
from compress.passes.structure.observe import Pair, missing, sums_of, writers
from compress.report.schema import LinearRepair
from compress.report.units import counted

LEAST = 1e-30  # shares of a token that a softmax in fp32 may have made 0
GOLDEN = 0.6180339887  # the least regular step, so that no place of a row is asked more than others


@dataclass(frozen=True, slots=True, eq=False)
class _Answers:
    """What is filled in for ExpertEvidence, whose names these are. slots: of the tokens to ask, as
    indices of all tokens of all rows, ascending."""

    slots: Tensor
    scores: Tensor
    products: Tensor
    asked: Tensor
    energy: Tensor

    @classmethod
    def create(cls, slots: Tensor, experts: int, device: str) -> "_Answers":
        scores = torch.zeros(len(slots), experts, dtype=torch.float32, device=device)
        products = scores.new_zeros(len(slots), experts, experts)
        asked = scores.new_zeros(len(slots), experts, dtype=torch.float64)
        return cls(slots, scores, products, asked, asked.new_zeros(len(slots)))


def look_at_experts(pair: Pair, router: LinearSpec, ranks: Ranks, *, drift: bool) -> ExpertEvidence:
    """What every expert of the edited block makes of some tokens of all rows.

    drift: the mixture should bring the edited stream to the source's; else give what it gives.
    """
    block, chains = pair.edited, pair.chains
    experts, weights = router.shape[0], chains.edited.weights
    starts = [0, *accumulate(x[0] * x[1] for x in chains.edited.entering(0).shapes)]
    seen = _Answers.create(_spread(starts[-1], experts), experts, block.skeleton.device)
    for batch, entering in zip(chains.batches, block.inputs(), strict=True):
        first, behind = starts[batch.index], starts[batch.index + 1]
        _ask(pair, router, entering, (first, behind), seen, drift=drift)
    return ExpertEvidence(
        routing_of(weights.checkpoint.config, weights.spec),
        scores=ranks.sum(seen.scores),
        products=ranks.sum(seen.products),
        asked=ranks.sum(seen.asked),
        energy=ranks.sum(seen.energy),
        held=(seen.slots >= starts[chains.held]).to(seen.scores.device),
        sizes=_norms(pair, experts),
    )


def _spread(tokens: int, experts: int) -> Tensor:
    """Which of all tokens the experts are asked of: int64, ascending; one of each of so many equal
    runs, each at another place of its run."""
    step = -(-tokens // tokens_asked(experts, tokens))
    runs = torch.arange(-(-tokens // step))
    found = runs * step + (runs.double() * GOLDEN % 1 * step).long()
    return found[found < tokens]


def _ask(
    pair: Pair,
    router: LinearSpec,
    entering: BlockInput,
    run: tuple[int, int],
    seen: _Answers,
    *,
    drift: bool,
) -> None:
    """Fill in what is asked of one batch. run: its tokens, as indices of all."""
    inside = ((seen.slots >= run[0]) & (seen.slots < run[1])).nonzero().flatten()
    if entering.mask is not None:
        inside = inside[entering.mask.flatten().cpu()[seen.slots[inside] - run[0]]]
    with calls(pair.edited.module, [router.module]) as called:
        _, gave, lacks = missing(pair, writers(pair.edited.spec)[1], entering, last=True)
    read, scores = (x.flatten(0, -2) for x in called[router.module])
    wanted = (gave.float() + lacks if drift else gave.float()).flatten(0, -2)
    views = mixture_of(pair.edited.module)
    most = max(1, ANSWERS // (views.experts * read.shape[1]))
    for slots in torch.split(inside, most):
        tokens = seen.slots[slots] - run[0]
        with torch.no_grad():
            answers = torch.stack([x(read[tokens]) for x in views.children()]).float()
        seen.scores[slots] = scores[tokens].float()
        seen.products[slots] = torch.einsum("enh,fnh->nef", answers, answers)
        seen.asked[slots] = torch.einsum("enh,nh->ne", answers, wanted[tokens]).double()
        seen.energy[slots] = wanted[tokens].double().square().sum(dim=1)


def _norms(pair: Pair, experts: int) -> Tensor:
    """The l2 norm of all weights of each expert: fp64 [E]."""
    squares = torch.zeros(experts, dtype=torch.float64, device=pair.edited.skeleton.device)
    for linear in pair.edited.spec.linears:
        if linear.expert is not None:
            weight = linear_weight(pair.edited.module, linear)
            squares[linear.expert] += weight.float().norm().double().square()
    return squares.sqrt()


def expert_fact(router: LinearSpec, seen: ExpertEvidence, kept: Tensor) -> LinearRepair:
    """The report's line of a choice."""
    lost, energy = missed(seen, kept)[seen.held].sum(), seen.energy[seen.held].sum()
    share = float(lost / energy) if energy > 0 else 0.0
    gone = sorted({*range(seen.experts)} - {*kept.tolist()})
    note = f"without {counted(len(gone), 'expert')}: {', '.join(map(str, gone))}" if gone else ""
    return LinearRepair(router.name, len(kept), seen.experts, before=share, note=note)


def observe_mixture(pair: Pair, site: Site, ranks: Ranks) -> dict[str, SiteMoments]:
    """What is seen of every expert of a site, by name: what it reads, and its part of what the
    mixture lacks; see above."""
    sums = {x.name: sums_of(pair.edited, x, site) for x in site.linears}
    for batch, entering in zip(pair.chains.batches, pair.edited.inputs(), strict=True):
        for name, read, whole, lacks, part in _parts(pair, site, entering):
            each, root = sums[name], part.sqrt()
            is_held = pair.chains.is_held(batch)
            each.add(root * whole * read, root * lacks, is_held=is_held)
            if each.sequences is not None and len(read):
                each.sequences.add(read[None])  # of a batch, as rows behind a router have no order
    return {name: each.over(ranks) for name, each in sums.items()}


def _parts(
    pair: Pair, site: Site, entering: BlockInput
) -> Iterator[tuple[str, Tensor, Tensor, Tensor, Tensor]]:
    """For each expert of a site that a token of a batch was sent to: its name, what its linear
    reads [n, K], all shares of these tokens [n, 1], what the mixture lacks [n, N], and the expert's
    part of the shares [n, 1]."""
    module, paths = pair.edited.module, [x.module for x in site.linears]
    with calls(module, paths) as called, told_routes(mixture_of(module)) as told:
        _, _, lacking = missing(pair, writers(pair.edited.spec)[1], entering, last=True)
    ((index, share),), lacking = told, lacking.flatten(0, -2)
    experts = torch.tensor([x.expert for x in site.linears], device=index.device)
    share = share.float() * torch.isin(index, experts)
    whole = share.sum(dim=1, keepdim=True)
    for number, linear in zip(experts, site.linears, strict=True):
        if linear.module not in called:
            continue
        rows, place = torch.where(index.eq(number))
        read = called[linear.module][0].float()
        if entering.mask is not None:
            real = entering.mask.flatten().to(rows.device)[rows]
            rows, place, read = rows[real], place[real], read[real]
        part = share[rows, place][:, None] / whole[rows].clamp(min=LEAST)
        yield linear.name, read, whole[rows], lacking[rows], part
