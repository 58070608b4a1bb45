"""The plan's estimates: they grow with the work, and memory is near what a run then takes."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from compress.checkpoint import Checkpoint
from compress.pipeline.estimate import Job, estimate
from compress.pipeline.job import make_plan
from compress.report.codec import read_json
from compress_calibration.config import CalibrationConfig, SourceConfig


def job_of(model: Path) -> Job:
    plan = make_plan("int4-gptq", model)
    text = SourceConfig(kind="text", path="any.txt")
    return Job(
        Checkpoint.open(model),
        plan.spec,
        [(m.linear, m.scheme) for m in plan.modules],
        CalibrationConfig((text,), samples=64, length=256),
        torch.bfloat16,
    )


def test_more_work_takes_longer(demo_model: Path) -> None:
    job = job_of(demo_model)
    assert job.calibration is not None
    longer = replace(job, calibration=replace(job.calibration, samples=6400))
    assert estimate(longer).seconds > 5 * estimate(job).seconds > 0


def test_writing_its_own_text_takes_time_and_a_cache(demo_model: Path) -> None:
    job = job_of(demo_model)
    assert job.calibration is not None
    own = replace(job.calibration, samples=512, sources=(SourceConfig(kind="self"),))
    text = replace(job.calibration, samples=512)
    writing = estimate(replace(job, calibration=own))
    reading = estimate(replace(job, calibration=text))
    assert writing.seconds > reading.seconds
    assert writing.peak_rss_bytes > reading.peak_rss_bytes


@pytest.mark.parametrize("recipe", ["int4-rtn", "int4-gptq"])
def test_memory_is_within_a_fifth(recipe: str, demo_model: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The old man looked at the sea and said that it was going to rain. " * 8000)
    settings = ["--set", "evaluation=null"]
    if recipe == "int4-gptq":
        settings += ["--set", f"calibration.sources=[{{text: {text}}}]"]
    command = [sys.executable, "-m", "compress.cli", "run", recipe, "--model", str(demo_model)]
    subprocess.run(
        [*command, "--out", str(tmp_path / "out"), *settings], check=True, capture_output=True
    )
    compared = read_json(tmp_path / "out" / "report" / "report.json").plan_vs_actual
    assert compared is not None
    assert compared.peak_rss.deviation is not None
    assert abs(compared.peak_rss.deviation) < 0.2
    assert compared.bytes.deviation == 0
