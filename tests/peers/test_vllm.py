"""Our output in real vLLM on CPU: it loads, scores a prompt as our weights do, and generates.

One vLLM serves all cases, a few seconds each. Bounds: it computes in bf16 and its W4A16 kernel
rounds weights to it, which moves log-probabilities of tiny random models by up to 0.12 (0.21 with
integer activations, 0.26 with FP8 ones); a wrong layout moves them by more than 1.
"""

import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from compress.formats import FP8_CACHE, INT8_CACHE
from compress.formats.runtimes.judge import runtimes
from compress.quant.scheme import PRESETS, ActivationScheme, QuantScheme
from compress.verbs import make_plan, run
from helpers import compressed_models, tiny_models
from helpers.compressed_models import Choose, Compressed
from helpers.in_vllm import KV_SCALE, OPTIONS, Vllm, differences, reference_logprobs, run_vllm
from helpers.short_runs import RTN, recipe

pytestmark = pytest.mark.peers

G4 = QuantScheme(group_size=32)
C8 = QuantScheme(bits=8, granularity="channel", group_size=0)
W8A8 = QuantScheme(bits=8, granularity="channel", group_size=0, activation=ActivationScheme())
FP8_WEIGHTS = replace(PRESETS["FP8_DYNAMIC"], activation=None)


def _mixed(linear: Any) -> QuantScheme | None:
    if linear.role == "down":
        return None
    return G4 if linear.role in "qkvo" else QuantScheme(group_size=64)


def _attention(linear: Any) -> QuantScheme | None:
    return G4 if linear.expert is None else None


def verdict(written: Compressed, cache: ActivationScheme | None = None) -> str:
    schemes = {name: t.scheme for name, t in written.quantized.items()}
    found = runtimes("compressed-tensors", schemes, written.spec, kv_cache=cache)
    return next(v.verdict for v in found if v.runtime == "vLLM on CPU")


def check(
    vllm: Vllm,
    source: Path,
    folder: Path,
    choose: QuantScheme | Choose,
    cache: ActivationScheme | None = None,
    head: QuantScheme | None = None,
) -> list[float]:
    """Log-probability differences by position; the verdict we give must be a yes."""
    options: dict[str, Any] = {"kv_cache": cache, "kv_scale": KV_SCALE, "head": head}
    written = compressed_models.write(source, folder / "out", choose, **options)
    scores = run_vllm(vllm, written.folder, "bfloat16")
    assert isinstance(scores, dict), scores[-4000:]
    assert len(scores["tokens"]) == 8
    assert verdict(written, cache) == "yes"
    return differences(scores, reference_logprobs(written, source, folder / "plain", cache))


@pytest.mark.parametrize(
    ("family", "choose", "bound"),
    [
        ("llama", G4, 0.15),
        ("llama", QuantScheme(group_size=32, symmetric=False), 0.15),
        ("llama", QuantScheme(granularity="channel", group_size=0), 0.15),
        ("llama", QuantScheme(group_size=16), 0.15),
        ("llama", W8A8, 0.2),
        ("llama", PRESETS["W8A8_STATIC"], 0.3),
        ("llama", PRESETS["FP8_DYNAMIC"], 0.4),
        ("llama", _mixed, 0.15),
        ("phi3", G4, 0.15),
        ("qwen3", G4, 0.15),
        ("gpt2", G4, 0.15),
    ],
)
def test_loads_and_scores_as_our_weights_do(
    vllm: Vllm, family: str, choose: Any, bound: float, tmp_path: Path
) -> None:
    source = tiny_models.make(family, tmp_path / "source", **OPTIONS[family])
    assert max(check(vllm, source, tmp_path, choose)) <= bound


def test_quantized_heads(vllm: Vllm, tmp_path: Path) -> None:
    source = tiny_models.make("llama", tmp_path / "source", **OPTIONS["llama"])
    assert max(check(vllm, source, tmp_path, G4, head=G4)) <= 0.15


def test_quantized_embeddings_are_refused(vllm: Vllm, tmp_path: Path) -> None:
    """Packed ones are looked up by a Triton kernel: without a GPU they fail at the first token."""
    source = tiny_models.make("llama", tmp_path / "source", **OPTIONS["llama"])
    asked = recipe({**RTN, "targets": ["*", "embedding"], "ignore": []})
    plan = make_plan(asked, source)
    assert {v.runtime: v.verdict for v in plan.runtimes}["vLLM on CPU"] == "no"
    run(asked, source, tmp_path / "out")
    failure = run_vllm(vllm, tmp_path / "out", "bfloat16")
    assert isinstance(failure, str), "vLLM took it"
    assert "triton" in failure.lower()


@pytest.mark.parametrize("choose", [G4, lambda linear: None], ids=["weights", "cache alone"])
def test_fp8_caches(vllm: Vllm, choose: Any, tmp_path: Path) -> None:
    """vLLM takes the cache's dtype and scales from the checkpoint.

    Its rounding to FP8 is not ours to the last bit; without the scales it would be 3 and more.
    """
    source = tiny_models.make("llama", tmp_path / "source", **OPTIONS["llama"])
    assert max(check(vllm, source, tmp_path, choose, FP8_CACHE)) <= 0.5


def test_experts_that_stay_dense(vllm: Vllm, tmp_path: Path) -> None:
    """The median: where two experts are within 0.01 of each other, bf16 picks the other one."""
    source = tiny_models.make("qwen3_moe", tmp_path / "source", **OPTIONS["qwen3_moe"])
    assert statistics.median(check(vllm, source, tmp_path, _attention)) <= 0.1


def test_an_int8_cache_is_refused(vllm: Vllm, tmp_path: Path) -> None:
    source = tiny_models.make("llama", tmp_path / "source", **OPTIONS["llama"])
    written = compressed_models.write(source, tmp_path / "out", G4, kv_cache=INT8_CACHE)
    assert verdict(written, INT8_CACHE) == "no"
    failure = run_vllm(vllm, written.folder, "bfloat16")
    assert isinstance(failure, str), "vLLM took it"
    assert "Currently supported kv cache quantization is num_bits=8, type=float" in failure


def test_demo_model(vllm: Vllm, demo_model: Path, tmp_path: Path) -> None:
    """W4A16 in groups of 64 on trained weights."""
    found = check(vllm, demo_model, tmp_path, QuantScheme(group_size=64))
    assert max(found) <= 0.25


@pytest.mark.parametrize(
    ("family", "scheme", "message"),
    [
        ("llama", C8, "Failed to find a kernel"),
        ("llama", QuantScheme(bits=3, group_size=32), "Failed to find a kernel"),
        ("qwen3_moe", G4, "No WNA16 MoE backend"),
        ("llama", PRESETS["FP8"], "static_scaled_fp8_quant"),
        ("llama", PRESETS["NVFP4A16"], "Marlin FP4 not available"),
        ("llama", FP8_WEIGHTS, "Failed to find a kernel"),
    ],
)
def test_what_we_say_it_refuses_it_refuses(
    vllm: Vllm, family: str, scheme: QuantScheme, message: str, tmp_path: Path
) -> None:
    source = tiny_models.make(family, tmp_path / "source", **OPTIONS[family])
    written = compressed_models.write(source, tmp_path / "out", scheme)
    assert verdict(written) == "no"
    failure = run_vllm(vllm, written.folder, "bfloat16")
    assert isinstance(failure, str), "vLLM took it"
    assert message in failure
