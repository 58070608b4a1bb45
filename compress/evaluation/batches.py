"""Windows of several texts in batches for the blocks, and where their scored tokens end up."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.evaluation.windows import TokenWindows

# Lengths are rounded up to a multiple of this, so that few shapes (masks, rotary tables) occur.
LENGTH_STEP = 32


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Windows of about one length.

    ids: int64 [windows, length], padded on the right.
    predicting: int64 [tokens], positions in the flattened [windows * length] whose output predicts
        a scored token.
    targets: int64 [tokens], those tokens.
    text: int64 [tokens], index of the text each belongs to.
    """

    ids: Tensor
    predicting: Tensor
    targets: Tensor
    text: Tensor


def make_batches(
    texts: Sequence[TokenWindows], batch_tokens: int, *, alone: bool = False
) -> list[Batch]:
    """Batches of at most `batch_tokens` padded tokens (one window at least), longest first.

    alone: each window by itself and without padding. The order of the scored tokens is the same.
    """
    step = 1 if alone else LENGTH_STEP
    windows = [(t, w) for t, text in enumerate(texts) for w in range(len(text.lengths))]
    windows.sort(key=lambda tw: -int(texts[tw[0]].lengths[tw[1]]))
    longest = max((text.ids.shape[1] for text in texts), default=0)
    batches: list[Batch] = []
    while windows:
        t, w = windows[0]
        length = min(-(-int(texts[t].lengths[w]) // step) * step, longest)
        count = 1 if alone else max(1, batch_tokens // length)
        batches.append(_batch(texts, windows[:count], length))
        windows = windows[count:]
    return batches


def _batch(texts: Sequence[TokenWindows], windows: Sequence[tuple[int, int]], length: int) -> Batch:
    ids = torch.zeros(len(windows), length, dtype=torch.int64)
    predicting, targets, text = [], [], []
    for row, (t, w) in enumerate(windows):
        source = texts[t]
        stop, first = int(source.lengths[w]), int(source.first[w])
        ids[row, :stop] = source.ids[w, :stop]
        predicting.append(row * length + torch.arange(first - 1, stop - 1))
        targets.append(ids[row, first:stop])
        text.append(torch.full((stop - first,), t, dtype=torch.int64))
    return Batch(ids, torch.cat(predicting), torch.cat(targets), torch.cat(text))
