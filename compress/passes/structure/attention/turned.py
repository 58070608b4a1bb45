"""Which numbers of a head a decoder turns against each other."""

import torch

from compress.arch.forward.forward import describe_forward
from compress.edits.turned import Turned
from compress.formats import Weights


def turned_of(weights: Weights, layer: int) -> Turned:
    """Of the heads of keys of a layer; numbers that are not rotated are taken by halves too."""
    kind = describe_forward(weights.checkpoint.config, weights.spec).grouped(layer)
    assert kind.qkv == "parts", "rows of q, k and v lie head by head"
    rotated = 0 if kind.rope is None else kind.rope.dim + kind.rope.dim % 2
    numbers = torch.arange(kind.key_width)
    halves = [x.view(2, -1) for x in (numbers[:rotated], numbers[rotated:])]
    return Turned(*(torch.cat([x[i] for x in halves]) for i in (0, 1)))
