"""Whether a device computes what the CPU does, tried before anything is entrusted to it.

The ops that calibrate and round, and a decoder of two blocks made of the engine's ops, run on both;
results may differ by the order of sums alone. A kernel that does not start, a driver that does not
fit and a card that computes wrong all end in a line here, and not in a checkpoint.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from compress_kernels import Grid, SearchedScales, gptq_columns, gram_, group_scale, hessian_factor
from compress_kernels.ops.linear import linear
from compress_kernels.ops.rows import gate, rms_norm, rotate

# Sizes that no tile of a kernel divides, so that its edges are tried, too.
_ROWS, _COLUMNS, _GROUP = 67, 96, 32
_HEADS, _TOKENS, _VOCABULARY, _BLOCKS = 3, 37, 101, 2


@dataclass(frozen=True, slots=True)
class DeviceTrial:
    """Something that is computed twice. run: on a device, with its result there.

    bound: of |found - wanted| / |wanted|, over the whole result.
    """

    name: str
    run: Callable[[torch.device], Tensor]
    bound: float


def differences(device: str, trials: tuple[DeviceTrial, ...] | None = None) -> Iterator[str]:
    """A line for each trial that fails or gives other results on the device than on the CPU."""
    cpu, other = torch.device("cpu"), torch.device(device)
    for trial in TRIALS if trials is None else trials:
        wanted = trial.run(cpu).double()
        try:
            found = trial.run(other).cpu().double()
        except Exception as error:  # whatever a driver, a compiler or a kernel raises
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            yield f"{trial.name} fails on it ({lines[0] if lines else type(error).__name__})"
            return  # after a fault of a kernel nothing there can be relied on
        apart = float((found - wanted).norm() / wanted.norm())
        if not apart <= trial.bound:  # not a number is no agreement either
            yield f"{trial.name} differs from the CPU's by {apart:.2g}, {trial.bound:g} is allowed"


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _gram(device: torch.device) -> Tensor:
    out = torch.zeros(_COLUMNS, _COLUMNS, device=device)
    gram_(_random(_ROWS, _COLUMNS, seed=1).to(device, torch.bfloat16), out)
    return out


def _scales(device: torch.device) -> Tensor:
    weight, ratios = _random(_ROWS, _GROUP, seed=2), torch.linspace(1.0, 0.5, 11)
    scale, _ = group_scale(weight.to(device), ratios, None, 4, True, torch.bfloat16)
    return scale


def _rounded(device: torch.device) -> Tensor:
    """The loss of a GPTQ solve: its codes may differ where two are as good."""
    weight, x = _random(_ROWS, _COLUMNS, seed=3), _random(400, _COLUMNS, seed=4)
    hessian = (x.T @ x / 400 + 0.01 * torch.eye(_COLUMNS)).to(device)
    scales = SearchedScales(torch.linspace(1.0, 0.5, 11))
    grid = Grid(4, True, torch.bfloat16)
    solved = gptq_columns(weight.to(device), hessian_factor(hessian), grid, _GROUP, scales)
    lost = weight.to(device) - solved.quantized
    loss: Tensor = ((lost @ hessian) * lost).sum()
    return loss


def _decoder(dtype: torch.dtype) -> Callable[[torch.device], Tensor]:
    """Logits [tokens, vocabulary] of a random decoder in `dtype`."""

    def run(device: torch.device) -> Tensor:
        width, counter = _COLUMNS, iter(range(100, 200))

        def weight(*shape: int) -> Tensor:
            drawn = _random(*shape, seed=next(counter))
            return (drawn / math.sqrt(shape[-1])).to(device, dtype)

        x = weight(_TOKENS, width) * width**0.5
        ones, dim = torch.ones(width, dtype=dtype, device=device), width // _HEADS
        angles = torch.outer(torch.arange(_TOKENS), 0.7 ** torch.arange(dim // 2))
        cos, sin = angles.cos().to(device, dtype), angles.sin().to(device, dtype)
        for _ in range(_BLOCKS):
            normed = rms_norm(x, ones, 1e-6, False)
            q, k, v = (
                linear(normed, weight(width, width)).view(_TOKENS, _HEADS, dim) for _ in range(3)
            )
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
            q, k, v = (each.transpose(0, 1)[None] for each in (q, k, v))
            mixed = scaled_dot_product_attention(q, k, v, is_causal=True)[0].transpose(0, 1)
            x = x + linear(mixed.reshape(_TOKENS, width), weight(width, width))
            normed = rms_norm(x, ones, 1e-6, False)
            up, down = linear(normed, weight(160, width)), linear(normed, weight(160, width))
            x = x + linear(gate(up, down, "silu"), weight(width, 160))
        return linear(rms_norm(x, ones, 1e-6, False), weight(_VOCABULARY, width))

    return run


# The bounds of the first three are those of tests/kernels/test_cuda.py. Of the decoder's, fp32
# leaves room for the order of sums of 96 and 160 products, not for TF32's 10 bits; in bf16 the CPU
# itself is 0.008 from its fp32, and other sums are rounded elsewhere.
TRIALS = (
    DeviceTrial("a sum of squares (gram)", _gram, 1e-5),
    DeviceTrial("a search of scales", _scales, 0.02),
    DeviceTrial("a GPTQ solve", _rounded, 0.02),
    DeviceTrial("a decoder in fp32", _decoder(torch.float32), 1e-4),
    DeviceTrial("a decoder in bf16", _decoder(torch.bfloat16), 0.05),
)
