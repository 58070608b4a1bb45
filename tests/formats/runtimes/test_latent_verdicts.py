"""Verdicts on latents: what keeps vLLM from a checkpoint, by sizes, rotation and biases."""

from typing import Any

import pytest

from compress.arch.describe import describe
from compress.checkpoint import Checkpoint
from compress.formats.runtimes.attention_rules import with_attention
from compress.formats.runtimes.verdicts import Verdict

PLAIN = [Verdict(name, "yes", "") for name in ("transformers", "vLLM on GPU", "vLLM on CPU")]
FACTORS = [1.0, 3.0, 9.0, 27.0]
LONGROPE = {
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": FACTORS,
        "long_factor": FACTORS,
        "attention_factor": 1.0,
        "original_max_position_embeddings": 128,
    }
}
SIZES = "its kernels for latents take rank + rope_dim of 320, 512, 576; these are "
CPU = "its kernels take latents of 512 + 64 numbers only"


def sizes(rank: int, rotated: int) -> dict[str, Any]:
    return {"kv_lora_rank": rank, "qk_rope_head_dim": rotated}


@pytest.mark.parametrize(
    ("options", "on_gpu", "on_cpu"),
    [
        (sizes(512, 64), "", ""),
        (sizes(480, 96), "", CPU),
        (sizes(256, 64), "", CPU),
        (sizes(448, 64), "", CPU),
        (sizes(32, 8), f"{SIZES}40", f"{SIZES}40"),
        (sizes(512, 62), f"{SIZES}574", f"{SIZES}574"),
        (LONGROPE, *["vLLM's class puts another rotation in the place of longrope"] * 2),
        ({"attention_bias": True}, *["vLLM's class has no biases of attention"] * 2),
    ],
    ids=["512+64", "480+96", "256+64", "448+64", "32+8", "512+62", "longrope", "biases"],
)
def test_what_vllm_takes_of_latents(
    tiny: Any, options: dict[str, Any], on_gpu: str, on_cpu: str
) -> None:
    checkpoint = Checkpoint.open(tiny("deepseek_v3", **options))
    spec = describe(checkpoint.config, checkpoint.shapes)
    in_transformers, *in_vllm = with_attention(PLAIN, checkpoint.config, spec)
    assert in_transformers == PLAIN[0]
    for plain, told, why in zip(PLAIN[1:], in_vllm, (on_gpu, on_cpu), strict=True):
        if why:
            assert told.verdict == "no"
            assert told.reason.startswith(why)
        else:
            assert told == plain
