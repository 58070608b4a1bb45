"""Our output in real vLLM on CPU: it loads, scores a prompt as our weights do, and generates.

Each case starts vLLM once, about a minute on 2 cores. Bounds: vLLM computes in bf16 and its W4A16
kernel rounds weights to it, which moves log-probabilities of tiny random models by up to 0.06 (0.11
with integer activations); a wrong layout moves them by more than 1.
"""

import json
import os
import statistics
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import compressed_models
import tiny_models
from compress.formats import runtimes
from compress.quant.scheme import ActivationScheme, QuantScheme
from compressed_models import Choose, Compressed

pytestmark = pytest.mark.peers

SCRIPT = Path(__file__).with_name("vllm_scores.py")
PROMPT = list(range(1, 21))
# vLLM's CPU kernels want head sizes from 32 and multiples of 32 elsewhere.
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "llama": {**SIZES, "head_dim": 32},
    "phi3": SIZES,
    "qwen3": {**SIZES, "head_dim": 32},
    "gpt2": {"n_embd": 128, "n_inner": 256, "n_head": 4},
    "qwen3_moe": {**SIZES, "head_dim": 32, "moe_intermediate_size": 64},
}
G4 = QuantScheme(group_size=32)
C8 = QuantScheme(bits=8, granularity="channel", group_size=0)
W8A8 = QuantScheme(bits=8, granularity="channel", group_size=0, activation=ActivationScheme())


def _mixed(linear: Any) -> QuantScheme | None:
    if linear.role == "down":
        return None
    return G4 if linear.role in "qkvo" else QuantScheme(group_size=64)


def _attention(linear: Any) -> QuantScheme | None:
    return G4 if linear.expert is None else None


def run_vllm(python: Path, folder: Path, dtype: str) -> dict[str, Any] | str:
    """Scores, or what vLLM said when it failed."""
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
    }
    arguments = [str(python), str(SCRIPT), str(folder), dtype, json.dumps(PROMPT), "8"]
    done = subprocess.run(
        arguments, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    for line in done.stdout.splitlines():
        if line.startswith("SCORES "):
            return dict(json.loads(line.removeprefix("SCORES ")))
    return done.stdout + done.stderr


def reference_logprobs(written: Compressed, source: Path, folder: Path) -> torch.Tensor:
    """Log-probabilities [prompt, vocab] of transformers in fp32 with our dequantized weights."""
    from transformers import AutoModelForCausalLM

    folder.mkdir()
    (folder / "config.json").write_text((source / "config.json").read_text())
    save_file(written.reference(), folder / "model.safetensors", metadata={"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.tensor([PROMPT])).logits[0].log_softmax(-1)


def verdict(written: Compressed) -> str:
    schemes = {name: t.scheme for name, t in written.quantized.items()}
    found = runtimes("compressed-tensors", schemes, written.spec)
    return next(v.verdict for v in found if v.runtime == "vLLM on CPU")


def differences(scores: dict[str, Any], reference: torch.Tensor) -> list[float]:
    """Largest difference of a log-probability that vLLM reports, by position."""
    return [
        max(abs(float(reference[i, int(token)]) - value) for token, value in tokens.items())
        for i, tokens in enumerate(scores["logprobs"])
    ]


def check(python: Path, source: Path, folder: Path, choose: QuantScheme | Choose) -> list[float]:
    """Log-probability differences by position; the verdict we give must be a yes."""
    written = compressed_models.write(source, folder / "out", choose)
    scores = run_vllm(python, written.folder, "bfloat16")
    assert isinstance(scores, dict), scores[-4000:]
    assert len(scores["tokens"]) == 8
    assert verdict(written) == "yes"
    return differences(scores, reference_logprobs(written, source, folder / "plain"))


@pytest.mark.parametrize(
    ("family", "choose", "bound"),
    [
        ("llama", G4, 0.1),
        ("llama", QuantScheme(group_size=32, symmetric=False), 0.1),
        ("llama", QuantScheme(granularity="channel", group_size=0), 0.1),
        ("llama", QuantScheme(group_size=16), 0.1),
        ("llama", W8A8, 0.2),
        ("llama", _mixed, 0.15),
        ("phi3", G4, 0.1),
        ("qwen3", G4, 0.1),
        ("gpt2", G4, 0.1),
    ],
)
def test_loads_and_scores_as_our_weights_do(
    vllm_python: Path, family: str, choose: Any, bound: float, tmp_path: Path
) -> None:
    source = tiny_models.make(family, tmp_path / "source", **OPTIONS[family])
    assert max(check(vllm_python, source, tmp_path, choose)) <= bound


def test_experts_that_stay_dense(vllm_python: Path, tmp_path: Path) -> None:
    """The median: where two experts are within 0.01 of each other, bf16 picks the other one."""
    source = tiny_models.make("qwen3_moe", tmp_path / "source", **OPTIONS["qwen3_moe"])
    assert statistics.median(check(vllm_python, source, tmp_path, _attention)) <= 0.1


def test_demo_model(vllm_python: Path, demo_model: Path, tmp_path: Path) -> None:
    """W4A16 in groups of 64 on trained weights."""
    found = check(vllm_python, demo_model, tmp_path, QuantScheme(group_size=64))
    assert max(found) <= 0.25


@pytest.mark.parametrize(
    ("family", "scheme", "message"),
    [
        ("llama", C8, "Failed to find a kernel"),
        ("llama", QuantScheme(bits=3, group_size=32), "Failed to find a kernel"),
        ("qwen3_moe", G4, "No WNA16 MoE backend"),
    ],
)
def test_what_we_say_it_refuses_it_refuses(
    vllm_python: Path, family: str, scheme: QuantScheme, message: str, tmp_path: Path
) -> None:
    source = tiny_models.make(family, tmp_path / "source", **OPTIONS[family])
    written = compressed_models.write(source, tmp_path / "out", scheme)
    assert verdict(written) == "no"
    failure = run_vllm(vllm_python, written.folder, "bfloat16")
    assert isinstance(failure, str), "vLLM took it"
    assert message in failure
