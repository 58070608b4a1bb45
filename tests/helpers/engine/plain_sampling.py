"""Sampling as it reads in the documents: one row, float64, one token after the other."""

import math
from collections import Counter
from collections.abc import Sequence

from compress.runtime.sequences.request import Sampling


def adjusted(
    logits: Sequence[float], sampling: Sampling, prompt: Sequence[int], output: Sequence[int]
) -> list[float]:
    """Logits behind bias and penalties."""
    found = list(logits)
    for token, bias in sampling.logit_bias.items():
        found[token] += bias
    for token in {*prompt, *output}:
        factor = sampling.repetition_penalty
        found[token] = found[token] / factor if found[token] > 0 else found[token] * factor
    for token, count in Counter(output).items():
        found[token] -= sampling.frequency_penalty * count + sampling.presence_penalty
    return found


def probabilities(logits: Sequence[float], sampling: Sampling) -> list[float]:
    """What each token is drawn with, at a temperature above 0."""
    top = max(logits)
    weights = [math.exp((x - top) / sampling.temperature) for x in logits]
    order = sorted(range(len(weights)), key=lambda token: (-weights[token], token))
    order = order[: sampling.top_k or len(order)]
    whole, mass, kept = sum(weights[token] for token in order), 0.0, []
    for token in order:
        kept.append(token)
        mass += weights[token]
        if mass >= sampling.top_p * whole and sampling.top_p < 1:
            break
    kept = [token for token in kept if weights[token] >= sampling.min_p * weights[order[0]]]
    whole = sum(weights[token] for token in kept)
    return [weights[t] / whole if t in kept else 0.0 for t in range(len(weights))]
