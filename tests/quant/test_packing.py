import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.quant.packing import pack, unpack, words_for


def random_codes(rows: int, count: int, bits: int, seed: int = 0) -> torch.Tensor:
    low = -(1 << (bits - 1))
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, -low, (rows, count), generator=generator).to(torch.int8)


def by_definition(codes: torch.Tensor, bits: int) -> np.ndarray:
    """Code i at bits i * bits and up of one long integer, in Python integers."""
    count = codes.shape[1]
    result = np.zeros((codes.shape[0], words_for(count, bits)), dtype=np.uint32)
    for row, values in enumerate(codes.tolist()):
        whole = sum((v + (1 << (bits - 1))) << (i * bits) for i, v in enumerate(values))
        for word in range(result.shape[1]):
            result[row, word] = (whole >> (32 * word)) & 0xFFFFFFFF
    return result.view(np.int32)


@settings(max_examples=60, deadline=None)
@given(
    bits=st.integers(2, 8),
    rows=st.integers(1, 5),
    count=st.integers(1, 140),
    seed=st.integers(0, 2**31),
)
def test_round_trip_and_definition(bits: int, rows: int, count: int, seed: int) -> None:
    codes = random_codes(rows, count, bits, seed)
    words = pack(codes, bits)
    assert words.dtype == torch.int32
    assert words.shape == (rows, words_for(count, bits))
    np.testing.assert_array_equal(words.numpy(), by_definition(codes, bits))
    assert torch.equal(unpack(words, bits, count), codes)


def test_four_bits_by_hand() -> None:
    codes = torch.arange(-8, 0, dtype=torch.int8).view(1, 8)
    assert pack(codes, 4).item() == 0x76543210


def test_three_bits_straddle_words() -> None:
    codes = torch.full((1, 11), -4, dtype=torch.int8)
    codes[0, 10] = 3  # 7 unsigned: its low two bits end word 0, its high bit starts word 1
    words = pack(codes, 3)
    assert words.shape == (1, 2)
    assert words[0, 0].item() & 0xFFFFFFFF == 0b11 << 30
    assert words[0, 1].item() == 1


@pytest.mark.parametrize("bits", range(2, 9))
def test_every_code_survives(bits: int) -> None:
    codes = torch.arange(-(1 << (bits - 1)), 1 << (bits - 1)).to(torch.int8).view(1, -1)
    assert torch.equal(unpack(pack(codes, bits), bits, codes.shape[1]), codes)


def test_strided_input() -> None:
    codes = random_codes(6, 10, 4)
    assert torch.equal(unpack(pack(codes.t(), 4), 4, 6), codes.t())


def test_padding_bits_are_zero() -> None:
    codes = torch.full((1, 3), 7, dtype=torch.int8)
    assert pack(codes, 4).item() == 0xFFF


def test_a_code_out_of_range_is_a_fault() -> None:
    with pytest.raises(AssertionError, match="out of range"):
        pack(torch.tensor([[8]], dtype=torch.int8), 4)
