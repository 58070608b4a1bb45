"""The matrix of formats: its tables are those of the stored result, and leave nothing out."""

from typing import Any

import pytest
import torch

from benchmarks.matrix import table
from benchmarks.matrix.rows import LOADERS, ROWS, TRANSFORMERS, VLLM
from benchmarks.matrix.run import whole
from compress.formats import CODECS
from compress.methods import METHODS
from helpers.matrix_cells import Outputs, Reference, facts
from helpers.short_runs import recipe

CELLS = table.stored_cells()


def test_the_document_has_the_stored_tables() -> None:
    document = table.DOCUMENT.read_text()
    assert table.written(document, table.section(table.stored())) == document


def test_every_row_in_every_format() -> None:
    assert whole(CELLS) == CELLS  # refuses to leave one out
    assert {c["format"] for c in CELLS} == set(LOADERS) == set(CODECS)
    text = table.section(table.stored())
    assert all(text.count(f"| {row.name} |") == 2 for row in ROWS)


def test_every_method_has_a_row() -> None:
    # One that writes a whole file of its own has no format to choose.
    by_layer = {name for name, method in METHODS.items() if not method.whole}
    assert {stage["method"] for row in ROWS for stage in row.stages} == by_layer
    assert len({row.name for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize("cell", CELLS, ids=lambda c: f"{c['method']}, {c['format']}")
def test_a_cell_has_its_facts_or_its_reason(cell: dict[str, Any]) -> None:
    if cell["outcome"] == "yes":
        assert cell["logits"] <= cell["bound"]
        assert cell["gap"] is None or cell["gap"] <= 2 * cell["bound"]
        assert (cell["gap"] is None) == (cell["tokens"][0] == cell["tokens"][1])
    else:
        assert cell["outcome"] in ("refused", "not loaded")
        assert len(cell["reason"]) > 20


def test_a_missing_cell_is_named() -> None:
    first = next(c for c in CELLS if c.get("loader") == VLLM)
    others = [c for c in CELLS if c is not first]
    place = f"{first['method']} / {first['format']} / {VLLM}"
    with pytest.raises(ValueError, match="1 cells were not tried") as refused:
        whole(others)
    assert place in str(refused.value)


def test_a_document_without_a_place_is_refused() -> None:
    with pytest.raises(ValueError, match="has no place for the table"):
        table.written("# Formats\n", "")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_rows_are_recipes(row: Any) -> None:
    data = {"calibration": {"sources": "self"}} if row.calibrated else {}
    made = recipe(*row.own_stages(), **row.rest, **data)
    # Overrides become stages of their own.
    assert [stage.method for stage in made.stages if ".overrides[" not in stage.path] == [
        stage["method"] for stage in row.stages
    ]


def reference() -> Reference:
    """Two tokens, the other's logit 0.3 below the first's at every step."""
    steps = torch.tensor([[[1.0, 0.7]] * 4])
    return Reference(Outputs(torch.zeros(1, 3, 2), torch.zeros(1, 4, dtype=torch.long)), steps)


@pytest.mark.parametrize(
    ("logits", "tokens", "bound", "outcome"),
    [
        (0.01, [0, 0, 0, 0], 0.01, "yes"),
        (0.011, [0, 0, 0, 0], 0.01, "wrong"),
        (0.0, [0, 0, 1, 0], 0.16, "yes"),  # 0.3 apart, and each may be 0.15 off
        (0.0, [0, 0, 1, 0], 0.14, "wrong"),
        (float("nan"), [0, 0, 0, 0], 0.01, "wrong"),
    ],
)
def test_what_is_right(logits: float, tokens: list[int], bound: float, outcome: str) -> None:
    found = facts(reference(), logits, torch.tensor([tokens]), bound)
    assert found["outcome"] == outcome
    assert found["tokens"] == [4 if tokens == [0, 0, 0, 0] else 2, 4]


def test_reasons_are_shortened_to_what_differs() -> None:
    refusal = (
        "model.layers.0.self_attn.q_proj does not fit into awq (nor do 13 more layers): it holds"
        " 4 bits, not 5; formats that take all of this checkpoint: dense"
    )
    assert table.short(refusal, "awq") == "it holds 4 bits"
    assert table.short(refusal.replace("do 13 more layers", "does 1 more layer"), "awq") == (
        "it holds 4 bits"
    )
    cache = "the source has scales of a cache (a-fp8 static), which gptq has no place for"
    assert (
        table.short(cache, "gptq") == "the source has scales of a cache, which it has no place for"
    )
    error = "a.b.ValidationError: 1 error Value error, no such bits [type=value_error, x]"
    assert table.short(error, "gptq") == "ValidationError: no such bits"
    assert table.short("word " * 100, "gptq").endswith("word ...")


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (0.0352, "0.035"), (4.2e-6, "4e-6"), (1e-4, "1e-4"), (1.0, "1")]
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert table.number(value) == text


def test_loaders_of_the_second_table_are_in_the_first_under_another() -> None:
    assert all(loaders[0] in (TRANSFORMERS, "gptqmodel", VLLM) for loaders in LOADERS.values())
    assert {loader for loaders in LOADERS.values() for loader in loaders[1:]} == {VLLM}
