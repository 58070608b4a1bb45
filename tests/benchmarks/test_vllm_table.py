"""vLLM's agreement with us: the document has the stored table, and all of it is good enough."""

from typing import Any

import pytest

from benchmarks import vllm_cpu
from benchmarks.matrix import table

RESULT = vllm_cpu.stored()


def test_the_document_has_the_stored_table() -> None:
    text = table.DOCUMENT.read_text()
    assert vllm_cpu.document(text) == text


def test_every_case_in_every_format() -> None:
    wanted = [(case.name, fmt) for case in vllm_cpu.CASES for fmt in case.formats]
    assert [(cell["method"], cell["format"]) for cell in RESULT["cells"]] == wanted


@pytest.mark.parametrize("cell", RESULT["cells"], ids=lambda c: f"{c['method']}, {c['format']}")
def test_agreement(cell: dict[str, Any]) -> None:
    """99 %, unless our own reading in fp64 is further from the one in fp32."""
    if "same_as" in cell:
        assert (cell["format"], cell["same_as"]) == ("modelopt", "compressed-tensors")
        return
    assert cell["positions"] > 4000
    assert cell["different"] <= max(cell["positions"] / 100, cell["own"] or 0)
    assert (cell["gap"] is None) == (cell["different"] == 0)
    assert (cell["gap"] or 0.0) <= cell["bound"]
