"""Our block FP8 and ModelOpt checkpoints in real vLLM on CPU, which takes the least of them.

Bounds are those of test_vllm: it rounds inputs to FP8 on its own, in bf16.
"""

from pathlib import Path
from typing import Any

import pytest

from compress.formats import FP8_CACHE
from compress.formats.runtimes.judge import runtimes
from compress.quant.scheme import PRESETS, QuantScheme
from helpers import compressed_models, tiny_models
from helpers.compressed_models import Compressed
from helpers.in_vllm import KV_SCALE, OPTIONS, Vllm, differences, reference_logprobs, run_vllm

pytestmark = pytest.mark.peers

PER_TOKEN = PRESETS["FP8_DYNAMIC"]


def verdict(fmt: str, written: Compressed) -> str:
    schemes = {name: t.scheme for name, t in written.quantized.items()}
    found = runtimes(fmt, schemes, written.spec)
    return next(v.verdict for v in found if v.runtime == "vLLM on CPU")


def _attention(linear: Any) -> QuantScheme | None:
    return PER_TOKEN if linear.role in "qkvo" else None


@pytest.mark.parametrize(("choose", "cache"), [(PER_TOKEN, FP8_CACHE), (_attention, None)])
def test_modelopt_scores_as_our_weights_do(
    vllm: Vllm, choose: Any, cache: Any, tmp_path: Path
) -> None:
    """FP8_PER_CHANNEL_PER_TOKEN, with a cache whose scales go by ModelOpt's names."""
    source = tiny_models.make("llama", tmp_path / "source", **OPTIONS["llama"])
    options: dict[str, Any] = {"kv_cache": cache, "kv_scale": KV_SCALE}
    written = compressed_models.write(source, tmp_path / "out", choose, fmt="modelopt", **options)
    scores = run_vllm(vllm, written.folder, "bfloat16")
    assert isinstance(scores, dict), scores[-4000:]
    assert verdict("modelopt", written) == "yes"
    reference = reference_logprobs(written, source, tmp_path / "plain", cache)
    assert max(differences(scores, reference)) <= 0.6


@pytest.mark.parametrize(
    ("fmt", "scheme", "message"),
    [
        ("fp8", PRESETS["FP8_BLOCK"], "Failed to find a kernel"),
        ("fp8", PRESETS["FP8"], "static_scaled_fp8_quant"),
        ("modelopt", PRESETS["FP8"], "static_scaled_fp8_quant"),
        ("modelopt", PRESETS["NVFP4A16"], "Marlin FP4 not available"),
        ("modelopt", QuantScheme(group_size=32), "ModelOpt currently only supports"),
    ],
)
def test_what_we_say_it_refuses_it_refuses(
    vllm: Vllm, fmt: str, scheme: QuantScheme, message: str, tmp_path: Path
) -> None:
    source = tiny_models.make("llama", tmp_path / "source", **OPTIONS["llama"])
    written = compressed_models.write(source, tmp_path / "out", scheme, fmt=fmt)
    assert verdict(fmt, written) == "no"
    failure = run_vllm(vllm, written.folder, "bfloat16")
    assert isinstance(failure, str), "vLLM took it"
    assert message in failure
