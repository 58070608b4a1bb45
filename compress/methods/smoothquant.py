"""SmoothQuant: accurate and efficient post-training quantization for large language models.

Xiao, Lin, Seznec, Wu, Demouth, Han 2022, https://arxiv.org/abs/2211.10438

Activations have few channels that are much larger than the others, in every token, and weights have
none. Dividing what a norm writes by s and multiplying the columns that read it by s moves that
difficulty from the activations to the weights:

    s_j = max|x_j|^alpha / max|w_j|^(1 - alpha)        (eq. 4)

max|w_j| is taken over all quantized linears that read the channel. The scale is a fold
(compress.methods.folding); rounding weights and activations is the business of the next stage.

What differs from the paper, and why:
* A channel that calibration never drove, or that no weight reads, keeps scale 1 where the paper's
  code clamps both maxima to 1e-5: dividing a norm by 1e-5 serves nobody.
* Pairs between two linears (v and o; up and down) are there for who asks; the paper folds into
  norms only.

Left out: nothing.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from compress.errors import RecipeError
from compress.methods.folding import UNDRIVEN, FoldChoice, PairView, by_channel
from compress.methods.observed import Needs
from compress.methods.rtn import GroupSearch
from compress.quant.scheme import Signs


@dataclass(frozen=True, slots=True)
class SmoothQuantConfig:
    """Options of a `smoothquant` stage.

    alpha: how much of the difficulty goes to the weights: 0 none, 1 all of it.
    pairs: "norms" folds into norms only, "all" also between two linears.
    signs: as in `rtn`, where no other stage rounds the layers.
    """

    alpha: float = 0.5
    pairs: Literal["norms", "all"] = "norms"
    signs: Signs = "auto"

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise RecipeError(f"alpha is {self.alpha}; it is a share from 0 to 1, such as 0.5")

    @property
    def scale_search(self) -> GroupSearch:
        """How ranges are clipped where no other stage rounds the layers: no option of the paper."""
        return "importance"


def needs(config: SmoothQuantConfig) -> Needs:
    """The magnitudes it scales by, and a Hessian for rounding and for its error."""
    return Needs(hessian=True, magnitudes=True, pairs=config.pairs)


def search(view: PairView, config: SmoothQuantConfig) -> FoldChoice:
    """The scale of eq. (4) for the channels of one pair."""
    if config.pairs == "norms" and view.pair.kind == "linear":
        return FoldChoice(None, "pairs is norms")
    if not view.readers:
        return FoldChoice(None, "none of its readers is quantized")
    x = by_channel(view.pair, view.absmax).amax(dim=0)  # x: [C]
    if not bool((x > 0).any()):
        return FoldChoice(None, UNDRIVEN)
    peaks = torch.stack([r.folded().abs().amax(dim=0) for r in view.readers]).amax(dim=0)
    w = by_channel(view.pair, peaks).amax(dim=0)  # w: [C]
    scale = x.pow(config.alpha) / w.pow(1 - config.alpha)
    good = (x > 0) & (w > 0) & torch.isfinite(scale) & (scale > 0)
    scale = torch.where(good, scale, torch.ones_like(scale))
    return FoldChoice(scale, f"alpha {config.alpha:g}")
