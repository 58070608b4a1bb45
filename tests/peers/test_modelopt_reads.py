"""What real nvidia-modelopt exports, read by us: weights as ModelOpt computes them, and logits.

Codes and scales are exact. ModelOpt's fake quantization divides by 1 / scale where a runtime
multiplies with the scale, so its weights differ from any runtime's by fp32 rounding (3e-7 of their
value); what its own functions make of the exported tensors is equal to the bit.

An input half-way between two codes falls to one side or the other by such differences, and then
logits behind it are off by up to 0.3; half of all logits at least (of 4 at most) have no such input
and are compared: they agree to 1e-6, and are off by 0.07 when inputs are not rounded.

NVFP4 is exported on CPU as well, but fake quantization of FP4 is a CUDA kernel: there is no
reference but the functions. Its layout in 0.47's source (quantization/qtensor/nvfp4_tensor.py): the
code of column 2i is the low nibble of byte i, sign << 3 | index in 0, 0.5, 1, 1.5, 2, 3, 4, 6; a
weight is code * (weight_scale * weight_scale_2), with weight_scale_2 = amax / (6 * 448).
"""

import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from compress.checkpoint import Checkpoint
from compress.formats import FP8_CACHE, Weights, open_weights
from compress.formats.modelopt.config import ALGORITHMS
from compress.quant.activations import fake_quantize, quantize_inputs
from compress.quant.scheme import PRESETS, QuantScheme
from helpers import tiny_models
from helpers.in_transformers import load, logits

pytestmark = pytest.mark.peers

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "peers" / "modelopt_run.py"
SIZES = {"hidden_size": 128, "intermediate_size": 256}  # groups of 128 divide them
G64 = QuantScheme(group_size=64)
FP8, FP4, SQ = PRESETS["FP8"], PRESETS["NVFP4A16"], ALGORITHMS["W8A8_SQ_PER_CHANNEL"]


def run_peer(python: Path, folder: Path, *options: str) -> tuple[Weights, dict[str, Tensor]]:
    """What was exported, and the reference beside it."""
    source = tiny_models.make("llama", folder / "source", dtype="fp32", **SIZES)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONPATH", None)
    out = folder / "out"
    arguments = [str(python), str(SCRIPT), str(source), str(out), *options]
    subprocess.run(
        arguments, env=environment, cwd=folder, check=True, capture_output=True, timeout=600
    )
    weights = open_weights(Checkpoint.open(out))
    assert weights.format.coded
    return weights, load_file(folder / "out.reference")


def plain_weight(weights: Weights, module: str) -> Tensor:
    """Codes times scales, before factors of inputs."""
    tensor = weights.quantized(f"{module}.weight")
    assert tensor is not None
    return replace(tensor, input_factor=None).dequantize()


def compare_weights(weights: Weights, reference: dict[str, Tensor]) -> dict[str, int]:
    """How many weights were compared with what ModelOpt computes, by kind."""
    counts = {"fake": 0, "real": 0}
    for name, theirs in reference.items():
        module, _, kind = name.rpartition(".")
        if not module:
            continue
        ours = plain_weight(weights, module)
        counts[kind] += 1
        if kind == "real":
            assert torch.equal(ours, theirs), name
        else:
            assert torch.allclose(ours, theirs, rtol=3e-7, atol=0), name
    return counts


def our_logits(weights: Weights, source: Path, *, inputs: bool = True) -> Tensor:
    model: Any = load(source)
    state = {}
    for name in model.state_dict():
        tensor = weights.quantized(name)
        state[name] = weights.read(name) if tensor is None else tensor.dequantize()
    model.load_state_dict(state)
    for linear in weights.spec.linears():
        found = weights.activation(linear.name) if inputs else None
        if found is not None:
            quantize_inputs(model.get_submodule(linear.name), found)
    return logits(model)


@pytest.mark.parametrize(
    ("options", "scheme", "factors", "counts"),
    [
        (["INT4_AWQ_CFG"], PRESETS["W4A16"], True, {"fake": 14, "real": 0}),
        (["INT4_AWQ_CFG", "--group-size", "64"], G64, True, {"fake": 14, "real": 0}),
        (["INT8_SMOOTHQUANT_CFG"], SQ, True, {"fake": 14, "real": 14}),
        (["INT8_WEIGHT_ONLY_CFG"], PRESETS["W8A16"], False, {"fake": 14, "real": 14}),
        (["FP8_DEFAULT_CFG"], FP8, False, {"fake": 14, "real": 14}),
        (
            ["FP8_PER_CHANNEL_PER_TOKEN_CFG"],
            PRESETS["FP8_DYNAMIC"],
            False,
            {"fake": 14, "real": 0},
        ),
        (
            ["FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG"],
            ALGORITHMS["FP8_PB_WO"],
            False,
            {"fake": 14, "real": 8},
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_weights_and_logits(
    modelopt_python: Path,
    options: list[str],
    scheme: QuantScheme,
    factors: bool,
    counts: dict[str, int],
    tmp_path: Path,
) -> None:
    weights, reference = run_peer(modelopt_python, tmp_path, "--config", *options)
    assert {weights.scheme(x.name) for x in weights.spec.linears()} == {scheme}
    assert any(name.endswith("pre_quant_scale") for name in weights.checkpoint.tensors) == factors
    assert compare_weights(weights, reference) == counts
    differences = (our_logits(weights, tmp_path / "source") - reference["logits"]).abs()
    assert differences.median() < 1e-5
    if scheme.activation is None:
        assert differences.max() < 1e-4
        return
    unrounded = our_logits(weights, tmp_path / "source", inputs=False)
    assert (unrounded - reference["logits"]).abs().median() > 0.05


def test_a_cache(modelopt_python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own scale for every layer's keys and values, by ModelOpt's names."""
    options = ("--config", "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG", "--cache")
    weights, reference = run_peer(modelopt_python, tmp_path, *options)
    assert weights.kv_cache == FP8_CACHE
    scales = [weights.cache(block) for block in weights.spec.blocks]
    assert all(found is not None and found[0].scale is not None for found in scales)
    before = our_logits(weights, tmp_path / "source")
    from transformers.cache_utils import DynamicCache

    update = DynamicCache.update

    def rounded(cache: Any, keys: Tensor, values: Tensor, layer: int, *rest: Any) -> Any:
        found = scales[layer]
        assert found is not None
        keys, values = fake_quantize(keys, found[0]), fake_quantize(values, found[1])
        return update(cache, keys, values, layer, *rest)

    monkeypatch.setattr(DynamicCache, "update", rounded)
    after = our_logits(weights, tmp_path / "source")
    assert (after - reference["logits"]).abs().median() < 1e-5
    assert (before - reference["logits"]).abs().median() > 1e-3


@pytest.mark.parametrize("config", ["NVFP4_DEFAULT_CFG", "W4A16_NVFP4_CFG"])
def test_fp4(modelopt_python: Path, config: str, tmp_path: Path) -> None:
    weights, reference = run_peer(modelopt_python, tmp_path, "--config", config)
    assert {weights.scheme(x.name) for x in weights.spec.linears()} == {FP4}
    assert compare_weights(weights, reference) == {"fake": 0, "real": 14}
    source = load_file(tmp_path / "source" / "model.safetensors")
    for linear in weights.spec.linears():
        ours = plain_weight(weights, linear.name)
        assert (ours - source[linear.tensor]).abs().max() < 0.12  # of weights up to 0.5


def _by_mlp(weights: Weights) -> dict[bool, set[QuantScheme | None]]:
    found: dict[bool, set[QuantScheme | None]] = {}
    for linear in weights.spec.linears():
        found.setdefault(".mlp." in linear.name, set()).add(weights.scheme(linear.name))
    return found


@pytest.mark.parametrize(
    ("mlp", "scheme", "counts"),
    [
        ("INT4_AWQ_CFG", PRESETS["W4A16"], {"fake": 14, "real": 8}),
        ("W4A16_NVFP4_CFG", FP4, {"fake": 8, "real": 14}),
    ],
)
def test_mixed(
    modelopt_python: Path, mlp: str, scheme: QuantScheme, counts: dict[str, int], tmp_path: Path
) -> None:
    options = ("--config", "FP8_DEFAULT_CFG", "--mlp", mlp)
    weights, reference = run_peer(modelopt_python, tmp_path, *options)
    assert _by_mlp(weights) == {False: {FP8}, True: {scheme}}
    assert compare_weights(weights, reference) == counts
