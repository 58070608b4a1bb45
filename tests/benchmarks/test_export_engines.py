"""Engines of the matrix's graphs: the document shows what is stored, and all of them were built."""

import re

import pytest

from benchmarks.export import engines
from benchmarks.export.matrix_rows import ROWS, VARIANTS

STORED = engines.stored()
CELLS = STORED["cells"]


def test_the_document_has_the_stored_table() -> None:
    document = engines.DOCUMENT.read_text()
    assert engines.written(document, engines.table(STORED), engines.MARKS) == document


def test_every_row_was_tried() -> None:
    found = [(cell["block"], cell["row"], cell["variant"]) for cell in CELLS]
    assert found == [(x.block, x.name, variant) for x in ROWS for variant in VARIANTS[x.block]]


def test_what_is_exported_is_built() -> None:
    assert engines.not_built(CELLS) == []
    built = [cell for cell in CELLS if cell["outcome"] == "built"]
    assert all(cell["engine_bytes"] > 0 for cell in built)
    # Codes of every kind, and types that need a device of their own.
    assert {cell["compute_capability"] for cell in built} == {None, "8.0", "8.9", "10.0"}
    assert len(built) > len(CELLS) / 2


def test_nothing_is_of_this_machine() -> None:
    assert not re.search(r"/tmp|/root|/work|/home|compress-model-\w{8}", engines.RESULT.read_text())


def test_a_graph_that_is_not_built_is_found() -> None:
    cell = {"block": "families", "row": "llama", "variant": "fp16", "outcome": "not built"}
    assert engines.not_built([*CELLS, cell]) == [cell]


@pytest.mark.parametrize(("device", "says"), [(None, "without a GPU"), ("H1", "with H1")])
def test_the_table(device: str | None, says: str) -> None:
    cells = [
        {"block": "families", "variant": "int4", "outcome": "built", "cpu_s": seconds}
        for seconds in (1.0, 2.04, 9.0)
    ]
    cells.append({"block": "families", "variant": "int4", "outcome": "refused"})
    result = {"builder": "TensorRT 7", "device": device, "cells": cells}
    text = engines.table(result).splitlines()
    assert text[0] == f"By TensorRT 7, {says}:"
    assert text[-1] == "| families, random, int4 | 3 of 4 | 3 | 2.0 (9.0) |"
