"""How fast a step learns: a schedule of transformers, times a peak that follows the damage."""

import math
from typing import Any, Literal

import torch

ScheduleName = Literal["cosine", "wsd"]

# Of what transformers' get_scheduler takes: its name, and what it is told besides.
_NAMES: dict[ScheduleName, str] = {"cosine": "cosine", "wsd": "warmup_stable_decay"}
WARM_UP = 0.05  # share of all steps
DECAY = 0.3  # share of all steps in which "wsd" comes down, by 1 - sqrt
# The most, at a hidden size of 256 and 16 rows a step; the KL from which on it is taken; the least
# share of it.
PEAK, FULL_DAMAGE, LEAST_SHARE = 2e-3, 0.3, 0.1
ROWS = 16


def rates(name: ScheduleName, steps: int) -> tuple[float, ...]:
    """Share of the peak rate at each of `steps` steps, from transformers' own schedule.

    Its zeros at both ends are left out, since a step at rate 0 does nothing.
    """
    from transformers.optimization import get_scheduler

    warm_up = min(round(WARM_UP * steps), steps - 1)
    more: dict[str, Any] = {}
    if name == "wsd":
        more = {"num_decay_steps": max(1, round(DECAY * steps)), "decay_type": "1-sqrt"}
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    schedule = get_scheduler(_NAMES[name], optimizer, warm_up + 1, steps + 1, more)
    found = []
    for _ in range(steps):
        optimizer.step()
        schedule.step()
        found.append(float(schedule.get_last_lr()[0]))
    return tuple(found)


def highest_rate(hidden: int) -> float:
    """2e-3 · 256 / hidden. Wider models take less, as the updates of Adam add up over the inputs of
    a linear: at 4,096 it is 1.25e-4, where MHA2MLA took 1e-4 and X-EcoMLA 8e-5."""
    return PEAK * 256 / hidden


def by_rows(rows: int) -> float:
    """How the rate goes with the rows of a step: by the square root, as the noise of gradients
    does. Of tale-6m with 60 % of its parameters, KL 0.277, 200k tokens came with 16 rows to 0.204
    at 2e-3 and to 0.238 at 4e-3; with 4 rows to 0.191 at 1e-3 and to 0.208 at 2e-3."""
    return math.sqrt(rows / ROWS)


def rate_for(kl: float, hidden: int) -> float:
    """The peak for a whole student that starts at this divergence a token.

    `highest_rate` · min(1, kl / 0.3)², and at least a tenth of the highest.

    A little damage is soon made larger. Of tale-6m (hidden 256) with an FFN of 512, KL 0.084, 80k
    tokens came to 0.066 at 2e-4 and to 0.072 at 1e-3, and 2e-3 was at 0.125 halfway; with 60 % of
    its parameters, KL 0.395, 250k tokens came to 0.226 at 2e-3. The rule gives 2e-4 and 2e-3.
    """
    share = min(1.0, kl / FULL_DAMAGE) ** 2
    return highest_rate(hidden) * max(share, LEAST_SHARE)
