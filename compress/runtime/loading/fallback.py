"""Decoders that are in no table of forwards: transformers' own model, a text at a time.

It offers the engine what any decoder does. Blocks hold tokens here in place of keys and values, so
chunks, shared prefixes, forks and preemption cost nothing and change nothing; transformers' caches
of the texts that were computed last are kept beside.
"""

import inspect
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from compress.blocks.sample import whole_model
from compress.blocks.skeleton import Skeleton
from compress.runtime.engine.batch import FlatBatch
from compress.runtime.sequences.tables import CacheGroup

if TYPE_CHECKING:
    from compress.formats.weights import Weights


class TokenCache:
    """tokens: int64 [blocks, block size]. One group, as tokens have no windows."""

    def __init__(self, blocks: int, block_size: int) -> None:
        """blocks: the null block included."""
        self.block_size = block_size
        self.groups = (CacheGroup(None, blocks),)
        self.tokens = torch.zeros(blocks, block_size, dtype=torch.int64)

    def copy(self, source: int, target: int, group: int) -> None:
        """Copies a block."""
        self.tokens[target] = self.tokens[source]


class TransformersDecoder:
    """texts: so many texts' keys and values are kept; one that comes back later starts anew."""

    # Rows do not meet here.
    multiple = 1

    def __init__(
        self,
        weights: "Weights",
        *,
        dtype: torch.dtype,
        device: str,
        texts: int,
    ) -> None:
        """Errors: CheckpointError where transformers does not know the model either."""
        self.skeleton = Skeleton(
            weights.checkpoint.config, weights.spec, dtype=dtype, device=device
        )
        self.model: Any = whole_model(weights, self.skeleton)
        self.device, self.texts = torch.device(device), texts
        # Late: this module is imported without transformers, which the cache's is not.
        from compress.blocks.cache import cache_argument

        self._cache_name = cache_argument(self.model)
        # mamba's states, and those of its hybrids, are gone on from by a single token only: of
        # several at once transformers computes none with what came before.
        self._takes_one = bool(getattr(self.model, "_is_stateful", False))
        self._asks_rows = "logits_to_keep" in inspect.signature(self.model.forward).parameters
        # Tokens of a text -> transformers' cache of them, the one that was used last at the end.
        self._caches: OrderedDict[tuple[int, ...], Any] = OrderedDict()

    @torch.inference_mode()
    def forward(self, batch: FlatBatch, cache: TokenCache) -> Tensor:
        """fp32 logits [R, vocabulary] in place of hidden states.

        A text is computed when logits of it are asked, from its beginning or from where one of the
        kept caches ends. Rows come item by item, so in the order of their texts.
        """
        cache.tokens.view(-1)[batch.slots[0].cpu()] = batch.ids.cpu()
        asked: dict[int, list[int]] = {}
        for row in batch.rows.tolist():
            asked.setdefault(int(batch.sequence[row]), []).append(int(batch.positions[row]))
        found = [
            self._logits(_text(cache, batch, text, wanted[-1]), wanted)
            for text, wanted in asked.items()
        ]
        if not found:
            return torch.zeros(0, self.skeleton.spec.vocab, device=self.device)
        return torch.cat(found)

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden

    def _logits(self, text: tuple[int, ...], wanted: list[int]) -> Tensor:
        """Logits [positions, vocabulary] of some of a text, in order, the last of them its last."""
        first = wanted[0]
        begun = [known for known in self._caches if known == text[: min(first, len(known))]]
        done = max(map(len, begun), default=0)
        if self._takes_one and done < len(text) - 1:
            done = 0
        past = self._caches.pop(text[:done]) if done else None
        ids = torch.tensor([text[done:]], device=self.device)
        options: dict[str, Any] = {}
        if self._asks_rows:
            options["logits_to_keep"] = len(text) - first
        if self._cache_name is not None:
            options |= {self._cache_name: past, "use_cache": True}
        out = self.model(input_ids=ids, **options)
        if self._cache_name is not None:
            self._caches[text] = getattr(out, self._cache_name)
        while len(self._caches) > self.texts:
            self._caches.popitem(last=False)
        return out.logits[0, [position - len(text) for position in wanted]].float()  # type: ignore[no-any-return]


def _text(cache: TokenCache, batch: FlatBatch, number: int, last: int) -> tuple[int, ...]:
    """The tokens of a text up to a position."""
    blocks = batch.tables[0][number].cpu().long()
    return tuple(cache.tokens[blocks].flatten()[: last + 1].tolist())
