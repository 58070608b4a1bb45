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
class InputStats:
    """Statistics of one input of width K.

    hessian: fp32 [K, K], mean of x xᵀ. absmax, absmean: fp32 [K], largest and mean magnitude of
    every feature, where asked for.
    """

    hessian: Tensor
    tokens: int
    absmax: Tensor | None = None
    absmean: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Magnitudes:
    """Largest magnitude and sum of magnitudes of every feature so far, fp32 [K]."""

    peak: Tensor
    total: Tensor

    def add(self, x: Tensor) -> None:
        """Add the tokens of x [tokens, K], at least one."""
        size = x.abs()
        torch.maximum(self.peak, size.amax(dim=0).float(), out=self.peak)
        self.total.add_(size.sum(dim=0, dtype=torch.float32))


@dataclass(slots=True)
class SquareSums:
    """Running sum of the squares of an input of width K, where no more of it is asked for: K
    numbers and K products a token in place of K x K."""

    key: str
    total: Tensor  # fp32 [K]
    tokens: int = 0

    @classmethod
    def create(cls, key: str, features: int, *, device: str = "cpu") -> "SquareSums":
        return cls(key, torch.zeros(features, dtype=torch.float32, device=device))

    def add(self, x: Tensor) -> None:
        """Add the tokens of x [tokens, K]; none at all is fine."""
        self.total.add_(x.float().square().sum(dim=0))
        self.tokens += x.shape[0]

    def mean(self) -> Tensor:
        """Mean squares fp32 [K], the diagonal of `GramAccumulator.hessian`; DataError like it."""
        _require_finite(self.key, self.total)
        return self.total / max(1, self.tokens)


@dataclass(slots=True)
class GramAccumulator:
    """Running sum of xᵀx of the inputs named `key`, of width K."""

    key: str
    gram: Tensor  # fp32 [K, K]
    magnitudes: Magnitudes | None
    tokens: int = 0

    @classmethod
    def create(
        cls, key: str, features: int, *, device: str = "cpu", magnitudes: bool = False
    ) -> "GramAccumulator":
        """An empty sum; `magnitudes` also keeps largest and mean magnitude of every feature."""
        gram = torch.zeros(features, features, dtype=torch.float32, device=device)
        sizes = Magnitudes(gram.new_zeros(features), gram.new_zeros(features))
        return cls(key, gram, sizes if magnitudes else None)

    def add(self, x: Tensor) -> None:
        """Add the tokens of x [tokens, K], bf16, fp16 or fp32; none at all is fine."""
        assert x.ndim == 2, f"{self.key}: {tuple(x.shape)}"
        assert x.shape[1] == self.gram.shape[0], f"{self.key}: {tuple(x.shape)}"
        if x.shape[0] == 0:
            return
        gram_(x, self.gram)
        if self.magnitudes is not None:
            self.magnitudes.add(x)
        self.tokens += x.shape[0]

    def hessian(self) -> Tensor:
        """Mean of x xᵀ, fp32 [K, K]; zeros before the first token.

        Raises DataError when an input was NaN or infinite.
        """
        # Any such input leaves its mark on the diagonal, K numbers instead of K x K.
        _require_finite(self.key, self.gram.diagonal())
        return self.gram / max(1, self.tokens)

    def stats(self) -> InputStats:
        """The statistics so far. Raises DataError like `hessian`."""
        if self.magnitudes is None:
            return InputStats(self.hessian(), self.tokens)
        mean = self.magnitudes.total / max(1, self.tokens)
        return InputStats(self.hessian(), self.tokens, self.magnitudes.peak, mean)


def _require_finite(key: str, sums: Tensor) -> None:
    bad = (~sums.isfinite()).nonzero().flatten()
    if bad.numel():
        raise DataError(
            f"inputs of {key} are not finite in {bad.numel()} of {len(sums)} features"
            f" (first: {int(bad[0])}); run with --dtype fp32"
        )
