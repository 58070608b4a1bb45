"""Greedy tokens of a transformers model, in any environment: torch only."""

from typing import Any

import torch


def greedy(model: Any, ids: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The next `count` tokens of ids [rows, tokens], through the cache: (tokens [rows, count],
    logits of each step [rows, count, vocab])."""
    past, found, logits = None, [], []
    with torch.no_grad():
        for _ in range(count):
            out = model(ids, past_key_values=past, use_cache=True)
            past, last = out.past_key_values, out.logits[:, -1].float()
            ids = last.argmax(-1, keepdim=True)
            found.append(ids)
            logits.append(last)
    return torch.cat(found, 1), torch.stack(logits, 1)
