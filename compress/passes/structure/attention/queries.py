"""The queries of a block that has got a latent, refitted to what the source's heads attend to."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from compress.arch.forward.forward import describe_forward
from compress.arch.forward.kinds import Latent
from compress.arch.forward.table import FORWARDS
from compress.arch.resize.cut import Kept
from compress.blocks.linear import linear_weight
from compress.blocks.walk import LoadedBlock
from compress.checkpoint.outline import Outline
from compress.edits.latent.queries import (
    LENGTHS,
    STEPS,
    AskingText,
    LatentKeys,
    damped_inverse,
    divergences,
    heads_at_once,
    step,
)
from compress.edits.learned import LinearChange
from compress.edits.repair.ridge import Affine
from compress.passes.ranks import Ranks, decided, summed_count
from compress.passes.structure.attention.asking import AttendingBlock, LatentParts, texts_of
from compress.passes.structure.observe import Pair
from compress.report.schema import LinearRepair

CURVED = 32  # of the tokens that ask, one in so many says how scores curve
LEAST = 1e-3  # of what a head is off, that a step has to gain
NOTHING = 1e-6  # nats: what rounding in fp32 leaves


@dataclass(frozen=True, slots=True, eq=False)
class QueryFit:
    """weight: [H, D + 2 * S, in]. before, after: mean divergence of a head on the texts that are
    held out of the fit, by which its length is chosen."""

    weight: Tensor
    before: float
    after: float


def refitted_queries(pair: Pair, read: LoadedBlock, into: Outline, ranks: Ranks) -> LinearChange:
    """What makes the queries of the edited block. read: the block that it comes from, of the model
    that the pass reads. into: the model that it is of.

    Its own source is what it should attend like, on the states there; where an earlier stage has
    changed the heads, the block as it was read.
    """
    block = pair.edited
    kind = _latent(into, block.spec.index)
    linear = next(x for x in block.spec.linears if x.role in ("q", "q_b"))
    same = _heads(pair.source) == _heads(read)
    chain = pair.chains.source if same else pair.chains.edited
    teacher = AttendingBlock.of(pair.source if same else read, chain.weights, own=same)
    parts = partial(LatentParts.of, block, FORWARDS[into.spec.family].norms, kind)
    texts = list(texts_of(pair, teacher, parts, ranks))
    weight = linear_weight(block.module, linear).float()
    heads = torch.unflatten(weight, 0, (kind.heads, -1)).clone()
    fit = fit_queries(texts, heads, _keys(block, kind), ranks)
    whose = "the source's" if same else "that of the block before the stage"
    fact = LinearRepair(
        linear.name,
        linear.shape[1],
        linear.shape[1],
        note=f"attention of heads is {fit.after:.3g} nats from {whose}, and was {fit.before:.3g}"
        " before queries were refitted",
    )
    return LinearChange(linear, Affine(fit.weight.flatten(0, 1)), Kept(), fact)


def fit_queries(
    texts: Sequence[tuple[AskingText, bool]], weight: Tensor, keys: LatentKeys, ranks: Ranks
) -> QueryFit:
    """Bring attention to the source's, some heads after the other. texts: each with whether it is
    held out. weight: [H, D + 2 * S, in]."""
    inputs = weight.shape[-1]
    moments, asked = weight.new_zeros(inputs, inputs), 0
    for text, is_held in texts:
        if not is_held:
            moments += text.read.mT @ text.read
            asked += len(text.read)
    moments = ranks.sum(moments) / max(1, summed_count(ranks, asked))
    by_inputs = decided(ranks, partial(damped_inverse, moments))
    fits, each = list[QueryFit](), heads_at_once(*weight.shape)
    for some in (slice(start, start + each) for start in range(0, len(weight), each)):
        seen = [(replace(text, attended=text.attended[some]), held) for text, held in texts]
        part = LatentKeys(keys.unfolding[some], keys.scale)
        fits.append(_fit(seen, weight[some], part, by_inputs, ranks))
    whole = torch.cat([fit.weight for fit in fits])
    before, after = (
        sum(len(fit.weight) * getattr(fit, x) for fit in fits) / len(whole)
        for x in ("before", "after")
    )
    return QueryFit(whole, before, after)


def _fit(
    texts: Sequence[tuple[AskingText, bool]],
    weight: Tensor,
    keys: LatentKeys,
    by_inputs: Tensor,
    ranks: Ranks,
) -> QueryFit:
    """Of heads together. by_inputs: see `step`."""
    fitted = [text for text, is_held in texts if not is_held]
    held = [text for text, is_held in texts if is_held]
    asked, tried = (
        max(1, summed_count(ranks, sum(len(text.read) for text in part))) for part in (fitted, held)
    )
    before = now = _off(held, weight, keys, ranks) / tried
    for _ in range(STEPS):
        gradient, curvature = _slopes(fitted, weight, keys, ranks)
        change = decided(ranks, partial(step, gradient / asked, curvature, by_inputs))
        off = _along(held, weight, change, keys, ranks) / tried  # [lengths, H]
        best = off.argmin(dim=0)
        found = off.gather(0, best[None])[0]
        gains = (found < now * (1 - LEAST)) & (now > NOTHING)
        if not bool(gains.any()):
            break
        length = torch.tensor(LENGTHS, dtype=weight.dtype, device=weight.device)[best]
        weight = weight + (length * gains)[:, None, None] * change
        now = torch.where(gains, found, now)
    return QueryFit(weight, float(before.mean()), float(now.mean()))


def _slopes(
    texts: Sequence[AskingText], weight: Tensor, keys: LatentKeys, ranks: Ranks
) -> tuple[Tensor, Tensor]:
    """The gradient of the sum of divergences, and the mean curvature of a query."""
    gradient = torch.zeros_like(weight)
    curvature = weight.new_zeros(len(weight), weight.shape[1], weight.shape[1])
    seen = 0
    for number, text in enumerate(texts):
        scores = keys.scores(text, weight)
        gradient += keys.gradient(text, scores)
        every = max(1, min(CURVED, len(text.read)))
        some = slice(number % every, None, every)
        curvature += keys.curvature(text, scores, some)
        seen += len(text.read[some])
    return ranks.sum(gradient), ranks.sum(curvature) / max(1, summed_count(ranks, seen))


def _off(texts: Sequence[AskingText], weight: Tensor, keys: LatentKeys, ranks: Ranks) -> Tensor:
    """The sum of divergences: fp64 [H]."""
    total = torch.zeros(len(weight), dtype=torch.float64, device=weight.device)
    for text in texts:
        total += divergences(text, keys.attention(text, keys.scores(text, weight)))
    return ranks.sum(total)


def _along(
    texts: Sequence[AskingText], weight: Tensor, change: Tensor, keys: LatentKeys, ranks: Ranks
) -> Tensor:
    """The sum of divergences behind a step of each length: fp64 [lengths, H]."""
    total = torch.zeros(len(LENGTHS), len(weight), dtype=torch.float64, device=weight.device)
    for text in texts:
        scores, more = keys.scores(text, weight), keys.scores(text, change)
        for row, length in zip(total, LENGTHS, strict=True):
            row += divergences(text, keys.attention(text, scores + length * more))
    return ranks.sum(total)


def _heads(block: LoadedBlock) -> tuple[int, int, int]:
    sizes = block.spec.sizes
    return sizes.heads, sizes.kv_heads, sizes.key_width


def _latent(into: Outline, layer: int) -> Latent:
    forward = describe_forward(into.config, into.spec)
    kind = forward.rows[forward.kinds[layer]]
    assert isinstance(kind, Latent), "it has no latent"
    assert kind.rope is not None, "the class rotates"
    return kind


def _keys(block: LoadedBlock, kind: Latent) -> LatentKeys:
    linear = next(x for x in block.spec.linears if x.role == "kv_b")
    heads = torch.unflatten(linear_weight(block.module, linear).float(), 0, (kind.heads, -1))
    return LatentKeys(heads[:, : kind.nope].contiguous(), kind.scale)
