"""Rounding behind a scaling method: every scheme is refused before work, or made."""

from itertools import product

import pytest
import torch

from compress.errors import RecipeError
from compress.methods import METHODS, plain
from compress.methods.awq import AwqConfig
from compress.methods.observed import Observed
from compress.quant.scheme import PRESETS, ActivationScheme, QuantScheme
from helpers.short_runs import SELF, recipe

INPUTS = (
    None,
    ActivationScheme(),
    ActivationScheme(type="float"),
    ActivationScheme(granularity="tensor", dynamic=False),
    ActivationScheme(granularity="group", group_size=16),
    ActivationScheme(outliers="dynamic"),
    ActivationScheme(outliers="calibrated", threshold=2.0),
    ActivationScheme(type="float", outliers="calibrated"),
)
WEIGHTS = (
    *(
        QuantScheme(bits, symmetric, "group", 16)
        for bits, symmetric in product((4, 8), (True, False))
    ),
    *(
        QuantScheme(bits, symmetric, where, 0)
        for bits, symmetric, where in product((4, 8), (True, False), ("channel", "tensor"))
    ),
    QuantScheme(8, granularity="block", group_size=16),
    QuantScheme(8, granularity="channel", group_size=0, type="float"),
    QuantScheme(8, granularity="block", group_size=16, type="float"),
    PRESETS["NVFP4A16"],
)
SCHEMES = [
    QuantScheme(w.bits, w.symmetric, w.granularity, w.group_size, inputs, w.type)
    for w, inputs in product(WEIGHTS, INPUTS)
]


def test_what_is_not_refused_is_made() -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(64, 32, generator=g)
    w = torch.randn(16, 32, generator=g)
    made = 0
    for scheme in SCHEMES:
        if plain.why_not(scheme) is not None:
            continue
        (outcome,) = plain.quantize(
            [w],
            scheme,
            AwqConfig(),
            scale_dtype=torch.float32,
            observed=Observed(hessian=x.T @ x / 64, absmax=x.abs().amax(0)),
        )
        assert outcome.quantized.scheme == scheme
        assert float((outcome.quantized.dequantize() - w).norm() / w.norm()) < 0.5, scheme
        made += 1
    assert 0 < made < len(SCHEMES)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_made(name: str) -> None:
    assert plain.why_not(PRESETS[name]) is None


@pytest.mark.parametrize("method", ["awq", "smoothquant"])
@pytest.mark.parametrize(
    ("scheme", "says"),
    [
        (
            {"bits": 4, "activation": {"outliers": "dynamic"}},
            "has 8 bits, one scale a row and one a token; use LLM_INT8 or LLM_INT8_CALIBRATED",
        ),
        (
            {
                "bits": 8,
                "symmetric": False,
                "granularity": "channel",
                "activation": {"outliers": "calibrated"},
            },
            "has 8 bits, one scale a row and one a token; use LLM_INT8 or LLM_INT8_CALIBRATED",
        ),
        (
            {"bits": 4, "type": "float", "group_size": 16, "activation": {"bits": 8}},
            "leaves inputs in 16 bit; use scheme NVFP4A16",
        ),
        (
            {"bits": 8, "type": "float", "granularity": "channel", "activation": {"bits": 8}},
            "goes with inputs in E4M3 or in 16 bit; use activation type float, or none",
        ),
    ],
)
def test_scaling_stages_refuse_what_their_rounding_cannot_make(
    method: str, scheme: dict[str, object], says: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        recipe({"method": method, "scheme": scheme}, calibration=SELF)
    assert str(caught.value).endswith(f", but {method} {says}")
    assert METHODS[method].why_not is plain.why_not
