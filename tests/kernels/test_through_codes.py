"""Rows through codes: every bit is the definition's, and a row's are its own."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from compress_kernels.cpu.library import native
from compress_kernels.ops.through_codes import through_codes
from compress_kernels.reference import through_codes as reference
from compress_kernels.rounding import CodeRounding

needs_native = pytest.mark.skipif(native().library is None, reason=native().reason)
E4M3_MAX = 448.0
OUTLIERS = CodeRounding("llm.int8", 127.0, threshold=2.0)
KINDS = {
    "e4m3 of a row": CodeRounding("e4m3", E4M3_MAX),
    "e4m3 of groups": CodeRounding("e4m3", E4M3_MAX, group=128),
    "e4m3 of odd groups": CodeRounding("e4m3", E4M3_MAX, group=7),
    "e4m3 fixed": CodeRounding("e4m3", E4M3_MAX, scale=0.0371),
    "e4m3 as they are": CodeRounding("e4m3", E4M3_MAX, scale=1.0),
    "int of a row": CodeRounding("int", 127.5),
    "int of 4 bits": CodeRounding("int", 7.5, group=32),
    "int fixed": CodeRounding("int", 127.5, scale=0.0371),
    "beside outliers": OUTLIERS,
}


def any_bits(rows: int, columns: int) -> Tensor:
    """Numbers of all exponents, NaN, infinities and denormals among them."""
    seed = torch.Generator().manual_seed(rows * columns)
    bits = torch.randint(-(1 << 31), 1 << 31, (rows, columns), generator=seed)
    return bits.to(torch.int32).view(torch.float32)


def check_both(x: Tensor, rounding: CodeRounding) -> None:
    check(x, rounding)
    check(x.bfloat16(), rounding)


def check(x: Tensor, rounding: CodeRounding) -> None:
    found, wanted = through_codes(x, rounding), reference.through_codes(x, rounding)
    assert torch.equal(found.isnan(), wanted.isnan())
    kept = ~wanted.isnan()
    assert torch.equal(found[kept], wanted[kept])
    assert torch.equal(found[kept].signbit(), wanted[kept].signbit())  # of zeros
    assert found.dtype == x.dtype


@needs_native
@pytest.mark.parametrize("name", KINDS)
def test_bits_are_those_of_the_definition(name: str) -> None:
    for rows, columns in ((1, 1), (3, 7), (5, 128), (17, 131), (2, 768), (70, 300)):
        for scale in (1.0, 30.0, 1e-4):
            seed = torch.Generator().manual_seed(columns)
            x = torch.randn(rows, columns, generator=seed) * scale
            x[0, : columns // 2], x[-1] = 0, -0.0
            check_both(x, KINDS[name])
        check_both(any_bits(rows, columns), KINDS[name])
        # A row whose largest magnitude is tiny, and one of each exponent.
        check_both(any_bits(rows, columns).nan_to_num(0, 0, 0) * 1e-38 * 1e-6, KINDS[name])
        powers = torch.arange(rows * columns).view(rows, columns) % 254 - 126
        check_both(torch.exp2(powers.double()).float() * 1.1875, KINDS[name])


@needs_native
@pytest.mark.parametrize("name", ["e4m3 as they are", "int fixed"])
def test_ties_and_neighbours_of_every_code(name: str) -> None:
    """All E4M3 numbers, or whole ones, what lies halfway between two, and both neighbours of it."""
    rounding = KINDS[name]
    codes = torch.arange(-130, 131).float() * 0.0371
    if rounding.codes == "e4m3":
        codes = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).float()
        codes = codes[~codes.isnan()].unique()
    middle = (codes[1:] + codes[:-1]) / 2
    above, below = (middle.nextafter(torch.tensor(end)) for end in (torch.inf, -torch.inf))
    x = torch.cat((codes, middle, above, below, torch.tensor([-0.0, 449, 1e30, -torch.inf])))
    check(x[None], rounding)
    if rounding.codes == "e4m3":
        assert torch.equal(through_codes(codes[None], rounding)[0], codes)


@needs_native
def test_a_row_s_bits_are_its_own() -> None:
    """Alone and beside others, on one thread and on several, whatever lies between rows."""
    x = torch.randn(300, 700, generator=torch.Generator().manual_seed(0))
    threads = torch.get_num_threads()
    for rounding in KINDS.values():
        wanted = reference.through_codes(x, rounding)
        try:
            for count in (1, 2, 5):
                torch.set_num_threads(count)
                assert torch.equal(through_codes(x, rounding), wanted)
        finally:
            torch.set_num_threads(threads)
        assert torch.equal(through_codes(x[7:8], rounding), wanted[7:8])
        part = reference.through_codes(x[:, 5:390].contiguous(), rounding)
        assert torch.equal(through_codes(x[:, 5:390], rounding), part)
        assert torch.equal(through_codes(x.T.contiguous().T, rounding), wanted)


@pytest.mark.parametrize("name", KINDS)
def test_what_is_not_finite(name: str) -> None:
    rounding, x = KINDS[name], torch.ones(4, 256)
    x[1, 3], x[2, 3] = torch.nan, torch.inf
    found = through_codes(x, rounding)
    group = rounding.group or 256
    assert found[1, 3].isnan()
    assert found[[0, 3]].isfinite().all()
    if rounding.codes == "llm.int8":  # infinity is an outlier
        assert found[1].isnan().all()
        assert found[2, 3] == torch.inf
        assert found[2, 4:].isfinite().all()
    elif rounding.scale is None:
        assert found[1:3, :group].isnan().all()
        assert found[1:3, group:].isfinite().all()
    else:
        assert torch.equal(found[2, 3], found[2].max())
        assert found[1, 4:].isfinite().all()


def test_errors_are_half_a_step_and_codes_stay() -> None:
    """E4M3 has 3 bits behind the first: of its numbers above the least a 16th is the most."""
    x = torch.randn(50, 96, generator=torch.Generator().manual_seed(3))
    found = through_codes(x, KINDS["e4m3 of a row"])
    large = x.abs() > x.abs().amax(1, keepdim=True) / 1000
    assert ((found - x).abs()[large] <= x.abs()[large] / 16 * 1.00001).all()
    whole = through_codes(x, KINDS["int of a row"])
    step = x.abs().amax(1, keepdim=True) / 127.5
    assert ((whole - x).abs() <= step * 0.50001).sum() > 0.97 * x.numel()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_outliers_stay_beside_numbers_of_8_bits(dtype: torch.dtype) -> None:
    x = torch.randn(50, 96, generator=torch.Generator().manual_seed(3)).to(dtype)
    found, kept = through_codes(x, KINDS["beside outliers"]), x.half().abs() >= 2.0
    assert kept.any()
    assert torch.equal(found[kept], x[kept])
    step = x.masked_fill(kept, 0).abs().amax(1, keepdim=True).float() / 127
    lost = 2**-11 + (2**-8 if dtype == torch.bfloat16 else 0)  # in fp16, and in bf16 again
    room = step * 0.50001 + lost * x.abs().float()
    assert ((found.float() - x.float()).abs() <= room)[~kept].all()


def test_other_rows_are_refused() -> None:
    for x in (torch.zeros(3), torch.zeros(2, 3, dtype=torch.float16)):
        with pytest.raises(ValueError, match=r"x is .*; torch.float32 or .* \[rows, n\] is needed"):
            through_codes(x, KINDS["e4m3 of a row"])
    assert through_codes(torch.zeros(0, 4), KINDS["e4m3 of a row"]).shape == (0, 4)
    for rounding in (replace(OUTLIERS, group=32), replace(OUTLIERS, scale=1.0)):
        with pytest.raises(ValueError, match=r"a scale of each row for llm.int8 is needed"):
            through_codes(torch.zeros(2, 64), rounding)
