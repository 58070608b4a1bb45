"""Simulated int8 activations are those of compressed-tensors."""

import pytest
import torch

from compress.blocks.activation import fake_quantize
from compress.quant.scheme import ActivationScheme

INT8 = ActivationScheme(bits=8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_compressed_tensors(dtype: torch.dtype) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize as theirs
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

    x = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[1, 4] = 0
    args = QuantizationArgs(num_bits=8, symmetric=True, strategy="token", dynamic=True)
    scale, zero = compute_dynamic_scales_and_zp(x, args, torch.nn.Linear(64, 1))
    assert torch.equal(fake_quantize(x, INT8), theirs(x, scale, zero, args))


def test_error_is_at_most_half_a_step_and_zero_stays_zero() -> None:
    x = torch.randn(7, 32, generator=torch.Generator().manual_seed(0))
    x[3] = 0
    got = fake_quantize(x, INT8)
    step = x.abs().amax(-1, keepdim=True) / 127.5
    # the largest value is code 127.5 and clamped to 127: half a step too
    assert bool(((got - x).abs() <= 0.5 * step + 1e-6).all())
    assert not got[3].any()
