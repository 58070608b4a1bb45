"""How far models on a walk are from their source: what left the last block, as next tokens."""

from collections.abc import Sequence

import torch
from torch import Tensor

from compress.blocks.walk import Chain, TokenBatch
from compress.evaluation.divergence import kl
from compress.evaluation.perplexity import log_softmax
from compress.plan.row_counts import chunk_rows


@torch.inference_mode()
def divergences(source: Chain, results: Sequence[Chain]) -> list[float]:
    """Mean KL(source || result) of the next token in nats, of each result.

    The chains have the same batches, and have passed their last blocks; tokens that are padding do
    not count. The source's log-probabilities are computed once for all results. Memory holds the
    final hidden states of a row of every chain, or of as many rows as chunks of logits have.
    """
    totals, tokens = [0.0] * len(results), 0
    for batch in source.batches:
        rows = max(1, chunk_rows(source.weights.spec.vocab) // batch.ids.shape[1])
        for start in range(0, len(batch.ids), rows):
            found = _of_rows(source, results, batch, slice(start, start + rows))
            totals = [total + float(x.sum()) for total, x in zip(totals, found, strict=True)]
            tokens += found[0].shape[0] if found else 0
    return [total / max(tokens, 1) for total in totals]


def _of_rows(
    source: Chain, results: Sequence[Chain], batch: TokenBatch, rows: slice
) -> list[Tensor]:
    """KL of every token of some rows of a batch, for each result: fp64 [tokens]."""
    mask = None if batch.mask is None else batch.mask[rows]
    before, *after = (_final(chain, batch, rows, mask) for chain in (source, *results))
    step = chunk_rows(source.weights.spec.vocab)
    parts: list[list[Tensor]] = [[] for _ in results]
    for i in range(0, len(before), step):
        log_p = log_softmax(source.skeleton.logits(source.weights, before[i : i + step]))
        for part, chain, hidden in zip(parts, results, after, strict=True):
            log_q = log_softmax(chain.skeleton.logits(chain.weights, hidden[i : i + step]))
            part.append(kl(log_p, log_q).cpu())
    return [torch.cat(part) if part else torch.zeros(0, dtype=torch.float64) for part in parts]


def _final(chain: Chain, batch: TokenBatch, rows: slice, mask: Tensor | None) -> Tensor:
    """Behind the final norm, without padding: [tokens, hidden]."""
    store = chain.entering(len(chain.weights.spec.blocks))
    hidden = store.read(batch.index, rows.start, min(rows.stop, len(batch.ids)))
    final = chain.skeleton.final_hidden(chain.weights, hidden.to(chain.skeleton.device))
    return final.flatten(0, 1) if mask is None else final[mask]
