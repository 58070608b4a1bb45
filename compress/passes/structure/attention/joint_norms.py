"""Norms over all heads together (OLMo 2), when heads go: they divide by the mean of fewer squares.

Their gains are multiplied by what the root of that mean is beside that of all heads, in the mean of
the tokens, so queries and keys of the heads that stay are as large as they were.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.arch.resize.cut import Kept, kept_heads
from compress.blocks.capture import calls
from compress.blocks.walk import LoadedBlock
from compress.passes.ranks import Ranks

TINY = 1e-30  # of a token whose queries are all zeros


@dataclass(frozen=True, slots=True, eq=False)
class JointNorms:
    """The norms of a block over all heads. squares: by tensor fp32 [tokens, heads], the mean square
    of each head. of_keys: those of keys."""

    squares: Mapping[str, Tensor]
    of_keys: frozenset[str]

    def scales(self, block: LoadedBlock, kept: Kept, ranks: Ranks) -> dict[str, float]:
        """What the gains of each norm are multiplied by; nothing where all heads stay."""
        if kept.heads is None and kept.kv_heads is None:
            return {}
        heads, kv_heads = kept_heads(block.spec.sizes, kept)
        found = {}
        for name, squares in self.squares.items():
            left = squares[:, kv_heads if name in self.of_keys else heads].mean(dim=1)
            ratios = (left / squares.mean(dim=1).clamp(min=TINY)).sqrt().double()
            both = torch.stack([ratios.sum(), ratios.new_tensor(float(len(ratios)))])
            whole = ranks.sum(both.to(block.skeleton.device))
            found[name] = float(whole[0] / whole[1])
        return found


def look_at_norms(block: LoadedBlock) -> JointNorms:
    """What such norms of a block read; of most families there are none."""
    linears = {x.name for x in block.spec.linears}
    names = {
        name: dims[0]
        for name, dims in block.spec.axes
        if dims in (("q",), ("k",)) and name.rpartition(".")[0] not in linears
    }
    if not names:
        return JointNorms({}, frozenset())
    paths = {name: path.rpartition(".")[0] for name, path in block.spec.modules if name in names}
    found: dict[str, list[Tensor]] = {name: [] for name in names}
    for entering in block.inputs():
        with torch.no_grad(), calls(block.module, list(paths.values())) as seen:
            block.run(entering)
        real = slice(None) if entering.mask is None else entering.mask
        for name, path in paths.items():
            read = seen[path][0][real].flatten(0, -2).float()
            heads = torch.unflatten(read, 1, (-1, block.spec.sizes.key_width))
            found[name].append(heads.square().mean(dim=2).cpu())
    squares = {name: torch.cat(each) for name, each in found.items()}
    return JointNorms(squares, frozenset(name for name, dim in names.items() if dim == "k"))
