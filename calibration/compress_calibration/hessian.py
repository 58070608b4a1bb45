"""Statistics of the inputs of linears, summed over calibration tokens.

Linears that read the same input (q, k, v; gate, up) share one accumulator. The Hessian of the
layer-wise objective tr(D H Dᵀ) is the mean of x xᵀ over tokens; GPTQ and importance weights read
it alike, and its scale does not depend on how much text was seen.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from compress.errors import DataError
from compress_kernels import gram_


@dataclass(frozen=True, slots=True)
class Stats:
    """Statistics of one input. hessian fp32 [K, K]; absmax fp32 [K] where asked for."""

    hessian: Tensor
    tokens: int
    absmax: Tensor | None = None


@dataclass(slots=True)
class GramAccumulator:
    """Running sum of xᵀx of the inputs named `key`, of width K."""

    key: str
    gram: Tensor  # fp32 [K, K]
    absmax: Tensor | None  # fp32 [K]
    tokens: int = 0

    @classmethod
    def create(
        cls, key: str, features: int, *, device: str = "cpu", absmax: bool = False
    ) -> "GramAccumulator":
        """An empty sum; `absmax` also keeps the largest magnitude of every input feature."""
        gram = torch.zeros(features, features, dtype=torch.float32, device=device)
        peak = torch.zeros(features, dtype=torch.float32, device=device) if absmax else None
        return cls(key, gram, peak)

    def add(self, x: Tensor) -> None:
        """Add the tokens of x [tokens, K], bf16, fp16 or fp32; none at all is fine."""
        assert x.ndim == 2, f"{self.key}: {tuple(x.shape)}"
        assert x.shape[1] == self.gram.shape[0], f"{self.key}: {tuple(x.shape)}"
        if x.shape[0] == 0:
            return
        gram_(x, self.gram)
        if self.absmax is not None:
            torch.maximum(self.absmax, x.abs().amax(dim=0).float(), out=self.absmax)
        self.tokens += x.shape[0]

    def hessian(self) -> Tensor:
        """Mean of x xᵀ, fp32 [K, K]; zeros before the first token.

        Raises DataError when an input was NaN or infinite.
        """
        # Any such input leaves its mark on the diagonal, K numbers instead of K x K.
        bad = (~self.gram.diagonal().isfinite()).nonzero().flatten()
        if bad.numel():
            raise DataError(
                f"inputs of {self.key} are not finite in {bad.numel()} of {self.gram.shape[0]}"
                f" features (first: {int(bad[0])}); run with --dtype fp32"
            )
        return self.gram / max(1, self.tokens)

    def stats(self) -> Stats:
        """The statistics so far. Raises DataError like `hessian`."""
        return Stats(self.hessian(), self.tokens, self.absmax)
