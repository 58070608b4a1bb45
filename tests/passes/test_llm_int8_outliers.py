"""The paper's phenomenon on a trained model with six planted outlier features, and its cure.

tale-6m-outliers computes the same function as tale-6m; six columns of its norms' outputs are 64 to
256 times as large, and the weights that read them as much smaller. Plain W8A8 spends its input
codes on these six. Fixed columns with their 16-bit weights cost nothing. bitsandbytes' form takes
the weights of outlier columns from the row's int8 codes, which are 64 to 256 times too coarse for
these columns: it pays what 8-bit weights by themselves pay, and nothing for the inputs.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compress.verbs import run
from helpers.short_runs import recipe

TRAIN = "text/tinystories/tinystories_train.txt"
TEST = "text/tinystories/tinystories_test.txt"
STAGES: dict[str, dict[str, Any]] = {
    "plain": {"method": "rtn", "scheme": "W8A8", "scale_search": "minmax"},
    "weights alone": {"method": "rtn", "scheme": "W8A16", "scale_search": "minmax"},
    "dynamic": {"method": "llm_int8", "scheme": "LLM_INT8"},
    "calibrated": {"method": "llm_int8", "scheme": "LLM_INT8_CALIBRATED"},
}
Loss = Callable[[str, str], float]


@pytest.fixture(scope="module")
def loss(shared_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Loss:
    """(model, stage) -> perplexity of the result over that of its source."""

    def measure(model: str, stage: str) -> float:
        text = {"name": "t", "text": str(shared_dir / TEST), "max_documents": 4, "cut": True}
        data = {"sources": [{"text": str(shared_dir / TRAIN)}], "samples": 8, "length": 256}
        asked = recipe(
            STAGES[stage],
            evaluation={"texts": [text], "window": 512, "kl": False},
            **({"calibration": data} if stage == "calibrated" else {}),
        )
        out = tmp_path_factory.mktemp("run") / "out"
        report = run(asked, shared_dir / "models" / model, out)
        assert report.quality is not None
        (found,) = report.quality.texts
        assert found.ppl_source is not None
        return found.ppl_result / found.ppl_source

    return measure


def test_plain_w8a8_collapses_and_fixed_columns_do_not(loss: Loss) -> None:
    assert loss("tale-6m-outliers", "plain") > 8
    assert loss("tale-6m-outliers", "calibrated") == pytest.approx(1, abs=0.005)


@pytest.mark.long
def test_columns_found_at_run_time_pay_for_their_weights_only(loss: Loss) -> None:
    dynamic = loss("tale-6m-outliers", "dynamic")
    assert dynamic < 1.05
    assert dynamic == pytest.approx(loss("tale-6m-outliers", "weights alone"), rel=0.01)


@pytest.mark.long
def test_without_planted_outliers_every_form_is_within_half_a_percent(loss: Loss) -> None:
    for stage in ("plain", "dynamic", "calibrated"):
        assert loss("tale-6m", stage) == pytest.approx(1, abs=0.005), stage
