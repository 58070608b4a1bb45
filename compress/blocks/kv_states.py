"""A stand-in for the key/value cache: a block shows its keys and values as it would store them."""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

# What blocks of transformers 5 call it, most of them by the first name since 5.24.
ARGUMENTS = ("cache", "past_key_values", "layer_past")


@dataclass(slots=True)
class PassingCache:
    """Takes the place of transformers' cache in one call of a block and stores nothing.

    key, value: keys or values [batch, heads, seq, head_dim], keys already rotated -> what attention
    uses.
    met: whether a block called it.
    """

    key: Callable[[Tensor], Tensor]
    value: Callable[[Tensor], Tensor]
    met: bool = field(default=False)

    def update(self, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """What attention does with new keys and values: here all there are."""
        self.met = True
        return self.key(key), self.value(value)

    def get_seq_length(self, *_: Any) -> int:
        return 0


@dataclass(slots=True)
class Peak:
    """Largest magnitude so far of keys or values. mask: bool [batch, seq], False for padding.

    absmax: stays NaN or infinite once such a state was seen.
    """

    absmax: float = 0.0
    mask: Tensor | None = None

    def see(self, states: Tensor) -> Tensor:
        """Look at states [batch, heads, seq, head_dim] and hand them on."""
        seen = states.abs().amax(dim=(1, 3))  # seen: [batch, seq]
        if self.mask is not None:
            seen = seen.masked_fill(~self.mask.to(seen.device, torch.bool), 0)
        if math.isfinite(self.absmax):
            self.absmax = max(float(seen.max()), self.absmax)  # in this order NaN is kept
        return states


def call_with_cache(
    block: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    cache: PassingCache,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a block behind its hidden states, with the cache among them.

    Some blocks are called with the cache's place filled by position (gpt2), most by name.
    """
    names = list(inspect.signature(block.forward).parameters)
    argument = next((name for name in ARGUMENTS if name in names), ARGUMENTS[0])
    place = names.index(argument) - 1 if argument in names else len(args)
    if place < len(args):
        return (*args[:place], cache, *args[place + 1 :]), dict(kwargs)
    return args, {**kwargs, argument: cache}
