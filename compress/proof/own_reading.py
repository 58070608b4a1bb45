"""What our own reading of a checkpoint gives: logits in fp32, one block in memory at a time."""

from pathlib import Path

import torch
from torch import Tensor

from compress.arch.spec import DecoderSpec
from compress.blocks.skeleton import Skeleton
from compress.blocks.states import HiddenStates
from compress.blocks.walk import Chain, token_batches, walk
from compress.formats import Weights

# As many of the text as of the whole vocabulary, whose rows a text hardly meets.
TOKENS = 64
SEED = 20_240_229


def ids_for(spec: DecoderSpec, text: list[int]) -> Tensor:
    """int64 [1, tokens]: of `text` at most half of TOKENS, then random ones of the vocabulary."""
    count = min(TOKENS, spec.context or TOKENS)
    begun = [x for x in text if x < spec.vocab][: count // 2]
    drawn = torch.Generator().manual_seed(SEED)
    rest = torch.randint(spec.vocab, (count - len(begun),), generator=drawn)
    return torch.cat([torch.tensor(begun, dtype=torch.int64), rest])[None]


def own_logits(weights: Weights, ids: Tensor, blocks: int | None = None) -> Tensor:
    """fp32 [1, tokens, vocab] of ids [1, tokens]. blocks: that the model is cut behind, None for
    all of them."""
    spec = weights.spec
    skeleton = Skeleton(weights.checkpoint.config, spec, dtype=torch.float32)
    shape = (*ids.shape, spec.hidden)
    size = torch.Size(shape).numel() * torch.float32.itemsize
    with HiddenStates(Path(), [shape], torch.float32, budget=size) as states:
        chain = Chain(skeleton, weights, token_batches(ids, None, len(ids)), (states,))
        chain.embed()
        for block in walk(chain, spec.blocks[:blocks]):
            block.run_on()
        (hidden,) = chain.final()
    return skeleton.logits(weights, hidden.flatten(0, 1)).view(*ids.shape, -1)
