"""Schemes that round inputs, and float codes, in panels: the same codes, the same numbers."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

from compress.quant.activations import fake_quantize
from compress.quant.scheme import PRESETS, ActivationScheme, QuantScheme
from compress.quant.tensor import InputQuantization, OutlierColumns, QuantizedTensor
from compress.runtime.forms.form import Arithmetic, LinearFacts
from compress.runtime.forms.input_rounding import (
    code_rounding,
    rounded,
    rounded_alike,
    row_rounding,
)
from compress.runtime.forms.packed import DecodedTiles, PackedWeight
from compress.runtime.forms.panels import PackedPanels, PanelsForm, math_of
from compress_kernels.cpu.library import native
from compress_kernels.ops.linear import linear
from compress_kernels.panels import Math
from compress_kernels.reference.packed import rounded_rows
from helpers import compressed_models

pytestmark = pytest.mark.skipif(native().library is None, reason=native().reason)
CPU = torch.device("cpu")
N, K = 200, 256
MATHS: tuple[Math, ...] = ("exact", "int16", "int8")
FLOATS = ("FP8", "FP8_DYNAMIC", "FP8_BLOCK", "NVFP4A16")
WHOLE = ("W8A8", "W8A8_STATIC", "LLM_INT8", "LLM_INT8_CALIBRATED")
SCHEMES: Mapping[str, QuantScheme] = {
    **{name: PRESETS[name] for name in (*FLOATS, *WHOLE)},
    "int4 a8": QuantScheme(group_size=64, activation=ActivationScheme()),
    "int8 squares": QuantScheme(bits=8, granularity="block", group_size=64),
}
ROUNDINGS = {
    "8 bits": ActivationScheme(),
    "4 bits": ActivationScheme(bits=4),
    "a tensor": ActivationScheme(granularity="tensor"),
    "static": ActivationScheme(granularity="tensor", dynamic=False),
    "outliers": ActivationScheme(outliers="dynamic"),
    "outliers of 1.0005": ActivationScheme(outliers="dynamic", threshold=1.0005),
    "fixed outliers": ActivationScheme(outliers="calibrated"),
}

# What whole codes do not sum.
BEFORE = {
    "e4m3": ActivationScheme(type="float"),
    "e4m3 of groups": ActivationScheme(type="float", granularity="group", group_size=24),
    "e4m3 static": ActivationScheme(type="float", granularity="tensor", dynamic=False),
    "groups": ActivationScheme(bits=6, granularity="group", group_size=128),
}


def made(name: str, rows: int = N, columns: int = K) -> QuantizedTensor:
    seed = torch.Generator().manual_seed(rows)
    weight = (torch.randn(rows, columns, generator=seed) * 0.05).bfloat16()
    found = compressed_models.round_weight(weight, SCHEMES[name])
    if "CALIBRATED" not in name:
        return found
    kept = torch.tensor([3, 77])
    return replace(found, outliers=OutlierColumns(kept, weight[:, kept] * 9))


def facts_of(tensor: QuantizedTensor) -> LinearFacts:
    return LinearFacts(tensor.shape, tensor.scheme, tensor.scale.dtype, torch.bfloat16)


def packed(tensor: QuantizedTensor, math: Math) -> PackedPanels:
    how = Arithmetic(torch.float32, CPU, math=math)
    assert PanelsForm().why_not(facts_of(tensor), how) is None
    weight = PanelsForm().pack(tensor, facts_of(tensor), how)
    assert isinstance(weight, PackedPanels)
    return weight


def some_rows(rows: int = 17) -> torch.Tensor:
    x = torch.randn(rows, K, generator=torch.Generator().manual_seed(1))
    x[:, 40] *= 9
    x[2] = 0
    return x


@pytest.mark.parametrize("name", ROUNDINGS)
def test_codes_of_inputs_are_those_of_the_scheme(name: str) -> None:
    scheme, x = ROUNDINGS[name], some_rows(40)
    if "1.0005" in name:  # both neighbours of the threshold in fp16
        x[:, :4] = torch.tensor([1.0, 1.0004, 1.0005, 1.00098])
    inputs = InputQuantization(scheme, torch.tensor([0.03]), torch.tensor([40, 90]))
    whole, worth, kept = rounded_rows(x, row_rounding(inputs))
    if scheme.outliers == "calibrated":
        kept[:, [40, 90]] = True
        whole, worth, _ = rounded_rows(x.masked_fill(kept, 0), row_rounding(inputs))
    found = torch.where(kept, x, whole.float() * worth[:, None])
    assert torch.equal(found, fake_quantize(x, inputs, alone=True))
    assert kept.any() == (scheme.outliers != "none")


@pytest.mark.parametrize("name", [*ROUNDINGS, *BEFORE])
def test_what_is_rounded_before_a_product_is_what_the_scheme_says(name: str) -> None:
    scheme, x = {**ROUNDINGS, **BEFORE}[name], some_rows(40)
    inputs = InputQuantization(scheme, torch.tensor([0.03]), torch.tensor([40, 90]))
    assert (code_rounding(inputs) is None) == (scheme.outliers == "calibrated")
    for dtype in (torch.float32, torch.bfloat16):
        own = x.to(dtype)
        wanted = fake_quantize(own, inputs, alone=True)
        assert torch.equal(rounded(own, inputs), wanted)
        assert torch.equal(rounded(own[:, None], inputs)[:, 0], wanted)
    factored = replace(inputs, factor=torch.linspace(0.5, 2, K))
    assert torch.equal(rounded(x, factored), fake_quantize(x, factored, alone=True))


def test_linears_with_one_fixed_scale_are_rounded_alike() -> None:
    scheme = ROUNDINGS["static"]
    one, same, other = (InputQuantization(scheme, torch.tensor([s])) for s in (0.03, 0.03, 0.04))
    dynamic = InputQuantization(ROUNDINGS["8 bits"])
    assert rounded_alike([one, same])
    assert rounded_alike([dynamic, dynamic])
    assert rounded_alike([None, None])
    for others in ([one, other], [one, dynamic], [one, None], [None, one]):
        assert not rounded_alike(others)
    fixed = InputQuantization(ROUNDINGS["fixed outliers"], columns=torch.tensor([3]))
    assert not rounded_alike([fixed, fixed])


@pytest.mark.parametrize("math", MATHS)
@pytest.mark.parametrize("name", SCHEMES)
def test_the_weight_comes_back_and_products_are_those_of_the_scheme(name: str, math: Math) -> None:
    """Whole sums differ from fp32 ones in the last bits, and by the weight that is not rounded."""
    if math == "exact" and "CALIBRATED" in name:
        return
    tensor = made(name)
    weight, inputs = packed(tensor, math), tensor.inputs()
    values = tensor.dequantize(torch.bfloat16).float()
    assert torch.equal(weight.dequantize(slice(0, N), torch.float32), values)
    assert torch.equal(weight.part(slice(32, 77)).codes.float(), tensor.codes[32:77].float())
    x, bias = some_rows(), torch.linspace(-1, 1, N)
    seen = x if inputs is None else fake_quantize(x, inputs, alone=True)
    found, wanted = weight.matmul(x, inputs, bias), linear(seen, values, bias)
    if weight.math == "exact":
        assert torch.equal(found, wanted)
        return
    unrounded = linear(seen, tensor.dequantize(), bias)
    most = {"int16": 1e-4, "int8": 2e-2}[math] if inputs is None else 2e-6
    assert (found - unrounded).norm() < most * unrounded.norm()


@pytest.mark.parametrize("name", SCHEMES)
def test_in_bf16_products_are_those_of_the_decoded_weight(name: str) -> None:
    """Outlier columns, too, bit for bit."""
    tensor, how = made(name), Arithmetic(torch.bfloat16, CPU)
    assert PanelsForm().why_not(facts_of(tensor), how) is None
    weight, inputs = PanelsForm().pack(tensor, facts_of(tensor), how), tensor.inputs()
    assert isinstance(weight, PackedPanels)
    x, bias = some_rows().bfloat16(), torch.linspace(-1, 1, N).bfloat16()
    seen = x if inputs is None else fake_quantize(x, inputs, alone=True)
    wanted = linear(seen, tensor.dequantize(torch.bfloat16), bias)
    assert torch.equal(weight.matmul(x, inputs, bias), wanted)
    values = weight.dequantize(slice(0, N), torch.bfloat16)
    assert torch.equal(values, tensor.dequantize(torch.bfloat16))


@pytest.mark.parametrize("name", SCHEMES)
def test_bytes_are_told_before(name: str) -> None:
    for math in MATHS:
        tensor = made(name)
        how, facts = Arithmetic(torch.float32, CPU, math=math), facts_of(tensor)
        if PanelsForm().why_not(facts, how) is None and tensor.scheme.granularity != "tensor":
            kept, columns = packed(tensor, math), tensor.outliers
            beside = 0 if columns is None else columns.columns.nbytes + columns.weight.nbytes
            assert kept.nbytes == PanelsForm().nbytes(facts, how) + beside


@pytest.mark.parametrize("name", SCHEMES)
def test_panels_take_the_bytes_of_the_codes(name: str) -> None:
    tensor = replace(made(name, 256, 512), outliers=None)
    assert packed(tensor, "int16").nbytes <= 1.03 * PackedWeight.of(tensor, CPU).nbytes


def test_what_is_neither_whole_nor_all_of_8_bit_floats_stays_exact() -> None:
    grouped = ActivationScheme(granularity="group", group_size=64)
    apart = replace(BEFORE["e4m3 of groups"], group_size=48)  # no part of 128
    for scheme in (
        replace(PRESETS["FP8_DYNAMIC"], activation=None),
        replace(PRESETS["FP8_DYNAMIC"], activation=ActivationScheme()),
        replace(PRESETS["FP8_BLOCK"], activation=apart),
        replace(PRESETS["W8A8"], activation=grouped),
        replace(PRESETS["W8A8"], activation=BEFORE["e4m3"]),
    ):
        assert math_of(scheme, 1000, "int16") == "exact"
    assert math_of(PRESETS["W8A8"], 1 << 17, "int8") == "exact"
    for name in (*WHOLE, *FLOATS, "W4A16"):
        assert math_of(PRESETS[name], 100, "int16") == "int16"


def test_a_nan_among_8_bit_floats_is_decoded() -> None:
    tensor = made("FP8_DYNAMIC")
    tensor.codes.view(torch.uint8)[3, 3] = 0xFF
    weight = PanelsForm().pack(tensor, facts_of(tensor), Arithmetic(torch.float32, CPU))
    assert isinstance(weight, PackedWeight)


def test_what_is_refused() -> None:
    calibrated, exact = PRESETS["LLM_INT8_CALIBRATED"], Arithmetic(torch.float32, CPU)
    squares = QuantScheme(bits=8, granularity="block", group_size=64, symmetric=False)
    for scheme, reason in (
        (calibrated, "outlier columns stand in for their codes"),
        (squares, "squares share a zero"),
        (replace(squares, symmetric=True, group_size=24), "squares of 24 rows share a scale"),
    ):
        facts = LinearFacts((N, K), scheme, torch.bfloat16, torch.bfloat16)
        refused = PanelsForm().why_not(facts, exact)
        assert refused is not None
        assert reason in refused
        assert DecodedTiles().why_not(facts, exact) is None


@pytest.mark.parametrize("name", ["FP8_DYNAMIC", "FP8_BLOCK", "NVFP4A16", "W8A8", "LLM_INT8"])
def test_joined_weights_give_the_same_numbers(name: str) -> None:
    tensors = [made(name, rows) for rows in (128, 64, 24)]
    if name == "NVFP4A16":
        tensors = [replace(x, global_scale=tensors[0].global_scale) for x in tensors]
    parts = [packed(x, "int16") for x in tensors]
    whole = parts[0].joined(tuple(parts[1:]))
    assert whole is not None
    x, inputs = some_rows(3), tensors[0].inputs()
    apart = torch.cat([part.matmul(x, inputs, None) for part in parts], 1)
    assert torch.equal(whole.matmul(x, inputs, None), apart)


def test_other_numbers_stay_apart() -> None:
    tensor = made("NVFP4A16")
    assert tensor.global_scale is not None
    other = replace(tensor, global_scale=tensor.global_scale * 3)
    assert packed(tensor, "exact").joined((packed(other, "exact"),)) is None
    fixed = packed(made("LLM_INT8_CALIBRATED"), "int8")
    assert fixed.joined((fixed,)) is None
