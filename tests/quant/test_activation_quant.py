"""Simulated inputs are those of compressed-tensors and of bitsandbytes."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode

from compress.methods import llm_int8
from compress.methods.llm_int8 import LlmInt8Config
from compress.methods.observed import Observed
from compress.quant.activations import fake_quantize, quantize_inputs
from compress.quant.scheme import PRESETS, ActivationScheme
from compress.quant.tensor import InputQuantization

INT8 = ActivationScheme(bits=8)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
STATIC_INT8 = ActivationScheme(granularity="tensor", dynamic=False)
STATIC_FP8 = ActivationScheme(type="float", granularity="tensor", dynamic=False)
# Each as compressed-tensors says it.
SCHEMES: dict[str, tuple[ActivationScheme, dict[str, Any]]] = {
    "int8 token": (INT8, {"strategy": "token", "dynamic": True}),
    "int4 token": (ActivationScheme(bits=4), {"num_bits": 4, "strategy": "token", "dynamic": True}),
    "int8 tensor": (
        ActivationScheme(granularity="tensor"),
        {"strategy": "tensor", "dynamic": True},
    ),
    "int8 static": (STATIC_INT8, {"strategy": "tensor"}),
    "fp8 token": (
        ActivationScheme(type="float"),
        {"type": "float", "strategy": "token", "dynamic": True},
    ),
    "fp8 tensor": (
        ActivationScheme(type="float", granularity="tensor"),
        {"type": "float", "strategy": "tensor", "dynamic": True},
    ),
    "fp8 static": (STATIC_FP8, {"type": "float", "strategy": "tensor"}),
    "fp8 group": (
        ActivationScheme(type="float", granularity="group", group_size=16),
        {"type": "float", "strategy": "group", "group_size": 16, "dynamic": True},
    ),
}


def inputs(dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """[2, 5, 64] with a token and a group of zeros and columns of outliers."""
    x = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(seed))
    x[1, 4] = 0
    x[0, 0, :16] = 0
    x[..., 7] *= 12
    x[0, 3, 40] = -90
    return x.to(dtype)


@pytest.mark.interop
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SCHEMES)
def test_equals_compressed_tensors(name: str, dtype: torch.dtype) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.lifecycle import forward
    from compressed_tensors.quantization.quant_config import QuantizationStatus

    scheme, said = SCHEMES[name]
    linear = nn.Linear(64, 1)
    linear.quantization_status = QuantizationStatus.FROZEN
    args = QuantizationArgs(**{"num_bits": 8, "symmetric": True, **said})
    linear.quantization_scheme = QuantizationScheme(targets=["Linear"], input_activations=args)
    x, scale = inputs(dtype), None
    if not scheme.dynamic:
        scale = torch.tensor([0.02], dtype=dtype)  # some values lie beyond its range
        linear.input_scale = nn.Parameter(scale, requires_grad=False)
    theirs = forward.forward_quantize(linear, x, "input", args)
    ours = fake_quantize(x, InputQuantization(scheme, scale))
    assert ours.dtype == dtype
    assert torch.equal(ours, theirs)
    assert not torch.equal(ours, x)


def test_error_is_at_most_half_a_step_and_zero_stays_zero() -> None:
    x = torch.randn(7, 32, generator=torch.Generator().manual_seed(0))
    x[3] = 0
    got = fake_quantize(x, InputQuantization(INT8))
    step = x.abs().amax(-1, keepdim=True) / 127.5
    # the largest value is code 127.5 and clamped to 127: half a step too
    assert bool(((got - x).abs() <= 0.5 * step + 1e-6).all())
    assert not got[3].any()


def test_a_stored_scale_takes_the_dtype_of_the_inputs() -> None:
    scale = torch.tensor([0.3], dtype=torch.float32)
    for scheme in (STATIC_INT8, STATIC_FP8):
        got = fake_quantize(inputs(torch.bfloat16), InputQuantization(scheme, scale))
        same = fake_quantize(inputs(torch.bfloat16), InputQuantization(scheme, scale.bfloat16()))
        assert got.dtype == torch.bfloat16
        assert torch.equal(got, same)


def test_a_short_last_group_has_a_scale_of_its_own() -> None:
    x = torch.randn(3, 20, generator=torch.Generator().manual_seed(1))
    x[:, 16:] *= 1000
    grouped = InputQuantization(ActivationScheme(type="float", granularity="group", group_size=16))
    token = InputQuantization(ActivationScheme(type="float"))
    parts = [fake_quantize(part, token) for part in (x[:, :16], x[:, 16:])]
    assert torch.equal(fake_quantize(x, grouped), torch.cat(parts, dim=-1))


def test_no_tokens_pass_through() -> None:
    for preset in ("FP8_DYNAMIC", "LLM_INT8"):
        scheme = PRESETS[preset].activation
        assert scheme is not None
        assert fake_quantize(torch.zeros(0, 8), InputQuantization(scheme)).shape == (0, 8)


# LLM.int8()


def outliers(kind: str, threshold: float = 6.0) -> ActivationScheme:
    return ActivationScheme(outliers=kind, threshold=threshold)


def one_by_one(x: Tensor, weight: Tensor, columns: list[int], largest: Tensor) -> Tensor:
    """Outputs, one column after the other. x: [T, K]; weight: [N, K]; largest: [T]."""
    out = torch.zeros(x.shape[0], weight.shape[0], dtype=torch.float64)
    for k in range(x.shape[1]):
        column = x[:, k].double()
        if k not in columns:
            column = (x[:, k] * (127 / largest)).round().double() * largest.double() / 127
        out += column[:, None] * weight[:, k].double()
    return out


numbers = st.floats(-20, 20, width=16).map(float)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(numbers, min_size=6, max_size=6), min_size=1, max_size=5))
def test_dynamic_outliers_column_by_column(rows: list[list[float]]) -> None:
    x = torch.tensor(rows)
    weight = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    columns = [k for k in range(6) if any(abs(row[k]) >= 6 for row in rows)]
    largest = torch.tensor([max([abs(v) for v in row if abs(v) < 6] or [0]) for row in rows])
    largest[largest == 0] = 1
    got = fake_quantize(x, InputQuantization(outliers("dynamic"))).double() @ weight.double().T
    torch.testing.assert_close(got, one_by_one(x, weight, columns, largest), rtol=1e-5, atol=1e-5)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(numbers, min_size=6, max_size=6), min_size=1, max_size=5),
    st.sets(st.integers(0, 5)),
)
def test_calibrated_outliers_column_by_column(rows: list[list[float]], fixed: set[int]) -> None:
    x = torch.tensor(rows)
    weight = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    others = [k for k in range(6) if k not in fixed]
    largest = torch.tensor([max([abs(row[k]) for k in others] or [0]) for row in rows])
    largest[largest == 0] = 1
    columns = torch.tensor(sorted(fixed), dtype=torch.int64)
    given_as = InputQuantization(outliers("calibrated"), columns=columns)
    got = fake_quantize(x, given_as).double() @ weight.double().T
    torch.testing.assert_close(
        got, one_by_one(x, weight, sorted(fixed), largest), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(
    "scheme",
    [outliers("dynamic", 1.0), ActivationScheme(granularity="tensor"), INT8],
    ids=["outliers", "tensor", "token"],
)
def test_alone_each_token_is_a_call(scheme: ActivationScheme) -> None:
    x = torch.randn(3, 5, 32, generator=torch.Generator().manual_seed(3))
    how = InputQuantization(scheme)
    expected = [[fake_quantize(token[None], how)[0] for token in row] for row in x]
    got = fake_quantize(x, how, alone=True)
    assert torch.equal(got, torch.stack([torch.stack(row) for row in expected]))


def test_columns_are_chosen_over_all_tokens_of_a_call() -> None:
    x = inputs()
    got = fake_quantize(x, InputQuantization(outliers("dynamic")))
    kept = (x.abs() >= 6).flatten(0, 1).any(0)
    assert kept[7]
    assert kept[40]
    assert torch.equal(got[..., kept], x[..., kept])
    assert not torch.equal(got[..., ~kept], x[..., ~kept])
    # Outliers do not widen the step of the other columns; fp16 moves a value by 2^-11 of it.
    others = x.masked_fill(x.abs() >= 6, 0).abs().amax(-1, keepdim=True)
    assert ((got - x).abs() <= 0.5 * others / 127 + x.abs() * 2**-11 + 1e-6).all()


class _Layer(nn.Module):
    """A layer with calibrated columns as a runtime computes it, integers apart from 16 bit, and as
    evaluation simulates it."""

    def __init__(self, weight: Tensor, columns: Tensor) -> None:
        super().__init__()
        absmax = torch.zeros(weight.shape[1]).index_fill(0, columns, 9.0)
        (outcome,) = llm_int8.quantize(
            [weight],
            PRESETS["LLM_INT8_CALIBRATED"],
            LlmInt8Config(),
            scale_dtype=weight.dtype,
            observed=Observed(absmax=absmax),
        )
        q, self.inputs = outcome.quantized, outcome.quantized.inputs()
        assert q.outliers is not None
        self.register_buffer("dense", q.dequantize())
        self.register_buffer("scale", q.scale.T)
        self.register_buffer("columns", q.outliers.columns)
        self.register_buffer("kept", q.outliers.weight.T)
        self.register_buffer("others", torch.ones_like(absmax).index_fill(0, columns, 0.0))
        self.register_buffer("codes", (q.codes * self.others).T.contiguous())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        assert self.inputs is not None
        inside = x * self.others
        step = inside.abs().amax(-1, keepdim=True) / 127
        integers = (inside / step).round() @ self.codes
        computed = integers * step * self.scale + x.index_select(-1, self.columns) @ self.kept
        return computed, fake_quantize(x, self.inputs) @ self.dense.T


def test_calibrated_columns_are_a_static_graph() -> None:
    """Exported from one input it holds for others. On fake tensors, which have no values, columns
    that are found in a call cannot be taken apart; fixed ones can."""
    g = torch.Generator().manual_seed(0)
    weight, columns = torch.randn(5, 12, generator=g), torch.tensor([2, 7])
    layer = _Layer(weight, columns)
    exported = torch.export.export(layer, (torch.randn(4, 12, generator=g),)).module()
    for _ in range(3):
        x = torch.randn(4, 12, generator=g)
        x[:, [2, 7, 9]] *= 40
        computed, simulated = exported(x)
        torch.testing.assert_close(computed, simulated, rtol=1e-4, atol=1e-3)
        assert torch.equal(simulated, layer(x)[1])
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.randn(4, 12)
        assert layer(x)[0].shape == (4, 5)
        with pytest.raises(DynamicOutputShapeException):
            x.index_select(1, (x.abs() >= 6).any(0).nonzero().flatten())


@pytest.mark.interop
@pytest.mark.parametrize("rows", [1, 10])
@pytest.mark.parametrize("threshold", [0.5, 6.0, 1000.0])
def test_equals_bitsandbytes(rows: int, threshold: float) -> None:
    pytest.importorskip("bitsandbytes")
    from bitsandbytes import functional

    x = inputs().half().reshape(10, 64)[:rows].clone()
    codes, largest, columns = functional.int8_vectorwise_quant(x.clone(), threshold)
    theirs = codes * (largest[:, None] / 127)
    if rows == 1:  # their outlier columns are zero there anyway
        columns = (x.abs() >= threshold).any(0).nonzero().flatten()
    theirs[:, columns] = x[:, columns].float()
    ours = fake_quantize(x.float(), InputQuantization(outliers("dynamic", threshold)))
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.interop
def test_the_product_is_that_of_bitsandbytes() -> None:
    pytest.importorskip("bitsandbytes")
    import bitsandbytes
    from bitsandbytes import functional

    x = inputs().half().reshape(10, 64)
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(3)).half()
    codes, largest, _ = functional.int8_vectorwise_quant(weight.clone())
    state = bitsandbytes.MatmulLtState()
    state.CB, state.SCB, state.is_training, state.threshold = codes, largest, False, 6.0
    theirs = bitsandbytes.matmul(x.clone(), weight, threshold=6.0, state=state)
    dense = codes * (largest[:, None] / 127)
    ours = fake_quantize(x.float(), InputQuantization(outliers("dynamic"))) @ dense.T
    # Theirs is rounded to fp16 at the end, and the weights of outlier columns before.
    torch.testing.assert_close(theirs.float(), ours, rtol=2e-3, atol=5e-2)


def test_a_linear_sees_quantized_inputs() -> None:
    linear, x = nn.Linear(64, 3), inputs()
    inputs_as = InputQuantization(INT8)
    expected = linear(fake_quantize(x, inputs_as))
    quantize_inputs(linear, inputs_as)
    assert torch.equal(linear(x), expected)
