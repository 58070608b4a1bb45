"""Static input scales of experts: routers that starve some must not leave them without."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compress.pipeline import run
from pipeline_runs import recipe, text_source


def starved(tiny: Any, folder: Path) -> Path:
    """A mixtral whose routers send every token to the same two experts of four."""
    source = Path(shutil.copytree(tiny("mixtral"), folder / "starved"))
    tensors = load_file(source / "model.safetensors")
    for name in tensors:
        if name.endswith("block_sparse_moe.gate.weight"):
            tensors[name] = torch.zeros_like(tensors[name])  # ties always go to the same ones
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    return source


@pytest.mark.parametrize(
    "stage",
    [
        {"method": "rtn", "scheme": "W8A8_STATIC"},
        {"method": "fp8", "scheme": "FP8"},
        {"method": "smoothquant", "scheme": "W8A8_STATIC"},
    ],
    ids=["rtn", "fp8", "smoothquant"],
)
def test_every_expert_sees_the_tokens_its_static_scale_needs(
    tiny, tmp_path: Path, stage: dict[str, object]
) -> None:
    asked = recipe(stage, calibration=text_source(tmp_path))
    report = run(asked, starved(tiny, tmp_path), tmp_path / "out")
    experts = [x for x in report.layers if x.expert is not None]
    assert experts
    assert all(x.tokens == 64 and x.kept_reason is None for x in experts)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    scales = [t for name, t in stored.items() if name.endswith("input_scale") and "expert" in name]
    assert len(scales) == len(experts)
    assert all(0 < float(scale) < 1 for scale in scales)


def test_an_expert_left_without_a_scale_says_so(tiny, tmp_path: Path) -> None:
    stage = {"method": "gptq", "scheme": "W8A8_STATIC", "experts": "routed"}
    asked = recipe(stage, calibration=text_source(tmp_path))
    report = run(asked, starved(tiny, tmp_path), tmp_path / "out")
    unseen = [x for x in report.layers if x.tokens == 0]
    assert len({x.expert for x in unseen}) == 2
    assert {x.kept_reason for x in unseen} == {"no token reached the expert: its input scale is 1"}
