"""Our GPTQ and AWQ in real vLLM on CPU: it scores a prompt as our weights do, or says why not.

In fp16, the dtype of the formats' scales. One vLLM serves all cases.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from compress.formats.runtimes.judge import runtimes
from compress.quant.scheme import QuantScheme
from helpers import compressed_models, tiny_models
from helpers.in_vllm import OPTIONS, Vllm, differences, reference_logprobs, run_vllm

pytestmark = pytest.mark.peers

G4 = QuantScheme(group_size=32)
ASYMMETRIC = replace(G4, symmetric=False)
CHANNEL = QuantScheme(granularity="channel", group_size=0)
C8 = QuantScheme(bits=8, granularity="channel", group_size=0)
BOUND = 0.03


def _mixed(linear: Any) -> QuantScheme | None:
    """Two group sizes, and layers that stay dense."""
    if linear.role == "down":
        return None
    return G4 if linear.role in "qkvo" else QuantScheme(group_size=64)


def _without_down(linear: Any) -> QuantScheme | None:
    return None if linear.role == "down" else ASYMMETRIC


def write(fmt: str, choose: Any, folder: Path, **options: Any) -> compressed_models.Compressed:
    family = options.pop("family", "llama")
    source = tiny_models.make(family, folder / "source", dtype="fp16", **OPTIONS[family])
    return compressed_models.write(source, folder / "out", choose, fmt=fmt, **options)


def verdict(written: compressed_models.Compressed, fmt: str, **options: Any) -> str:
    schemes = {name: tensor.scheme for name, tensor in written.quantized.items()}
    found = runtimes(fmt, schemes, written.spec, g_idx=options.get("act_order", False))
    return next(v.verdict for v in found if v.runtime == "vLLM on CPU")


@pytest.mark.parametrize(
    ("fmt", "choose", "options"),
    [
        ("gptq", G4, {}),
        ("gptq", CHANNEL, {}),
        ("gptq", _mixed, {}),
        ("gptq", G4, {"head": G4}),
        ("gptq", G4, {"family": "phi3"}),
        ("gptq", G4, {"family": "gpt2"}),
        ("gptq_v2", G4, {}),
        ("awq", ASYMMETRIC, {}),
        ("awq", G4, {}),
        ("awq", _without_down, {}),
        ("awq", replace(CHANNEL, symmetric=False), {}),
    ],
)
def test_loads_and_scores_as_our_weights_do(
    vllm: Vllm, fmt: str, choose: Any, options: dict[str, Any], tmp_path: Path
) -> None:
    written = write(fmt, choose, tmp_path, **options)
    scores = run_vllm(vllm, written.folder, "float16")
    assert isinstance(scores, dict), scores[-4000:]
    assert verdict(written, fmt) == "yes"
    reference = reference_logprobs(written, tmp_path / "source", tmp_path / "plain")
    assert max(differences(scores, reference)) <= BOUND


@pytest.mark.parametrize(
    ("fmt", "scheme", "options", "message"),
    [
        ("gptq_v2", ASYMMETRIC, {}, "Unsupported quantization config: bits=4, sym=False"),
        ("gptq", C8, {}, "Marlin does not support weight_bits = uint8b128"),
        ("gptq", QuantScheme(group_size=16), {}, "Marlin does not support group_size = 16"),
        ("gptq", G4, {"act_order": True}, "(desc_act=True) is no longer supported"),
    ],
)
def test_what_it_refuses(
    vllm: Vllm,
    fmt: str,
    scheme: QuantScheme,
    options: dict[str, Any],
    message: str,
    tmp_path: Path,
) -> None:
    written = write(fmt, scheme, tmp_path, **options)
    failure = run_vllm(vllm, written.folder, "float16")
    assert isinstance(failure, str), "vLLM took it"
    assert verdict(written, fmt, **options) == "no"
    assert message in failure
