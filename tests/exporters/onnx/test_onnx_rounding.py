"""Inputs that a graph rounds are those that our engine rounds, number by number."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch

from compress.quant.activations import fake_quantize
from compress.quant.scheme import PRESETS, ActivationScheme
from compress.quant.tensor import InputQuantization
from compress_exporters.onnx.graph.build import Build
from compress_exporters.onnx.graph.graph import IR_VERSION, Graph
from compress_exporters.onnx.graph.rounding import by_absmax, by_token, static
from compress_exporters.onnx.proof.checks import EXACT
from compress_exporters.onnx.proof.running import Array, Runner
from helpers import tiny_models
from helpers.exporters.onnx_graphs import built

TOKENS, COLUMNS = 50, 64
SCALE = torch.tensor([0.03])
Make = Callable[[Build, ir.Value], ir.Value]


def of_codes(pair: tuple[ir.Value, ir.Value], build: Build) -> ir.Value:
    return build.graph.op("inputs", "Mul", *pair)


def scheme_of(preset: str) -> ActivationScheme:
    scheme = PRESETS[preset].activation
    assert scheme is not None
    return scheme


TOKEN, INT8, E4M3 = (scheme_of(x) for x in ("W8A8", "W8A8_STATIC", "FP8"))
FIXED = replace(scheme_of("LLM_INT8"), outliers="calibrated")
NONE = torch.zeros(0, dtype=torch.int64)
# What -> (in a graph, in our engine).
CASES: dict[str, tuple[Make, InputQuantization]] = {
    "by token": (lambda b, x: of_codes(by_token(b, x, TOKEN), b), InputQuantization(TOKEN)),
    "by token, 4 bits": (
        lambda b, x: of_codes(by_token(b, x, replace(TOKEN, bits=4)), b),
        InputQuantization(replace(TOKEN, bits=4)),
    ),
    "absmax": (
        lambda b, x: of_codes(by_absmax(b, x), b),
        InputQuantization(FIXED, columns=NONE),
    ),
    "int8": (lambda b, x: static(b, x, float(SCALE), INT8), InputQuantization(INT8, SCALE)),
    "E4M3": (lambda b, x: static(b, x, float(SCALE), E4M3), InputQuantization(E4M3, SCALE)),
}


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    return built(tiny_models.make("llama", tmp_path_factory.mktemp("rounding") / "model"))


def computed(make: Make, build: Build, x: Array, path: Path) -> Array:
    """In ONNX Runtime."""
    graph = Graph(ir.DataType.FLOAT, {"": 23})
    fresh = replace(build, graph=graph, _once={})
    value = graph.input("x", ir.DataType.FLOAT, x.shape)
    graph.output("y", make(fresh, value), ir.DataType.FLOAT, x.shape)
    assert fresh.rounds
    model = graph.model("rounding", "0")
    assert model.ir_version == IR_VERSION
    ir.save(model, path)
    found: Array = Runner.open(path, EXACT).session.run(["y"], {"x": x})[0]
    return found


@pytest.mark.parametrize("case", CASES)
def test_inputs_are_rounded_as_our_engine_does(case: str, build: Build, tmp_path: Path) -> None:
    make, inputs = CASES[case]
    x = torch.randn(TOKENS, COLUMNS, generator=torch.Generator().manual_seed(0))
    x[0], x[1] = 0.0, 1000 * x[1]  # nothing, and more than a fixed scale reaches
    want = fake_quantize(x, inputs).numpy()
    got = computed(make, build, x.numpy(), tmp_path / "model.onnx")
    other = ~np.isclose(got, want, rtol=1e-5, atol=1e-7)
    assert (want != x.numpy()).mean() > 0.9
    if not case.startswith("by token"):
        assert not other.any()
        return
    # A token's largest number is half a code beyond the last, so a hair decides.
    largest = x.abs() == x.abs().amax(dim=-1, keepdim=True)
    assert not other[~largest.numpy()].any()
    code = x.abs().amax(-1, keepdim=True).numpy() / ((1 << (inputs.scheme.bits - 1)) - 0.5)
    assert (np.abs(got - want) <= 1.001 * code)[largest.numpy()].all()
