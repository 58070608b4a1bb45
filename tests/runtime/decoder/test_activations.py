"""Activations are transformers', and a number's bits do not depend on where it lies."""

import pytest
import torch

from compress.runtime.decoder.activations import FUNCTIONS
from compress_kernels.ops.rows import activate
from compress_kernels.reference import rows as reference


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values(name: str) -> None:
    from transformers.activations import ACT2FN

    x = torch.cat((torch.linspace(-200, 200, 999), torch.linspace(-4, 4, 1001), torch.zeros(1)))
    for made in (activate, reference.activate):
        torch.testing.assert_close(made(x, FUNCTIONS[name]), ACT2FN[name](x), atol=2e-6, rtol=2e-6)
    low = activate(x.bfloat16(), FUNCTIONS[name])
    assert low.dtype == torch.bfloat16
    assert torch.equal(low, activate(x.bfloat16().float(), FUNCTIONS[name]).bfloat16())


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("threads", [1, 3])
def test_bits(name: str, threads: int) -> None:
    x = torch.randn(80, 1407, generator=torch.Generator().manual_seed(0)) * 3
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for made in (activate, reference.activate):
            whole = made(x, FUNCTIONS[name])
            parts = [made(x[at : at + 7], FUNCTIONS[name]) for at in range(0, 80, 7)]
            assert torch.equal(torch.cat(parts), whole)
    finally:
        torch.set_num_threads(before)
