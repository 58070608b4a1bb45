"""What changes logits before a token is chosen: bias, penalties, and ends that come too early."""

from collections.abc import Sequence as Several

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compress.runtime.sequences.request import Sampling
from compress.runtime.sequences.sequence import Sequence


def adjust(logits: Tensor, sequences: Several[Sequence]) -> None:
    """Overwrites logits, fp32 [rows, vocabulary], one row for each sequence.

    In this order: the bias is added; the repetition penalty divides logits above 0 and multiplies
    others; the frequency penalty is subtracted once for each time that a token stands in the
    output, the presence penalty once; ends before min_tokens become impossible.
    """
    _add_bias(logits, sequences)
    rows = [row for row, sequence in enumerate(sequences) if _penalised(sequence.sampling)]
    if rows:
        logits[rows] = _penalise(logits[rows], [sequences[row] for row in rows])
    _hold_back_ends(logits, sequences)


def _add_bias(logits: Tensor, sequences: Several[Sequence]) -> None:
    entries = [
        (row, token, float(bias))
        for row, sequence in enumerate(sequences)
        for token, bias in sequence.sampling.logit_bias.items()
    ]
    if entries:
        rows, tokens, values = zip(*entries, strict=True)
        logits[list(rows), list(tokens)] += torch.tensor(values, device=logits.device)


def _penalised(sampling: Sampling) -> bool:
    named = (sampling.frequency_penalty, sampling.presence_penalty)
    return any(named) or sampling.repetition_penalty != 1


def _penalise(logits: Tensor, sequences: Several[Sequence]) -> Tensor:
    samplings = [sequence.sampling for sequence in sequences]

    def column(name: str) -> Tensor:
        values = [float(getattr(sampling, name)) for sampling in samplings]
        return torch.tensor(values, device=logits.device)[:, None]

    outputs = _counts(logits, [tokens_of(s)[s.prompt_length :] for s in sequences])
    seen = (outputs > 0) | (
        _counts(logits, [tokens_of(s)[: s.prompt_length] for s in sequences]) > 0
    )
    repetition = column("repetition_penalty")
    punished = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(seen, punished, logits)
    logits = logits - column("frequency_penalty") * outputs
    return logits - column("presence_penalty") * (outputs > 0)


def tokens_of(sequence: Sequence) -> NDArray[np.int64]:
    """Prompt and output. A copy: an array that is looked into cannot grow."""
    return np.frombuffer(sequence.tokens, np.int32).astype(np.int64)


def _counts(logits: Tensor, texts: Several[NDArray[np.int64]]) -> Tensor:
    """How often each token stands in each text, in the shape of the logits. int64."""
    rows, vocabulary = logits.shape
    places = [text + row * vocabulary for row, text in enumerate(texts)]
    flat = torch.from_numpy(np.concatenate(places)).to(logits.device)
    return torch.bincount(flat, minlength=rows * vocabulary).view(rows, vocabulary)


def _hold_back_ends(logits: Tensor, sequences: Several[Sequence]) -> None:
    for row, sequence in enumerate(sequences):
        least = sequence.sampling.min_tokens
        if least and sequence.generated < least and sequence.stop_ids:
            logits[row, list(sequence.stop_ids)] = -torch.inf
