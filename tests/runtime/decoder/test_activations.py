"""Activations are transformers', and a number's bits do not depend on where it lies."""

import pytest
import torch

from compress.runtime.decoder.activations import FUNCTIONS, activation


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values(name: str) -> None:
    from transformers.activations import ACT2FN

    x = torch.cat((torch.linspace(-200, 200, 999), torch.linspace(-4, 4, 1001), torch.zeros(1)))
    torch.testing.assert_close(activation(name)(x), ACT2FN[name](x), atol=2e-6, rtol=2e-6)
    low = activation(name)(x.bfloat16())
    assert low.dtype == torch.bfloat16
    assert torch.equal(low, activation(name)(x.bfloat16().float()).bfloat16())


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("threads", [1, 3])
def test_bits(name: str, threads: int) -> None:
    x = torch.randn(80, 1407, generator=torch.Generator().manual_seed(0)) * 3
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        whole = activation(name)(x)
        parts = [activation(name)(x[at : at + 7]) for at in range(0, 80, 7)]
    finally:
        torch.set_num_threads(before)
    assert torch.equal(torch.cat(parts), whole)
