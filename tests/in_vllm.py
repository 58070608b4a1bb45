"""Real vLLM on CPU, in a Python of its own: how it scores a prompt, beside how our weights do."""

import json
import os
import subprocess
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from compress.quant.scheme import ActivationScheme
from compress.quant.tensor import InputQuantization
from compressed_models import Compressed
from in_transformers import RoundingCache, logits, plain, quantized_inputs

SCRIPT = Path(__file__).parent / "peers" / "vllm_scores.py"
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
KV_SCALE = 0.002  # so small that keys and values saturate: without it results are far off


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


def reference_logprobs(
    written: Compressed, source: Path, folder: Path, cache: ActivationScheme | None = None
) -> torch.Tensor:
    """Log-probabilities [prompt, vocab] of transformers in fp32 with our dequantized weights and
    our own rounding of inputs, and of a cache whose scales are all KV_SCALE."""
    model = quantized_inputs(plain(written, source, folder, rounded=False), written)
    rounding: AbstractContextManager[None] = nullcontext()
    if cache is not None:
        rounding = RoundingCache(InputQuantization(cache, torch.tensor([KV_SCALE])))
    with rounding:
        return logits(model, torch.tensor([PROMPT]))[0].log_softmax(-1)


def differences(scores: dict[str, Any], reference: torch.Tensor) -> list[float]:
    """Largest difference of a log-probability that vLLM reports, by position."""
    return [
        max(abs(float(reference[i, int(token)]) - value) for token, value in tokens.items())
        for i, tokens in enumerate(scores["logprobs"])
    ]
