"""The matrix of exports: its tables are those of the stored result, and the result is good."""

import json
import re
from typing import Any

import pytest

from benchmarks.export import matrix_table as table
from benchmarks.export.matrix import GOOD, whole
from benchmarks.export.matrix_rows import FAMILIES, RESULTS, ROWS, TARGETS, VARIANTS
from benchmarks.matrix import rows as formats
from compress.recipe.reading.parse import parse
from compress_exporters.table import EXPORTERS
from helpers import tiny_models

STORED = table.stored()
CELLS = STORED["cells"]
# What a refusal ends with: an option, another target, what to quantize to, or what is known.
REMEDY = re.compile(
    r"export |--(to|dtype|max-context|accuracy-level|round-scales) |take |takes |quantize|known are"
    r"|give the config|needs "
)
# llama.cpp takes GELU from a table in fp16, and is the only reader of two families.
TABLED_GELU = ("gpt_neox", "olmo2")


def test_the_document_has_the_stored_tables() -> None:
    document = table.DOCUMENT.read_text()
    assert table.written(document, table.section(STORED), table.MARKS) == document


def test_every_row_to_every_target() -> None:
    assert whole(CELLS) == CELLS  # refuses to leave one out
    assert set(TARGETS) == set(EXPORTERS)
    assert len({(row.block, row.name) for row in ROWS}) == len(ROWS)
    text = table.section(STORED)
    assert all(f"| {row.name} |" in text for row in ROWS)


def test_every_method_and_every_family_has_a_row() -> None:
    assert {row.name for row in formats.ROWS} <= {x.name for x in ROWS if x.block == RESULTS}
    assert set(tiny_models.TABLED) <= {x.family for x in ROWS if x.block == FAMILIES}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.block}, {row.name}")
def test_rows_are_recipes(row: Any) -> None:
    assert {what for what, _ in VARIANTS[row.block].values()} == set(row.recipes)
    for recipe in row.recipes.values():
        if recipe is not None:
            assert parse(json.dumps(recipe)).evaluation is None


def test_nothing_is_of_this_machine() -> None:
    assert not re.search(r"/tmp|/root|/work|/home|compress-model-\w{8}", table.RESULT.read_text())


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.block}, {row.name}")
def test_cells_have_their_proof_or_their_reason(row: Any) -> None:
    for cell in CELLS:
        if (cell["block"], cell["row"]) == (row.block, row.name):
            assert cell["outcome"] in GOOD
            _proved(cell) if cell["outcome"] == "yes" else _refused(cell["reason"])
            if "option" in cell:
                _refused(cell["without"])


def _refused(reason: str) -> None:
    assert "\n" not in reason
    assert REMEDY.search(reason), reason


def _proved(cell: dict[str, Any]) -> None:
    assert cell["level"] in ("logits", "tokens")
    if cell["level"] == "logits":
        assert any(re.search("not all the same|then it chooses", line) for line in cell["detail"])
    if cell["row"] == "dense" or (cell["variant"] == "fp32" and cell["block"] == FAMILIES):
        by_table = cell["target"] == "gguf" and cell["row"].startswith(TABLED_GELU)
        half = cell["variant"] == "fp16"
        assert table.share(cell) <= (5e-3 if half else 1e-3 if by_table else 1e-5)


def test_a_missing_cell_is_named() -> None:
    first, *others = CELLS
    place = f"{first['block']} / {first['row']} / {first['target']} / {first['variant']}"
    with pytest.raises(ValueError, match="1 cells were not tried") as refused:
        whole(others)
    assert place in str(refused.value)


def test_cells_in_words() -> None:
    notes: dict[str, int] = {}
    cell = {"outcome": "yes", "level": "tokens", "error": 0.02, "largest_logit": 10.0, "notes": []}
    small = cell | {"error": 1e-6, "largest_logit": 0.1}
    assert table.texts([cell, small], notes) == "0.002, 1e-6"
    refused = {"outcome": "refused", "reason": "no blocks of 48"}
    assert table.texts([refused, refused], notes) == "refused [1]"
    assert table.texts([cell, refused], notes) == "0.002, refused [1]"
    said = ["a: logits within 0.1", "b: within 0.2, greedy tokens are not all the same", "c"]
    lower = cell | {"level": "logits", "detail": said}
    assert table.texts([lower, lower], notes) == "logits 0.002, logits 0.002 [2]"
    lifted = cell | {"option": "--x", "without": "it differs by 2.1%, take --x"}
    dense = cell | {"notes": ["7 weights become F16, as they are (a8) floats: blk.0", "said"]}
    assert table.texts([lifted, dense], notes) == "0.002 [3], 0.002 [4]"
    assert list(notes) == [
        "no blocks of 48",
        "b, greedy tokens are not all the same",
        "with `--x`; without it: it differs, take --x",
        "weights become dense, as they are floats",
    ]
