"""k-quants: llama.cpp's blocks, whose sub-blocks have scales and minima of few bits themselves.

Kawrakow 2023 and 2024, https://github.com/ggml-org/llama.cpp/pull/1684 (the types) and
https://github.com/ggml-org/llama.cpp/pull/4861 (errors weighed by an importance matrix)
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from compress.methods.observed import UNOBSERVED, Observed
from compress.methods.outcome import judge
from compress_kernels import decode_blocks, round_blocks


@dataclass(frozen=True, slots=True)
class KQuantsConfig:
    """Options of a `k_quants` stage.

    compensate: whether what a column loses is made up for by the later ones, as GPTQ does, where
        that lowers the error. Needs calibration data, as weighing columns does.
    damping: added to the Hessian's diagonal, as a share of its mean.
    """

    compensate: bool = True
    damping: float = 0.01


@dataclass(frozen=True, slots=True, eq=False)
class RoundedBlocks:
    """A weight in blocks. data: uint8 [N, bytes]. error: `relative_error` under the inputs that
    calibration showed. method: what made the codes, "k_quants" or "k_quants+gptq"; kept: why
    compensation was left out, None otherwise. damping: share of the mean diagonal added to H."""

    kind: str
    data: Tensor
    error: float
    method: str
    kept: str | None = None
    damping: float | None = None


def round_weights(
    weights: Sequence[Tensor],
    kind: str,
    config: KQuantsConfig,
    observed: Observed = UNOBSERVED,
) -> list[RoundedBlocks]:
    """Blocks of one kind (a key of compress.quant.ggml_kinds) for weights [N_i, K] that share an
    input, observed or not."""
    found = []
    hessian = observed.driven
    importance = None if hessian is None else hessian.diagonal().float().contiguous()
    for weight in weights:
        data = round_blocks(kind, weight.float(), importance)
        error = judge(weight, hessian).error(decode_blocks(kind, data))
        found.append(RoundedBlocks(kind, data, error, "k_quants"))
    return found
