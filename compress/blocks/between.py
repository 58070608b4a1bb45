"""Attention of a model between two passes of one stage, whose class is built with other heads than
it has (compress/arch/resize/between.py)."""

from typing import Any

import torch
from torch import nn

from compress.arch.sizes import BlockSizes
from compress.arch.spec import DecoderSpec, LinearSpec
from compress.blocks.linear import is_conv1d


def fit_heads(model: Any, stack: nn.Module, spec: DecoderSpec) -> None:
    """Give the linears of blocks on the meta device the shapes that the spec says, and attention
    the numbers of heads that it computes with. stack: the list of blocks."""
    for block, module in zip(spec.blocks, stack.children(), strict=True):
        for linear in block.linears:
            if linear.expert is None:
                _fit(module.get_submodule(linear.module), linear)
            if linear.role == "o":
                attention = module.get_submodule(linear.module.rpartition(".")[0])
                _count(vars(attention), block.sizes)
    # Rotations that go by the length count their numbers again in a forward.
    config, sizes = vars(model.config), spec.blocks[0].sizes
    _count(config, sizes)
    config["head_dim"] = sizes.key_width


def _fit(module: Any, linear: LinearSpec) -> None:
    rows, columns = linear.shape
    turned = is_conv1d(module)
    shape = (columns, rows) if turned else (rows, columns)
    if tuple(module.weight.shape) == shape:
        return
    for name, dims in (("weight", shape), ("bias", (rows,))):
        there = getattr(module, name)
        if there is not None:
            value = torch.empty(dims, dtype=there.dtype, device="meta")
            setattr(module, name, nn.Parameter(value, requires_grad=False))
    for name, number in zip(
        ("nf", "nx") if turned else ("out_features", "in_features"), (rows, columns), strict=True
    ):
        setattr(module, name, number)


def _count(held: dict[str, Any], sizes: BlockSizes) -> None:
    """Set the numbers of heads under the names that classes of transformers have for them."""
    counts = {
        "num_heads": sizes.heads,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "num_key_value_groups": sizes.heads // sizes.kv_heads,
        "split_size": sizes.of("q"),  # of Conv1D's q, k and v in one
    }
    held |= {name: count for name, count in counts.items() if name in held}
