"""The plan's estimates: they grow with the work, and memory is near what a run then takes."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from compress.arch.spec import LinearSpec
from compress.checkpoint import Checkpoint
from compress.plan.estimate import estimate
from compress.plan.memory_needs import RunSize
from compress.plan.row_counts import ROWS_AT_ONCE
from compress.quant.scheme import PRESETS
from compress.report.codec import read_json
from compress.runs.planning import make_plan
from compress_calibration.config import CalibrationConfig, SourceConfig


def run_size_of(model: Path) -> RunSize:
    plan = make_plan("int4-gptq", model)
    text = SourceConfig(kind="text", path="any.txt")
    return RunSize(
        Checkpoint.open(model),
        plan.spec,
        [(m.linear, m.scheme) for m in plan.modules],
        CalibrationConfig((text,), samples=64, length=256),
        torch.bfloat16,
    )


def test_more_work_takes_longer(demo_model: Path) -> None:
    run_size = run_size_of(demo_model)
    assert run_size.calibration is not None
    longer = replace(run_size, calibration=replace(run_size.calibration, samples=6400))
    assert estimate(longer).seconds > 5 * estimate(run_size).seconds > 0


def test_writing_its_own_text_takes_time_and_a_cache(demo_model: Path) -> None:
    run_size = run_size_of(demo_model)
    assert run_size.calibration is not None
    own = replace(run_size.calibration, samples=512, sources=(SourceConfig(kind="self"),))
    text = replace(run_size.calibration, samples=512)
    writing = estimate(replace(run_size, calibration=own))
    reading = estimate(replace(run_size, calibration=text))
    assert writing.seconds > reading.seconds
    assert writing.peak_rss_bytes > reading.peak_rss_bytes


def test_weights_with_one_number_for_all_are_whole_in_memory(demo_model: Path) -> None:
    """4 fp32 copies of what is worked on, and 4 bytes a weight of what is held."""
    run_size, n = replace(run_size_of(demo_model), calibration=None), 16384

    def linear(role: str, fused: str | None) -> LinearSpec:
        name = f"model.layers.0.self_attn.{role}_proj"
        module = f"self_attn.{role}_proj"
        return LinearSpec(name, f"{name}.weight", (n, n), role, "in", module, fused=fused)

    def needed(preset: str, count: int) -> int:
        linears = [linear(role, "qkv" if role in "qkv" else None) for role in "oqkv"[:count]]
        scheme = PRESETS[preset]
        return estimate(replace(run_size, linears=[(x, scheme) for x in linears])).peak_rss_bytes

    rows, whole = ROWS_AT_ONCE, n * n
    assert rows < whole
    base = needed("W4A16", 4) - 16 * rows - 4 * whole
    assert needed("FP8_BLOCK", 4) == base + 16 * rows + 4 * whole
    for shared in ("FP8", "NVFP4A16"):
        assert needed(shared, 4) == base + 16 * whole + 4 * 3 * whole
        assert needed(shared, 1) == base + 16 * whole + 4 * whole


@pytest.mark.parametrize("recipe", ["int4-rtn", pytest.param("int4-gptq", marks=pytest.mark.long)])
def test_memory_is_within_a_fifth(recipe: str, demo_model: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The old man looked at the sea and said that it was going to rain. " * 8000)
    settings = ["--set", "evaluation=null"]
    if recipe == "int4-gptq":
        settings += ["--set", f"calibration.sources=[{{text: {text}}}]"]
        settings += ["--set", "calibration.samples=8"]
    command = [sys.executable, "-m", "compress.cli", "run", recipe, "--model", str(demo_model)]
    subprocess.run(
        [*command, "--out", str(tmp_path / "out"), *settings], check=True, capture_output=True
    )
    compared = read_json(tmp_path / "out" / "report" / "report.json").plan_vs_actual
    assert compared is not None
    assert compared.peak_rss.deviation is not None
    assert abs(compared.peak_rss.deviation) < 0.2
    assert compared.bytes.deviation == 0
