"""How the output of attention reads the values of each head."""

import torch
from torch import Tensor

from compress.blocks.linear import linear_weight
from compress.blocks.walk import LoadedBlock


def value_metrics(block: LoadedBlock) -> Tensor:
    """Sum of W_oᵀ W_o over the query heads that read a head of values: fp64 [G, V, V]."""
    sizes = block.spec.sizes
    linear = next(x for x in block.spec.linears if x.role == "o")
    weight = linear_weight(block.module, linear).double()
    heads = torch.unflatten(weight, 1, (sizes.kv_heads, -1, sizes.value_width))  # [hidden, G, g, V]
    return torch.einsum("nhgi,nhgj->hij", heads, heads)
