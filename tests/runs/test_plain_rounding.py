"""A result that looked at data is measured beside plain rounding of the same layers."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from compress.report.schema import Report
from compress.report.summary import worse_than_plain
from compress.runs.plain_rounding import EDITED, ITSELF, NOT_ASKED
from compress.verbs import run
from helpers.short_runs import GPTQ, RTN, recipe, text_source


def measured(
    folder: Path, model: Path, *stages: Any, name: str = "out", **evaluation: Any
) -> Report:
    data = text_source(folder)
    calibration = {"calibration": data} if GPTQ in stages else {}
    texts = {"texts": [dict(each) for each in data["sources"]], "window": 16, **evaluation}
    return run(recipe(*stages, **calibration, evaluation=texts), model, folder / name)


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_plain_rounding_is_what_rtn_gives(tiny: Any, tmp_path: Path, family: str) -> None:
    model = tiny(family)
    compensated = measured(tmp_path, model, GPTQ)
    rounded = measured(tmp_path, model, RTN, name="rounded")
    assert compensated.quality is not None
    assert rounded.quality is not None
    (text,), (same,) = compensated.quality.texts, rounded.quality.texts
    assert text.plain is not None
    assert text.plain.perplexity == same.ppl_result
    assert text.plain.kl == same.kl
    assert text.plain.top1_agreement == same.top1_agreement
    assert text.kl is not None
    assert same.kl is not None
    assert text.plain.closed == pytest.approx(1 - text.kl / same.kl)
    assert (same.plain, rounded.quality.plain_reason) == (None, ITSELF)


def test_without_kl_the_share_is_of_the_loss(tiny: Any, tmp_path: Path) -> None:
    found = measured(tmp_path, tiny("llama"), GPTQ, kl=False).quality
    assert found is not None
    plain = found.texts[0].plain
    assert plain is not None
    assert plain.kl is None
    assert plain.closed is None or plain.closed <= 1


def test_gptq_says_what_plain_rounding_with_its_data_costs(tiny: Any, tmp_path: Path) -> None:
    report = measured(tmp_path, tiny("llama"), GPTQ)
    assert report.layers
    for layer in report.layers:
        if layer.skipped_reason is None:
            assert layer.error is not None
            assert layer.plain_error is not None
            assert layer.error <= layer.plain_error


def test_what_is_not_measured_says_why(tiny: Any, tmp_path: Path) -> None:
    model = tiny("llama")
    off = measured(tmp_path, model, GPTQ, name="off", plain=False).quality
    assert off is not None
    assert off.texts[0].plain is None
    assert off.plain_reason == NOT_ASKED
    cast = {"method": "cast", "dtype": "fp32"}
    edited = measured(tmp_path, model, cast, GPTQ, name="edited").quality
    assert edited is not None
    assert edited.texts[0].plain is None
    assert edited.plain_reason == EDITED


def test_a_result_worse_than_plain_rounding_is_warned_of(tiny: Any, tmp_path: Path) -> None:
    report = measured(tmp_path, tiny("llama"), GPTQ)
    assert report.quality is not None
    (text,) = report.quality.texts
    assert text.plain is not None
    worse = replace(text, kl=0.04, plain=replace(text.plain, kl=0.03, closed=1 - 0.04 / 0.03))
    assert worse_than_plain(replace(report, quality=replace(report.quality, texts=(worse,)))) == [
        (
            "on words the result is worse than plain rounding at the same bits, KL 0.0400 against"
            " 0.0300: calibrate on text like it or on the model's own (--set"
            " calibration.sources=self), or round without data (method rtn)"
        )
    ]
    alike = replace(text, kl=0.03, plain=replace(text.plain, kl=0.03 - 1e-9, closed=-3e-8))
    assert not worse_than_plain(replace(report, quality=replace(report.quality, texts=(alike,))))
