"""Small trained models: text of the model's own is as good as real text, odd widths go through."""

from pathlib import Path
from typing import Any

import pytest

from compress.report.schema import Report
from compress.verbs import run
from helpers.short_runs import recipe

TRAIN = "text/tinystories/tinystories_train.txt"
TEST = "text/tinystories/tinystories_test.txt"


def run_on(model: Path, out: Path, stage: dict[str, Any], shared: Path, **rest: Any) -> Report:
    text = {"name": "stories", "text": str(shared / TEST), "max_documents": 40, "cut": True}
    evaluation = {"texts": [text], "window": 512, "kl": False}
    return run(recipe(stage, evaluation=evaluation, **rest), model, out)


def perplexities(report: Report) -> tuple[float, float]:
    assert report.quality is not None
    (text,) = report.quality.texts
    assert text.ppl_source is not None
    return text.ppl_source, text.ppl_result


@pytest.mark.long
def test_calibration_on_its_own_text_is_as_good_as_on_real_text(
    shared_dir: Path, tmp_path: Path
) -> None:
    model = shared_dir / "models" / "tale-6m"
    stage = {"method": "gptq", "scheme": "W4A16"}
    sources = {"own": "self", "real": [{"text": str(shared_dir / TRAIN)}]}
    found = {}
    for name, source in sources.items():
        data = {"sources": source, "samples": 64, "length": 256}
        report = run_on(model, tmp_path / name, stage, shared_dir, calibration=data)
        before, found[name] = perplexities(report)
        assert before < found[name] < 1.04 * before
    assert found["own"] == pytest.approx(found["real"], rel=0.01)


@pytest.mark.long
@pytest.mark.parametrize(
    "scheme",
    [{"bits": 4, "granularity": "channel"}, {"bits": 4, "group_size": 4}],
    ids=["channel", "g4"],
)
def test_widths_that_no_usual_group_divides(
    shared_dir: Path, tmp_path: Path, scheme: dict[str, Any]
) -> None:
    model = shared_dir / "models" / "stories260K"
    stage = {"method": "gptq", "scheme": scheme}
    data = {"sources": "self", "samples": 32, "length": 128}
    report = run_on(model, tmp_path / "out", stage, shared_dir, calibration=data)
    before, after = perplexities(report)
    assert after < before * (1.25 if scheme.get("granularity") else 1.05)
