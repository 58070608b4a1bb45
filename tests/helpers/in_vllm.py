"""Real vLLM on CPU, in a Python of its own: how it scores a prompt, beside how our weights do."""

import json
import os
import subprocess
import threading
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from compress.quant.scheme import ActivationScheme
from compress.quant.tensor import InputQuantization
from helpers.compressed_models import Compressed
from helpers.in_transformers import RoundingCache, logits, plain, quantized_inputs

SCRIPT = Path(__file__).parents[1] / "peers" / "vllm_scores.py"
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
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}
KV_SCALE = 0.002  # so small that keys and values saturate: without it results are far off


class Vllm:
    """One process of it for many checkpoints, since starting it takes longer than they do.

    log: the file that its messages go to.
    """

    def __init__(self, python: Path, log: Path) -> None:
        self.python, self.log = python, log
        self.process: subprocess.Popen[str] | None = None

    def score(
        self, folder: Path, dtype: str, rows: list[list[int]], new: int = 1, **options: Any
    ) -> list[dict[str, Any]] | str:
        """Of each row "logprobs" by position and the "tokens" it continues by, or the failure.

        options: further ones of vLLM's LLM.
        """
        process = self._started()
        job = {"folder": str(folder), "dtype": dtype, "rows": rows, "new": new, "options": options}
        assert process.stdin is not None
        assert process.stdout is not None
        print(json.dumps(job), file=process.stdin, flush=True)
        deadline = threading.Timer(600, process.kill)
        deadline.start()
        line = process.stdout.readline()
        deadline.cancel()
        if not line:
            self.close()
            return "vLLM died: " + self.log.read_text(errors="replace")[-8000:]
        answer = json.loads(line)
        return str(answer["failure"]) if "failure" in answer else list(answer["rows"])

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
        self.process = None

    def _started(self) -> subprocess.Popen[str]:
        if self.process is None:
            environment = {**os.environ, **ENVIRONMENT}
            environment.pop("PYTHONPATH", None)
            with self.log.open("ab") as log:
                self.process = subprocess.Popen(
                    [str(self.python), str(SCRIPT)],
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                )
        return self.process


def run_vllm(vllm: Vllm, folder: Path, dtype: str) -> dict[str, Any] | str:
    """Scores of PROMPT, or what vLLM said when it failed."""
    found = vllm.score(folder, dtype, [PROMPT], new=8)
    return found if isinstance(found, str) else found[0]


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
