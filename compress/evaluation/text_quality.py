"""Quality of a result on texts, alone or against its source."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from compress.blocks.states import HiddenStates
from compress.errors import CheckpointError, DataError
from compress.evaluation.batches import Batch, make_batches
from compress.evaluation.head import FinalStates, ScoredTokens, Totals, score
from compress.evaluation.perplexity import perplexity
from compress.evaluation.stream import final_states, make_skeleton, source_states
from compress.evaluation.windows import TokenWindows
from compress.evaluation.workspace import Workspace
from compress.formats.weights import Weights, rounds_calls
from compress.plan.row_counts import chunk_rows
from compress.recipe.evaluation_config import EvaluationConfig


@dataclass(frozen=True, slots=True)
class TextScores:
    """Quality on one text.

    tokens: scored tokens. kl: mean KL(source || result) in nats a token.
    top1_agreement: share of tokens where both rank the same token first, in [0, 1].
    settings: how it was measured. sha256: of the tokens (`TokenWindows.sha256`).
    """

    name: str
    tokens: int
    ppl_source: float | None
    ppl_result: float
    kl: float | None
    top1_agreement: float | None
    settings: dict[str, Any] = field(default_factory=dict)
    sha256: str | None = None


def evaluate(
    result: Weights,
    source: Weights | None,
    texts: Sequence[TokenWindows],
    config: EvaluationConfig,
    work: Workspace,
    known: HiddenStates | None = None,
) -> tuple[TextScores, ...]:
    """Perplexity of the result on each text; with a source its perplexity, KL and agreement too.

    Each model passes once over all texts, source first, one block at a time; then both heads go
    over the stored final hidden states. known: those of the source for the same texts and config
    (`source_final_states`), to measure several results against one source; the caller closes it.
    Raises CheckpointError when the two models' vocabularies differ or a weight is not finite,
    DataError for a token id outside the vocabulary.
    """
    _check(result, source, texts)
    batches = make_batches(texts, config.batch_tokens)
    own: list[HiddenStates] = []
    try:
        if source is not None and known is None:
            known = source_final_states(source, texts, config, work)
            own.append(known)
        own.append(final_states(result, _batches(result, texts, config), config, work, work.label))
        sides = [_side(result, own[-1], work)]
        if source is not None and known is not None:
            sides.append(_side(source, known, work))
        totals = _score(sides, batches, len(texts), config, result.spec.vocab)
    finally:
        for store in own:
            store.close()
    return tuple(_quality(text, i, totals, config) for i, text in enumerate(texts))


def share_closed(result: TextScores, plain: TextScores) -> float | None:
    """Share of what `plain` loses on a text that `result` does not lose: 1 is lossless, below 0
    worse than plain. Of the KL; without it of the logarithm of perplexity. None where plain loses
    nothing, and where either has no finite loss."""
    lost, lost_plain = _lost(result), _lost(plain)
    if lost is None or lost_plain is None or lost_plain <= 0:
        return None
    return 1 - lost / lost_plain


def _lost(scores: TextScores) -> float | None:
    """Nats a token, where that is known and finite."""
    if scores.kl is not None:
        return scores.kl if math.isfinite(scores.kl) else None
    before, after = scores.ppl_source, scores.ppl_result
    if before is None or not (before > 0 and math.isfinite(before) and math.isfinite(after)):
        return None
    return math.log(after / before)


def source_final_states(
    source: Weights, texts: Sequence[TokenWindows], config: EvaluationConfig, work: Workspace
) -> HiddenStates:
    """The source's share of `evaluate`, to be used for several results; the caller closes it."""
    _check(source, None, texts)
    return source_states(source, _batches(source, texts, config), config, work)


def _batches(
    weights: Weights, texts: Sequence[TokenWindows], config: EvaluationConfig
) -> list[Batch]:
    """All windows. Where a token is rounded by what else is in its call, a call is a window: how
    many go through a block at once is our business, and no number may depend on it."""
    return make_batches(texts, config.batch_tokens, alone=rounds_calls(weights))


def _side(weights: Weights, states: HiddenStates, work: Workspace) -> FinalStates:
    # fp32 whatever the blocks ran in: bf16 logits are rounded by up to 0.06 at 16.
    skeleton = make_skeleton(weights, torch.float32, work)

    def rows(start: int, stop: int) -> torch.Tensor:
        return states.read(0, start, stop).to(work.device)

    return FinalStates(rows, partial(skeleton.logits, weights))


def _score(
    sides: Sequence[FinalStates],
    batches: Sequence[Batch],
    texts: int,
    config: EvaluationConfig,
    vocab: int,
) -> Totals:
    tokens = ScoredTokens(
        torch.cat([batch.targets for batch in batches]),
        torch.cat([batch.text for batch in batches]),
        texts,
    )
    source = sides[1] if len(sides) > 1 else None
    return score(sides[0], source, tokens, rows=chunk_rows(vocab), divergence=config.kl)


def _quality(
    text: TokenWindows, index: int, totals: Totals, config: EvaluationConfig
) -> TextScores:
    tokens = int(totals.tokens[index])

    def mean(sums: torch.Tensor | None) -> float | None:
        return None if sums is None else float(sums[index]) / tokens

    source = totals.nll_source
    return TextScores(
        name=text.name,
        tokens=tokens,
        ppl_source=None if source is None else perplexity(float(source[index]), tokens),
        ppl_result=perplexity(float(totals.nll_result[index]), tokens),
        kl=mean(totals.kl),
        top1_agreement=mean(totals.agreement),
        settings={**text.settings, "dtype": config.dtype},
        sha256=text.sha256,
    )


def _check(result: Weights, source: Weights | None, texts: Sequence[TokenWindows]) -> None:
    vocab = result.spec.vocab
    if source is not None and source.spec.vocab != vocab:
        raise CheckpointError(
            f"{result.checkpoint.path} has a vocabulary of {vocab}, {source.checkpoint.path} one of"
            f" {source.spec.vocab}; only models with the same vocabulary can be compared"
        )
    for text in texts:
        if text.scored == 0:
            raise DataError(
                f"evaluation text {text.name!r} holds no token to score; give a longer text"
            )
        largest = int(text.ids.max())
        if largest >= vocab:
            raise DataError(
                f"evaluation text {text.name!r} holds token {largest}, but the model's vocabulary"
                f" has {vocab}; use the model's own tokenizer"
            )
