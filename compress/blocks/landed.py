"""Latents that the norm behind them leaves as they are, as `mla` lands them in a stock class.

The rows that make such a latent are so small that its mean square is nothing beside the norm's eps
of 1e-6, so the norm multiplies by 1000 and its weight. Numbers of 1e-9 cannot be trained. So for a
training the rows are made as large as the latent, and the norm becomes a factor; both are exact,
and so is the way back, as they are powers of two.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from compress.arch.forward.table import FORWARDS
from compress.arch.spec import BlockSpec
from compress.errors import CheckpointError

if TYPE_CHECKING:
    from compress.formats.weights import Weights

SMALL = 2.0**-23
NORM_WEIGHT = 8192.0
KEPT = 1000 / 1024  # what a latent is multiplied by in all: SMALL / √eps * NORM_WEIGHT


class LatentFactor(nn.Module):
    """What a norm is to a latent that has no weight in its mean square."""

    def forward(self, x: Tensor) -> Tensor:
        return x * KEPT


def unland(module: nn.Module, spec: BlockSpec, family: str) -> dict[str, int]:
    """Make the landed latents of a loaded block plain ones, in place.

    Returns the tensors that changed, with how many of their first rows did; of a norm, which is a
    factor now, 0.
    """
    changed: dict[str, int] = {}
    tensors = {path: name for name, path in spec.modules}
    for path, role, rows in _latents(spec, family):
        weight = module.get_parameter(f"{path}.weight")
        if not bool((weight == NORM_WEIGHT).all()):
            continue
        linear = next(x for x in spec.linears if x.role == role)
        changed[tensors[f"{path}.weight"]] = 0
        for leaf in ("weight", "bias"):
            name = f"{linear.module}.{leaf}"
            if name in tensors:
                with torch.no_grad():
                    module.get_parameter(name)[:rows] /= SMALL
                changed[tensors[name]] = rows
        parent, _, leaf = path.rpartition(".")
        setattr(module.get_submodule(parent), leaf, LatentFactor())
    return changed


def check_latents(weights: "Weights", dtype: torch.dtype) -> None:
    """CheckpointError for fp16 where a model has such latents: they are of 1e-7 before their norm,
    and would be lost."""
    spec = weights.spec
    if dtype != torch.float16 or not spec.blocks:
        return
    block = spec.blocks[0]
    tensors = {path: name for name, path in block.modules}
    norms = [tensors[f"{path}.weight"] for path, _, _ in _latents(block, spec.family)]
    if any(bool((weights.read(name) == NORM_WEIGHT).all()) for name in norms):
        raise CheckpointError(
            f"{weights.checkpoint.path} has latents that mla has made, which fp16 is too coarse"
            " for; take dtype bf16 or fp32"
        )


def _latents(spec: BlockSpec, family: str) -> Iterator[tuple[str, str, int]]:
    """Of each latent the path of its norm, the role of what makes it, and how many rows that has
    for it."""
    sizes = spec.sizes.latent
    if sizes is None:
        return
    norms = FORWARDS[family].norms
    if norms.kv_latent is not None:
        yield norms.kv_latent, "kv_a", sizes.rank
    if sizes.query_rank and norms.query_latent is not None:
        yield norms.query_latent, "q_a", sizes.query_rank


def land(tensors: Mapping[str, Tensor], changed: Mapping[str, int]) -> dict[str, Tensor]:
    """Tensors of a model as they are stored. changed: what `unland` said of it."""
    made = dict(tensors)
    for name, rows in changed.items():
        if rows and name in made:
            value = made[name].clone()
            value[:rows] *= SMALL
            made[name] = value
    return made
