"""The stored results of the exporters' benchmarks: the document shows them, they meet the bars."""

import json
from typing import Any

import pytest

from benchmarks.export import table
from benchmarks.processes import RESULTS

BAR = 1.5e9  # bytes of memory


def stored(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def test_the_document_has_the_stored_tables() -> None:
    text = table.DOCUMENT.read_text()
    assert table.document(text) == text


@pytest.mark.parametrize("model", table.MODELS)
def test_nothing_is_larger_than_the_builders(model: str) -> None:
    sizes = stored(f"export_genai_{model}")["bytes_over_the_builders"]
    assert sizes.pop("builder") == 1
    assert max(sizes.values()) <= 1


@pytest.mark.parametrize("model", table.MODELS)
@pytest.mark.parametrize("rate", table.RATES)
def test_blocks_as_our_recipes_have_are_faster_than_the_builders(model: str, rate: str) -> None:
    assert stored(f"export_genai_{model}")["speed"]["ratios"]["g128"][rate] >= 1


def test_memory_grows_with_the_builders_blocks_and_not_with_ours() -> None:
    one, eight = (stored("export_memory_builder")[f"{blocks} blocks"] for blocks in (1, 8))
    ours = [found["int4"]["onnx-genai"]["peak_rss_bytes"] for found in (one, eight)]
    assert max(ours) < BAR
    theirs = [found["builder"]["peak_rss_bytes"] for found in (one, eight)]
    assert theirs[1] > 3 * theirs[0] > 3 * BAR


def test_calibrated_codes_are_nearer_to_the_source() -> None:
    found = stored("export_genai_tale-6m")["quality"]["kl_nats_a_token"]
    assert max(found["gptq"], found["awq-gptq"], found["g128"], found["ours"]) < found["builder"]
    assert max(found["gptq"], found["awq-gptq"]) < found["ours"]


def test_memory_of_the_whole_model() -> None:
    found = stored("export_memory")["32 blocks"]
    peaks = [
        cost["peak_rss_bytes"] for source in ("dense", "int4") for cost in found[source].values()
    ]
    assert len(peaks) == 8
    assert max(peaks) < BAR
