"""The stored result of graphs beside the checkpoint's weights: the document says what it says."""

import json

import pytest

from benchmarks.processes import REPO, RESULTS


def test_the_document_says_what_was_measured() -> None:
    result = json.loads((RESULTS / "export_in_place.json").read_text())
    text = (REPO / "docs" / "export.md").read_text()
    narrow, wide = result["bf16"], result["fp32"]
    seconds = {way: f"{cost['opening']['cpu_s']:.2f} s" for way, cost in narrow.items()}
    peaks = [
        round(cost["opening"]["peak_rss_mb"])
        for cost in (narrow["in_place"], wide["in_place"], wide["copied"])
    ]
    written = {way: cost["export"]["bytes_written"] / 1e6 for way, cost in narrow.items()}
    for said in (
        f"{result['weights_bytes']['bf16'] / 2e6:.0f} million weights",
        f"{written['in_place']:.1f} MB were written and not {written['copied']:.0f} MB",
        f"{seconds['in_place']} of processor time and not {seconds['copied']}",
        f"with {peaks[0]} MB of memory at its peak (weights in bf16)",
        f" or {peaks[1]} MB (in fp32) and not {peaks[2]} MB",
    ):
        assert said in text


@pytest.mark.parametrize("source", ["bf16", "fp32"])
def test_steps_take_the_same(source: str) -> None:
    found = json.loads((RESULTS / "export_in_place.json").read_text())[source]
    steps = [found[way]["opening"]["step_cpu_s"] for way in ("in_place", "copied")]
    assert steps[0] == pytest.approx(steps[1], rel=0.1)
