"""Turned vectors: products stay, large numbers are spread, bits are a vector's own."""

import pytest
import torch

from compress_kernels.cpu.library import native
from compress_kernels.ops.rows import spread
from compress_kernels.reference import rows as reference

SIZES = {1: 1, 16: 16, 32: 32, 80: 16, 96: 32, 128: 128}


def sylvester(size: int) -> torch.Tensor:
    """fp64 [size, size], by its definition: signs are parities of the places' common bits."""
    places = range(size)
    signs = [[(-1.0) ** (i & j).bit_count() for j in places] for i in places]
    return torch.tensor(signs, dtype=torch.float64) / size**0.5


@pytest.mark.parametrize("width", SIZES)
def test_it_is_the_matrix_in_each_part(width: int) -> None:
    x = torch.randn(5, 3, width, generator=torch.Generator().manual_seed(0))
    parts = x.double().unflatten(-1, (-1, SIZES[width]))
    want = (parts @ sylvester(SIZES[width])).flatten(-2)
    assert (spread(x) - want).abs().max() < 1e-5


def test_products_stay_and_one_large_number_is_spread() -> None:
    generator = torch.Generator().manual_seed(1)
    q, k = torch.randn(2, 64, 32, generator=generator)
    k[:, 7] *= 50
    assert torch.allclose((spread(q) * spread(k)).sum(-1), (q * k).sum(-1), rtol=1e-4, atol=1e-3)
    assert spread(k).abs().amax(-1).mean() < 0.4 * k.abs().amax(-1).mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bits_are_a_vector_s_own(dtype: torch.dtype) -> None:
    x = torch.randn(70, 4, 32, generator=torch.Generator().manual_seed(2)).to(dtype)
    turned = spread(x)
    assert turned.dtype == dtype
    for rows in (1, 3, 16):
        assert torch.equal(spread(x[:rows]), turned[:rows])
    assert torch.equal(spread(x[:, 1:3]), turned[:, 1:3])


@pytest.mark.skipif(native().library is None, reason=native().reason)
@pytest.mark.parametrize("width", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_compiled_code_has_the_bits_of_the_reference(dtype: torch.dtype, width: int) -> None:
    x = torch.randn(7, 5, width, generator=torch.Generator().manual_seed(3)).to(dtype)
    assert torch.equal(spread(x), reference.spread(x))
    assert torch.equal(spread(x[:, 1:3]), reference.spread(x[:, 1:3]))
    assert torch.equal(spread(x.flatten(0, 1)), reference.spread(x.flatten(0, 1)))
