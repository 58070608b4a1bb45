"""What an artifact is held to: our own decoder, in fp32, on the weights as they are decoded."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.formats.weights import Weights
from compress.machine.memory import available_bytes
from compress.runtime.decoder.decoder import Decoder
from compress.runtime.decoder.kv import KVCache
from compress.runtime.engine.batch import TextChunk, build_batch
from compress_exporters.decoded import Decoded

BLOCK = 16  # positions of a block of the cache
# Tokens of the text that is compared, where the model reads as many.
LENGTH = 48


@dataclass(frozen=True, slots=True)
class Apart:
    """The first of some tokens that our decoder would not choose.

    number: of those before. chosen: it. wanted: our decoder's, whose logit is larger by `by`.
    """

    number: int
    chosen: int
    wanted: int
    by: float


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """Our decoder with what it needs."""

    decoder: Decoder

    @classmethod
    def load(cls, source: Weights, *, inputs: bool = False) -> "Reference":
        """inputs: rounded where the source says so."""
        return cls.of(Decoded.of(source, inputs=inputs))

    @classmethod
    def of(cls, weights: Weights) -> "Reference":
        """On weights that count as dense ones."""
        return cls(Decoder.load(weights))

    def logits(self, ids: Sequence[int], prompt: int | None = None) -> Tensor:
        """fp32 [tokens, rows of the head] of one text, from its first token on.

        prompt: tokens that the text came with, all of them by default: rotations may depend on it.
        """
        how, multiple = self.decoder.how, self.decoder.multiple
        blocks = -(-len(ids) // BLOCK)
        cache = KVCache(
            how,
            [blocks + 1] * len(how.windows),
            BLOCK,
            dtype=self.decoder.dtype,
            device=self.decoder.device,
        )
        table = range(1, blocks + 1)
        chunk = TextChunk(ids, 0, 0, (table,) * len(how.windows), prompt or len(ids))
        batch = build_batch([chunk], BLOCK, multiple).to(self.decoder.device)
        return self.decoder.logits(self.decoder.forward(batch, cache))[: len(ids)]

    def apart(self, prompt: Sequence[int], chosen: Sequence[int], slack: float) -> Apart | None:
        """The first of the tokens behind a prompt that our decoder would not choose; None if there
        is none. A choice between two logits that are no farther apart than the slack is none."""
        so_far = list(prompt)
        for number, token in enumerate(chosen):
            logits = self.logits(so_far, len(prompt))[-1]
            by = float(logits.max() - logits[token])
            if by > slack:
                return Apart(number, token, int(logits.argmax()), by)
            so_far.append(token)
        return None


def text(source: Weights, length: int = LENGTH) -> list[int]:
    """Ids at random, always the same, of a text that the model reads whole."""
    most = min(length, source.spec.context or length)
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, source.spec.vocab, (most,), generator=generator).tolist()


def fits(needed: int) -> bool:
    """Whether so many bytes are free, or nobody knows."""
    free = available_bytes()
    return free is None or needed < free
