"""FP8, NVFP4, static inputs and a quantized cache in transformers with compressed-tensors."""

from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from packaging.version import Version

from compress.arch.spec import LinearSpec
from compress.formats import FP8_CACHE, INT8_CACHE
from compress.formats.runtimes.judge import runtimes
from compress.quant.scheme import PRESETS, ActivationScheme, QuantScheme
from compress.quant.tensor import InputQuantization
from helpers import compressed_models
from helpers.compressed_models import Choose, Compressed
from helpers.in_transformers import (
    RoundingCache,
    load,
    load_compressed,
    logits,
    plain,
    quantized_inputs,
    verdict_of,
)
from helpers.tiny_models import LINEAR

pytestmark = [pytest.mark.interop, pytest.mark.usefixtures("compressed_tensors")]

TRIED = "0.20"  # compressed-tensors whose refusals compress.formats.runtimes.judge states
BLOCK = replace(  # of 32, which divides what the tiny models have
    PRESETS["FP8_BLOCK"],
    group_size=32,
    activation=replace(PRESETS["FP8_DYNAMIC"].activation, granularity="group", group_size=32),
)
NVFP4 = PRESETS["NVFP4A16"]
G4 = QuantScheme(group_size=32)


def check(source: Path, folder: Path, choose: QuantScheme | Choose, **options: Any) -> Compressed:
    """Every weight exactly, and the logits of our own rounding of the inputs to 1e-5."""
    written = compressed_models.write(source, folder / "out", choose, **options)
    expected = quantized_inputs(plain(written, source, folder / "plain", rounded=False), written)
    model = load_compressed(written, dequantize=False)
    found = logits(model)
    state = model.state_dict()
    for name, tensor in expected.state_dict().items():
        assert torch.equal(state[name].float(), tensor), name
    assert (found - logits(expected)).abs().max() <= 1e-5
    assert verdict_of(written).verdict == "yes"
    return written


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize(
    "scheme",
    [
        PRESETS["FP8"],
        PRESETS["FP8_DYNAMIC"],
        BLOCK,
        PRESETS["W8A8_STATIC"],
        replace(PRESETS["FP8"], activation=None),
        replace(PRESETS["FP8_BLOCK"], activation=None),
        replace(PRESETS["W8A8"], activation=ActivationScheme(granularity="tensor")),
    ],
    ids=QuantScheme.describe,
)
def test_weights_and_inputs(source: Any, scheme: QuantScheme, dtype: str, tmp_path: Path) -> None:
    check(source(dtype=dtype), tmp_path, scheme)


def test_inputs_matter(source: Any, tmp_path: Path) -> None:
    """What `check` compares is not the same with unquantized inputs."""
    written = compressed_models.write(source(), tmp_path / "out", PRESETS["FP8"])
    unquantized = plain(written, source(), tmp_path / "plain", rounded=False)
    model = load_compressed(written, dequantize=False)
    assert (logits(model) - logits(unquantized)).abs().max() > 1e-2


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_nvfp4_in_bfloat16(source: Any, dtype: str, tmp_path: Path) -> None:
    """compressed-tensors rounds the weights to bf16 whatever the model is in."""
    written = compressed_models.write(source(dtype=dtype), tmp_path / "out", NVFP4)
    model = load_compressed(written, dequantize=False, dtype=torch.bfloat16)
    found = logits(model)
    state, reference = model.state_dict(), written.reference()
    for name in written.quantized:
        assert torch.equal(state[name], reference[name].bfloat16()), name
    plain(written, source(dtype=dtype), tmp_path / "plain", rounded=False)
    assert torch.equal(found, logits(load(tmp_path / "plain", dtype=torch.bfloat16)))
    assert verdict_of(written) == (
        "transformers",
        "yes",
        "in bfloat16, to which compressed-tensors 0.20 rounds NVFP4's weights",
        "bfloat16",
    )


@pytest.mark.parametrize("scheme", [NVFP4, PRESETS["FP8_DYNAMIC"]], ids=QuantScheme.describe)
def test_dequantized_while_loading(source: Any, scheme: QuantScheme, tmp_path: Path) -> None:
    """In fp32, with unquantized inputs; NVFP4 as rounded to bf16, here without a loss."""
    written = compressed_models.write(source(), tmp_path / "out", scheme)
    expected = plain(written, source(), tmp_path / "plain", rounded=True)
    model = load_compressed(written, dequantize=True)
    assert (logits(model) - logits(expected)).abs().max() <= 1e-5


def test_integers_with_float_inputs(source: Any, tmp_path: Path) -> None:
    scheme = replace(G4, activation=ActivationScheme(type="float"))
    written = compressed_models.write(source(dtype="fp32"), tmp_path / "out", scheme)
    expected = plain(written, source(dtype="fp32"), tmp_path / "plain", rounded=True)
    model = load_compressed(written, dequantize=True)
    assert (logits(model) - logits(expected)).abs().max() <= 1e-5
    assert verdict_of(written).reason.startswith("with CompressedTensorsConfig(dequantize=True)")


@pytest.mark.parametrize("family", LINEAR)
def test_families(source: Any, family: str, tmp_path: Path) -> None:
    written = compressed_models.write(source(family), tmp_path / "out", PRESETS["FP8"])
    expected = plain(written, source(family), tmp_path / "plain", rounded=False)
    model = load_compressed(written, dequantize=False)
    quantized_inputs(expected, written)
    assert (logits(model) - logits(expected)).abs().max() <= 1e-5


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("name", ["FP8", "FP8_DYNAMIC"])
def test_experts(source: Any, family: str, name: str, tmp_path: Path) -> None:
    """In fp32, since transformers leaves experts in the scales' dtype; their inputs stay."""
    written = check(source(family, dtype="fp32"), tmp_path, PRESETS[name])
    assert "inputs of experts are not quantized" in verdict_of(written).reason


def _mixed(linear: LinearSpec) -> QuantScheme | None:
    if linear.role in "qkv":
        return PRESETS["FP8"]
    return {"o": G4, "down": PRESETS["W8A8_STATIC"]}.get(linear.role)


def test_mixed_precision(source: Any, tmp_path: Path) -> None:
    """Three kinds of storage in one model, the head in a fourth."""
    check(source(), tmp_path, _mixed, head=replace(PRESETS["FP8"], activation=None))


def cache_is_left_alone() -> bool:
    """transformers calls a block's cache by another name since 5.24; compressed-tensors 0.20 looks
    for the old one, and rounds nothing where it finds none."""
    renamed = Version(version("transformers")) >= Version("5.24")
    return renamed and Version(version("compressed-tensors")) < Version("0.21")


@pytest.mark.parametrize("cache", [FP8_CACHE, INT8_CACHE], ids=["fp8", "int8"])
@pytest.mark.parametrize("choose", [G4, lambda linear: None], ids=["weights", "cache alone"])
@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_caches(
    source: Any, family: str, choose: Any, cache: ActivationScheme, tmp_path: Path
) -> None:
    """Keys behind their rotation and values, rounded before attention reads them."""
    folder = source(family)
    written = compressed_models.write(folder, tmp_path / "out", choose, kv_cache=cache)
    model = load_compressed(written, dequantize=False)
    found = logits(model)
    unquantized = logits(plain(written, folder, tmp_path / "plain", rounded=False))
    with RoundingCache(InputQuantization(cache, torch.tensor([0.02]).bfloat16())):
        expected = logits(load(tmp_path / "plain"))
    rounds = not cache_is_left_alone()
    assert (found - (expected if rounds else unquantized)).abs().max() <= 1e-5
    assert not rounds or (found - unquantized).abs().max() > 1e-3
    schemes = {name: t.scheme for name, t in written.quantized.items()}
    verdicts = runtimes("compressed-tensors", schemes, written.spec, kv_cache=cache)
    assert [v.verdict for v in verdicts if v.runtime == "transformers"] == ["yes"]


@pytest.mark.parametrize(
    ("family", "choose", "reason"),
    [
        ("llama", PRESETS["FP8_BLOCK"], "divide by no group of inputs of 128"),
        ("qwen3_moe", replace(BLOCK, activation=None), "FP8 experts have one scale a tensor or"),
        ("qwen3_moe", NVFP4, "leaves the global scale out"),
        ("mixtral", PRESETS["W8A8_STATIC"], "experts take symmetric weight-only"),
        ("gpt2", PRESETS["FP8_DYNAMIC"], "Conv1D"),
    ],
)
def test_what_we_say_it_refuses_it_refuses(
    source: Any,
    compressed_tensors: ModuleType,
    family: str,
    choose: QuantScheme,
    reason: str,
    tmp_path: Path,
) -> None:
    _only_the_tried(compressed_tensors)
    folder = source(family, dtype="fp32")
    written = compressed_models.write(folder, tmp_path / "out", choose)
    assert verdict_of(written).verdict == "no"
    assert reason in verdict_of(written).reason
    expected = logits(plain(written, folder, tmp_path / "plain", rounded=False))
    try:
        found = logits(load_compressed(written, dequantize=False, dtype=torch.bfloat16))
    except (RuntimeError, ValueError):
        return
    assert (found.float() - expected).abs().max() > 0.5


def test_caches_it_does_not_see(source: Any, tmp_path: Path) -> None:
    folder = source("gpt2")
    written = compressed_models.write(
        folder, tmp_path / "out", lambda linear: None, kv_cache=FP8_CACHE
    )
    verdicts = runtimes("compressed-tensors", {}, written.spec, kv_cache=FP8_CACHE)
    found = next(v for v in verdicts if v.runtime == "transformers")
    assert found.verdict == "no"
    assert "the scales of the cache would be left out" in found.reason
    assert torch.equal(logits(load(written.folder)), logits(load(folder)))


def _only_the_tried(compressed_tensors: ModuleType) -> None:
    version = compressed_tensors.__version__
    if not version.startswith(f"{TRIED}."):
        pytest.skip(f"states what compressed-tensors {TRIED} refuses; {version} is installed")
