"""What is known of the attention of a block before its keys and values become one latent.

A rotary embedding turns two numbers of a head against each other; as one complex number it is
multiplied by e^(iθt). Here queries, keys and values are those before any rotation.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from compress.edits.turned import Turned


@dataclass(frozen=True, slots=True, eq=False)
class AttentionEvidence:
    """Of H query heads, G heads of keys of width D and of values of width V, F = D / 2 frequencies;
    means over the tokens that were seen, in fp64.

    turned: which numbers of a head are one complex number. states: [G * D + G * V, the same], mean
    of x xᵀ, where x is keys and values, head by head, and a token counts as much as all heads
    attend to it: what nobody reads may be lost. On tale-6m with a quarter of the cache that takes
    perplexity from +5.5 % to +5.0 %. queries: [H, D, D], mean of q qᵀ.
    rotation: complex [H, F], the mean of e^(iθ(t - s)) over the positions s that a head attends to
    from t. outputs: [G, V, V], sum of W_oᵀ W_o over the query heads that read a head. phases:
    whether components of keys may have one for each head, and come by what they gain; else they are
    real, and the largest come first. fold: so many neighbouring frequencies, M, have components
    together, as if they were one; it divides F.
    """

    turned: Turned
    states: Tensor
    queries: Tensor
    rotation: Tensor
    outputs: Tensor
    phases: bool = True
    fold: int = 1

    @property
    def heads(self) -> int:
        return self.queries.shape[0]

    @property
    def groups(self) -> int:
        return self.outputs.shape[0]

    @property
    def key_width(self) -> int:
        return self.queries.shape[1]

    @property
    def frequencies(self) -> int:
        return self.rotation.shape[1]

    @property
    def keys(self) -> int:
        """Numbers of the keys of all heads."""
        return self.groups * self.key_width

    def by_group(self, each: Tensor) -> Tensor:
        """[H, ...] of query heads as [G, H / G, ...]."""
        return torch.unflatten(each, 0, (self.groups, -1))

    def query_energy(self) -> Tensor:
        """[H, F], mean of |q|² at each frequency."""
        squares = self.queries.diagonal(dim1=1, dim2=2)
        return squares[:, self.turned.real] + squares[:, self.turned.imaginary]

    def by_block(self, each: Tensor) -> Tensor:
        """[G, F] as [F / M, G * M], of folded frequencies together."""
        return torch.unflatten(each, 1, (-1, self.fold)).transpose(0, 1).flatten(1)

    def key_grams(self) -> Tensor:
        """Mean of k conj(k) between the numbers of all heads at folded frequencies: complex
        [F / M, G * M, G * M]."""
        keys = self.states[: self.keys, : self.keys]
        parts = keys.view(self.groups, self.key_width, self.groups, self.key_width)
        real, imaginary = (x.view(-1, self.fold) for x in (self.turned.real, self.turned.imaginary))

        def between(left: Tensor, right: Tensor) -> Tensor:
            found = parts[:, left[:, :, None], :, right[:, None]]  # [F / M, M, M, G, G]
            return found.permute(0, 3, 1, 4, 2).flatten(3).flatten(1, 2)

        same = between(real, real) + between(imaginary, imaginary)
        if not self.phases:
            return torch.complex(same, torch.zeros_like(same))
        across = between(imaginary, real) - between(real, imaginary)
        return torch.complex(same, across)
