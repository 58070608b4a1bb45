"""Experts under every method: what routers starve is calibrated all the same, or said to be not."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compress.arch.describe import describe
from compress.checkpoint import Checkpoint
from compress.methods import METHODS
from compress.verbs import run
from helpers.short_runs import recipe, text_source
from helpers.tiny_models import MIXTURES

W4 = {"bits": 4, "group_size": 16}
DENSE = {"output": {"format": "dense"}}
INT8 = {
    "bits": 8,
    "granularity": "channel",
    "activation": {"outliers": "calibrated", "threshold": 2.0},
}
# Every method, and every way by which one may or may not look at what an expert reads.
STAGES: dict[str, tuple[dict[str, Any], ...]] = {
    "rtn": ({"method": "rtn", "scheme": W4, "scale_search": "importance"},),
    "gptq": ({"method": "gptq", "scheme": W4},),
    "gptq routed": ({"method": "gptq", "scheme": W4, "experts": "routed"},),
    "fp8": ({"method": "fp8", "scheme": "FP8_DYNAMIC", "scale_search": "importance"},),
    "nvfp4": ({"method": "nvfp4", "scheme": "NVFP4A16", "scale_search": "importance"},),
    "llm_int8": ({"method": "llm_int8", "scheme": INT8},),
    "llm_int8 routed": ({"method": "llm_int8", "scheme": INT8, "experts": "routed"},),
    "awq": ({"method": "awq", "scheme": W4, "grid": 3},),
    "awq, minmax": ({"method": "awq", "scheme": W4, "grid": 3, "scale_search": "minmax"},),
    "awq, rtn": ({"method": "awq", "grid": 3}, {"method": "rtn", "scheme": W4}),
    "awq, gptq": ({"method": "awq", "grid": 3}, {"method": "gptq", "scheme": W4}),
    "smoothquant": ({"method": "smoothquant", "scheme": "W8A8", "pairs": "all"},),
    "smoothquant, gptq": ({"method": "smoothquant"}, {"method": "gptq", "scheme": "W8A8"}),
}


def starved(tiny: Any, folder: Path, family: str = "mixtral") -> Path:
    """A mixture whose routers send every token to the same two experts of four."""
    source = Path(shutil.copytree(tiny(family), folder / "starved"))
    tensors = load_file(source / "model.safetensors")
    checkpoint = Checkpoint.open(source)
    spec = describe(checkpoint.config, checkpoint.shapes)
    for router in (x.tensor for x in spec.linears() if x.role == "router"):
        tensors[router] = torch.zeros_like(tensors[router])  # ties always go to the same ones
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    return source


# The other family differs in how its experts are stored, not in what methods look at.
BOTH = ("gptq routed", "awq, gptq")
CASES = [
    pytest.param(family, stages, id=f"{name}-{family}",
                 marks=() if family == "mixtral" or name in BOTH else pytest.mark.long)
    for family in MIXTURES
    for name, stages in STAGES.items()
]  # fmt: skip


def test_no_method_is_missing() -> None:
    """What rounds a whole model into one file is no stage of these passes."""
    here = {name for name, method in METHODS.items() if not method.whole}
    assert {stage["method"] for stages in STAGES.values() for stage in stages} == here


@pytest.mark.parametrize(("family", "stages"), CASES)
def test_no_expert_is_left_uncalibrated_in_silence(
    tiny, tmp_path: Path, family: str, stages: tuple[dict[str, Any], ...]
) -> None:
    asked = recipe(*stages, calibration=text_source(tmp_path), **DENSE)
    source = starved(tiny, tmp_path, family)
    report = run(asked, source, tmp_path / "out")
    experts = [x for x in report.layers if x.expert is not None]
    assert {(x.block, x.expert, x.role) for x in experts} == {
        (b, e, role) for b in (0, 1) for e in range(4) for role in ("gate", "up", "down")
    }
    shown = any(getattr(METHODS[s["method"]].config, "experts", None) for s in stages)
    everything = shown and all(s.get("experts") != "routed" for s in stages)
    before, after = (
        load_file(folder / "model.safetensors") for folder in (source, tmp_path / "out")
    )
    for x in experts:
        assert x.skipped_reason is None
        assert x.error is not None
        assert 0 < x.error < 0.05, x.name
        assert not torch.equal(before[f"{x.name}.weight"], after[f"{x.name}.weight"])
        assert x.tokens == 64 if everything else x.tokens in (0, 64)
        if not x.tokens:
            assert x.kept_reason is not None, x.name
            assert "no token reached the expert" in x.kept_reason or "0 tokens" in x.kept_reason
    assert everything == all(x.tokens for x in experts)


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
