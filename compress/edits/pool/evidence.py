"""What is known of the heads of keys and values of a block, and what becomes of those that share.

A rotary embedding turns two numbers of a head against each other; as one complex number it is
multiplied by e^(iθt). So multiplying all keys of a head by a complex number for each frequency, and
its queries by the inverse's conjugate, changes no score. Numbers that are not rotated are taken in
twos as well.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class HeadEvidence:
    """Of H heads of keys and values, F frequencies and values of width D, over T tokens, in fp64.

    keys: complex [F, H, H], sums of k_h conj(k_g). queries: [H, F], sums of |q|² over the query
    heads that read a head; both behind their norms. values: [H * D, H * D], sum of v vᵀ. outputs:
    [H, D, D], sum of W_oᵀ W_o over the query heads that read a head. normed: whether a norm over
    each head stands behind q and k.
    """

    keys: Tensor
    queries: Tensor
    values: Tensor
    outputs: Tensor
    normed: bool = False

    @property
    def heads(self) -> int:
        return self.keys.shape[1]

    @property
    def width(self) -> int:
        """Numbers of a head of values."""
        return self.outputs.shape[1]

    def key_grams(self, members: Sequence[int]) -> Tensor:
        """Sums of k conj(k) of some heads: complex [F, m, m]."""
        index = torch.tensor(members, device=self.keys.device)
        return self.keys[:, index[:, None], index]

    def value_gram(self, members: Sequence[int]) -> Tensor:
        """Sum of v vᵀ of some heads: [m * D, m * D]."""
        index = torch.tensor(members, device=self.values.device)
        columns = index[:, None] * self.width + torch.arange(self.width, device=index.device)
        columns = columns.flatten()
        return self.values[columns[:, None], columns]


@dataclass(frozen=True, slots=True, eq=False)
class SharedHead:
    """What m heads become when they share keys and values k' and v', in fp64.

    members: these heads. key_in: complex [m, F], k' = Σ key_in * k. key_out: complex [m, F], a
    head's keys are about key_out * k'. value_in: [D, m * D], v' = value_in [v ...]. value_out:
    [m, D, D], a head's values are about value_out v'.
    """

    members: tuple[int, ...]
    key_in: Tensor
    key_out: Tensor
    value_in: Tensor
    value_out: Tensor


def lost_keys(seen: HeadEvidence, shared: SharedHead) -> float:
    """Sum of |q|² |k - key_out k'|² of all members: what scores lose."""
    gram, m = seen.key_grams(shared.members), len(shared.members)
    # rest of head h = Σ_g rest[f, h, g] k_g
    made = torch.einsum("hf,gf->fhg", shared.key_out, shared.key_in)
    rest = torch.eye(m, dtype=made.dtype, device=made.device) - made
    left = torch.einsum("fhg,fgj,fhj->hf", rest, gram, rest.conj()).real
    return float((left * seen.queries[list(shared.members)]).sum())


def lost_values(seen: HeadEvidence, shared: SharedHead) -> float:
    """Sum of |W_o (v - value_out v')|² of all members: what outputs lose."""
    gram, m, width = seen.value_gram(shared.members), len(shared.members), seen.width
    made = shared.value_out.flatten(0, 1) @ shared.value_in
    rest = torch.eye(m * width, dtype=made.dtype, device=made.device) - made
    left = rest @ gram @ rest.T
    parts = left.view(m, width, m, width).diagonal(dim1=0, dim2=2)  # [D, D, m]
    return float(torch.einsum("ijm,mji->", parts, seen.outputs[list(shared.members)]))


def key_energy(seen: HeadEvidence) -> float:
    """Sum of |q|² |k|² of all heads."""
    return float((seen.keys.diagonal(dim1=1, dim2=2).real.T * seen.queries).sum())


def value_energy(seen: HeadEvidence) -> float:
    """Sum of |W_o v|² of all heads."""
    width = seen.width
    parts = seen.values.view(seen.heads, width, seen.heads, width).diagonal(dim1=0, dim2=2)
    return float(torch.einsum("ijh,hji->", parts, seen.outputs))
