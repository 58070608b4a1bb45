"""Codes in GGUF's blocks: they mean the same numbers, by gguf's own decoding."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType, dequantize
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.formats.gguf.blocks import encode, kind_of, why_not_blocks
from compress.quant.ggml_kinds import KINDS
from compress.quant.scheme import ActivationScheme, QuantScheme
from compress.quant.tensor import OutlierColumns, QuantizedTensor

ROWS, COLUMNS = 6, 128


def weight(scheme: QuantScheme, seed: int = 0, *, columns: int = COLUMNS) -> QuantizedTensor:
    """Random codes; scales are powers of two, whose offsets fp16 holds too."""
    draw = torch.Generator().manual_seed(seed)
    low, high = scheme.code_min, scheme.code_max + 1
    shape = scheme.scale_shape(ROWS, columns)
    codes = torch.randint(low, high, (ROWS, columns), dtype=torch.int8, generator=draw)
    scale = 2.0 ** torch.randint(-8, 2, shape, generator=draw).float()
    scale *= torch.randint(0, 2, shape, generator=draw) * 2 - 1
    zero = None
    if not scheme.symmetric:
        zero = torch.randint(low, high, shape, dtype=torch.int8, generator=draw)
    return QuantizedTensor(codes, scale, zero, None, scheme)


def decoded(tensor: QuantizedTensor, kind: str, rows: torch.Tensor | None = None) -> Any:
    blocks = encode(tensor, kind, rows)
    assert blocks.nbytes == KINDS[kind].nbytes(tensor.codes.numel())
    return torch.from_numpy(dequantize(blocks, GGMLQuantizationType(KINDS[kind].number)))


GRAINS = [("group", 32), ("group", 64), ("group", 128), ("channel", 0), ("tensor", 0)]


@settings(max_examples=60, deadline=None)
@given(
    bits=st.integers(2, 8),
    symmetric=st.booleans(),
    grain=st.sampled_from(GRAINS),
    seed=st.integers(0, 9),
)
def test_blocks_mean_what_codes_mean(
    bits: int, symmetric: bool, grain: tuple[Any, int], seed: int
) -> None:
    tensor = weight(
        QuantScheme(bits=bits, symmetric=symmetric, granularity=grain[0], group_size=grain[1]), seed
    )
    if why_not_blocks(tensor) is not None:
        assert (bits, symmetric) == (8, False)
        return
    assert torch.equal(decoded(tensor, kind_of(tensor)), tensor.dequantize())


def test_rows_change_places_with_their_scales() -> None:
    for symmetric in (True, False):
        tensor = weight(QuantScheme(group_size=32, symmetric=symmetric))
        rows = torch.tensor([3, 0, 5, 1, 4, 2])
        kind = kind_of(tensor)
        assert torch.equal(decoded(tensor, kind, rows), tensor.dequantize()[rows])


def test_blocks_of_squares() -> None:
    scheme = QuantScheme(bits=8, granularity="block", group_size=64)
    tensor = weight(scheme)
    assert tensor.scale.shape == (1, 2)
    assert torch.equal(decoded(tensor, "Q8_0"), tensor.dequantize())


@pytest.mark.parametrize(
    ("bits", "symmetric", "kind"),
    [
        (3, True, "Q4_0"),
        (4, True, "Q4_0"),
        (4, False, "Q4_1"),
        (5, True, "Q8_0"),
        (6, False, "Q8_0"),
    ],
)
def test_the_smallest_kind(bits: int, symmetric: bool, kind: str) -> None:
    tensor = weight(QuantScheme(bits=bits, group_size=32, symmetric=symmetric))
    assert kind_of(tensor) == kind


def test_zero_points_of_zero_are_none() -> None:
    tensor = weight(QuantScheme(group_size=32, symmetric=False))
    assert tensor.zero is not None
    tensor = replace(tensor, zero=torch.zeros_like(tensor.zero))
    assert kind_of(tensor) == "Q4_0"
    assert torch.equal(decoded(tensor, "Q4_0"), tensor.dequantize())


def shuffled() -> torch.Tensor:
    order = torch.arange(COLUMNS) // 32
    return order[torch.randperm(COLUMNS, generator=torch.Generator().manual_seed(1))].int()


def floats() -> QuantizedTensor:
    scheme = QuantScheme(bits=8, type="float", granularity="channel", group_size=0)
    codes = torch.ones(ROWS, COLUMNS).to(torch.float8_e4m3fn)
    return QuantizedTensor(codes, torch.ones(ROWS, 1), None, None, scheme)


G32 = QuantScheme(group_size=32)
A8 = QuantScheme(bits=8, granularity="channel", group_size=0, activation=ActivationScheme())
COLUMNS_OUT = OutlierColumns(torch.tensor([3]), torch.ones(ROWS, 1))
MISFITS = [
    (floats(), "their codes are floats"),
    (replace(weight(A8), outliers=COLUMNS_OUT), "they have columns in 16 bits"),
    (
        replace(weight(G32), input_factor=torch.ones(COLUMNS)),
        "their inputs are multiplied by factors",
    ),
    (
        replace(weight(G32), g_idx=shuffled()),
        "neighbouring columns are in different groups (act-order)",
    ),
    (weight(A8, columns=48), "rows of 48 numbers are no whole blocks of 32"),
    (weight(QuantScheme(group_size=16)), "groups of 16 are no whole blocks of 32"),
    (
        weight(QuantScheme(bits=8, group_size=32, symmetric=False)),
        "codes less their zero points need more than 8 bits",
    ),
]


@pytest.mark.parametrize(("tensor", "reason"), MISFITS, ids=[x[1] for x in MISFITS])
def test_what_no_block_holds(tensor: QuantizedTensor, reason: str) -> None:
    assert why_not_blocks(tensor) == reason


def test_an_order_that_is_the_usual_one_is_none() -> None:
    usual = (torch.arange(COLUMNS) // 32).int()
    assert why_not_blocks(replace(weight(G32), g_idx=usual)) is None
