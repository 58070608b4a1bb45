"""The stored results of the engine's benchmarks: the document shows them, they meet the bars."""

import json
from typing import Any

import pytest

from benchmarks.processes import RESULTS
from benchmarks.runtime import table


def stored(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def test_the_document_has_the_stored_tables() -> None:
    text = table.DOCUMENT.read_text()
    assert table.document(text) == text


@pytest.mark.parametrize(("model", "bar"), [("tale-6m", 3.0), ("400m", 2.0)])
def test_sixty_four_requests_beside_static_batches(model: str, bar: float) -> None:
    cases = {case["requests"]: case for case in stored(f"runtime_speed_{model}_fp32")["cases"]}
    assert cases[64]["ratios"]["static"]["tokens_per_s"] >= bar


@pytest.mark.parametrize(("model", "shared", "bar"), [("tale-6m", 400, 3.0), ("400m", 1024, 10.0)])
def test_shared_beginnings(model: str, shared: int, bar: float) -> None:
    result = stored(f"runtime_prefix_{model}")
    assert result["shared_tokens"] == shared
    assert result["ratio"] >= bar


def test_waste_is_the_last_block_alone() -> None:
    for case in stored("runtime_kv_waste")["blocks"]:
        assert case["bound"] == pytest.approx(
            (case["block"] - 1) / 2 / case["mean_length"] + 0.01, abs=1e-5
        )
        assert case["waste"] <= case["bound"]


def test_eight_bits_halve_the_cache() -> None:
    result = stored("runtime_kv_quality")
    sizes = result["bytes_per_token"]
    assert sizes["int8"] <= 0.55 * sizes["float16"]
    assert result["tales"]["int8"]["kl_mean"] < 1e-3


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("runtime_roofline", "400m"),
        ("runtime_roofline_int4-rtn", "400m"),
        ("runtime_roofline_tale-6m", "tale-6m"),
        ("runtime_roofline_tale-6m_bf16", "tale-6m"),
        ("runtime_roofline_tale-6m_int4-rtn", "tale-6m"),
        ("runtime_roofline_2_threads", "400m"),
        ("runtime_roofline_int4-rtn_2_threads", "400m"),
        ("runtime_roofline_tale-6m_2_threads", "tale-6m"),
        ("runtime_roofline_tale-6m_int4-rtn_2_threads", "tale-6m"),
    ],
)
def test_predictions_are_within_fifteen_percent(name: str, model: str) -> None:
    result = stored(name)
    assert (result["model"], result["blocks"], result["clock"]) == (model, None, "wall")
    assert 0.85 <= result["furthest_ratio"] <= 1.15
