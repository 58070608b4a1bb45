"""A key/value cache that does not copy itself for every token.

Imports transformers, so it is itself imported late.
"""

import inspect
from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

CACHES = ("cache", "past_key_values", "cache_params")  # the first since transformers 5.24


class _Reserved(DynamicLayer):  # type: ignore[misc]  # transformers is checked as Any
    """A growing layer whose final length is known: the tokens are written into place.

    DynamicLayer concatenates, which at 128 sequences of 512 tokens moves the whole cache 512 times.
    """

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length
        self.buffers: tuple[Tensor, Tensor] | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        # key_states, value_states: [batch, kv_heads, new, head_dim]
        start = self.get_seq_length()
        stop = start + key_states.shape[-2]
        if self.buffers is None:
            self.lazy_initialization(key_states, value_states)
            self.buffers = (_room(key_states, self.length), _room(value_states, self.length))
        keys, values = self.buffers
        keys[..., start:stop, :] = key_states
        values[..., start:stop, :] = value_states
        self.keys, self.values = keys[..., :stop, :], values[..., :stop, :]
        return self.keys, self.values


def cache_argument(model: Any) -> str | None:
    """What a causal LM of transformers calls the cache, in its forward and in what that returns.

    None where its forward takes no cache. A model is never given one under another name: mamba's
    swallows it, and reads every token as if it were the first.
    """
    known = inspect.signature(model.forward).parameters
    return next((name for name in CACHES if name in known), None)


def reserved_cache(config: Any, length: int) -> DynamicCache:
    """A cache for `length` tokens a sequence; sliding-window layers keep their own form."""
    cache = DynamicCache(config=config)
    cache.layers = [_Reserved(length) if type(y) is DynamicLayer else y for y in cache.layers]
    return cache


def _room(states: Tensor, length: int) -> Tensor:
    return states.new_empty(*states.shape[:-2], length, states.shape[-1])
