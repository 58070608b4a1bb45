"""A calibrated run on a CUDA device loses as little as one on the CPU."""

from pathlib import Path

import pytest
import torch

from compress.verbs import EvaluationOptions, RunOptions, evaluate_checkpoint, run
from helpers.short_runs import GPTQ, WORDS, recipe, text_source

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]


def test_the_error_is_that_of_the_cpu(tiny, tmp_path: Path) -> None:
    asked = recipe(GPTQ, calibration=text_source(tmp_path, samples=16, length=64))
    errors = {}
    for device in ("cpu", "cuda"):
        out = tmp_path / device
        report = run(asked, tiny("llama"), out, options=RunOptions(device=device, dtype="fp32"))
        errors[device] = [layer.error for layer in report.layers if layer.error is not None]
    assert sum(errors["cuda"]) == pytest.approx(sum(errors["cpu"]), rel=0.02)
    words = tmp_path / "held-out.txt"
    words.write_text(WORDS * 3)
    reports = [
        evaluate_checkpoint(
            tmp_path / "cuda",
            EvaluationOptions(texts=[str(words)], device=device),
            against=tiny("llama"),
        )
        for device in ("cpu", "cuda")
    ]
    cpu, cuda = (report.quality.texts[0] for report in reports if report.quality is not None)
    assert cuda.ppl_result == pytest.approx(cpu.ppl_result, rel=1e-3)
