"""The quality benchmark: its recipes are valid, its verdict is the one it states."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.quality import results, table
from benchmarks.quality.measure import bits_per_weight
from benchmarks.quality.results import standard_error, summary
from benchmarks.quality.rows import MODELS, OURS, ROWS, Cell, our_cell, peer_cell
from benchmarks.quality.table import Line
from benchmarks.quality.tools import our_command, slug
from compress.checkpoint import Checkpoint
from compress.formats import open_weights
from compress.methods import METHODS
from compress.recipe.reading.parse import parse
from compress.verbs import run
from helpers import tiny_models
from helpers.short_runs import recipe, text_source

CELLS = [our_cell(model, row, 5) for model in MODELS for row in ROWS if row.is_for(model)]
QUALITY = {
    "perplexity_source": 7.9,
    "perplexity": 8.0,
    "kl": 0.1,
    "top1_agreement": 0.9,
    "bits_per_weight": 4.1,
}
COST = {"wall_s": 1.0, "cpu_s": 2.0, "peak_rss_bytes": 3e6, "others": 0.0}


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.label)
def test_our_recipes_are_valid(cell: Cell, tmp_path: Path) -> None:
    assert set(cell.row.methods) <= METHODS.keys()
    command = our_command(cell, 3, tmp_path, tmp_path)
    recipe = parse((tmp_path / "recipe.yaml").read_text())
    assert command[1:5] == ["-m", "compress.cli", "run", str(tmp_path / "recipe.yaml")]
    assert recipe.seed == 3
    assert (recipe.calibration is not None) == cell.row.seeds == (cell.seeds == 5)


def test_every_row_and_folder_has_a_name_of_its_own() -> None:
    names = [(row.group, row.name) for row in ROWS]
    assert len(set(names)) == len(names)
    assert len({slug(f"{group}-{name}") for group, name in names}) == len(names)


def test_what_sees_no_data_is_made_once() -> None:
    for row in ROWS:
        peer = peer_cell(MODELS[0], row, 5)
        assert our_cell(MODELS[0], row, 5).seeds == (5 if row.seeds else 1)
        if peer is not None and row.peer is not None:
            assert peer.seeds == (5 if row.peer.seeds else 1)


def test_bits_count_outlier_columns(tmp_path: Path) -> None:
    """As the run's own report does."""
    source = tiny_models.make("llama", tmp_path / "source")
    activation = {"outliers": "calibrated", "threshold": 2.0}
    scheme = {"bits": 8, "granularity": "channel", "activation": activation}
    stage = {"method": "llm_int8", "scheme": scheme}
    report = run(recipe(stage, calibration=text_source(tmp_path)), source, tmp_path / "out")
    assert sum(layer.outlier_columns or 0 for layer in report.layers) > 0
    found = bits_per_weight(open_weights(Checkpoint.open(tmp_path / "out")))
    assert found == pytest.approx(report.result.bits_per_weight)


@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize("model", ["tale-6m", "tale-6m-outliers"])
def test_stored_results_are_in_the_order_of_the_papers(model: str, bits: int) -> None:
    """Perplexity, means over the calibration seeds."""
    cells = results.load(f"int{bits}")["models"][model]
    found = {row: tools[OURS]["mean"]["perplexity"] for row, tools in cells.items()}
    assert found["gptq"] <= found["rtn"]
    assert found["awq+gptq"] <= found["awq"]
    assert found["awq"] <= found["rtn"]
    assert {cells[row][OURS]["seeds"] for row in ("gptq", "awq", "awq+gptq")} == {5}


def cell_of(perplexities: list[float]) -> dict[str, Any]:
    qualities = [{**QUALITY, "perplexity": p} for p in perplexities]
    return {"seeds": len(qualities), **summary(qualities, [COST] * len(qualities))}


@pytest.mark.parametrize(
    ("ours", "peer", "met"),
    [
        ([8.0], [8.0], True),
        ([8.1], [8.0], False),
        ([8.1, 8.1], [7.9, 8.3], True),  # 8.1 + 0.2
        ([8.28, 8.3], [7.9, 8.3], True),
        ([8.31, 8.31], [7.9, 8.3], False),
    ],
)
def test_the_bound_is_the_mean_and_one_standard_error(
    ours: list[float], peer: list[float], met: bool
) -> None:
    assert Line(MODELS[0], ROWS[0], cell_of(ours), cell_of(peer), ()).met is met


def test_without_both_sides_there_is_no_verdict() -> None:
    failed = {"failed": "it says why", "seeds": 1}
    for ours, peer in ((None, cell_of([8.0])), (cell_of([8.0]), None), (cell_of([8.0]), failed)):
        line = Line(MODELS[0], ROWS[0], ours, peer, ())
        assert line.met is None
        assert len(table.columns(line)) == len(table.HEAD)
    assert "missing: awq" in table.columns(Line(MODELS[0], ROWS[0], None, None, ("awq",)))


def test_standard_error() -> None:
    assert standard_error([1.0]) == 0
    assert standard_error([1.0, 3.0]) == pytest.approx(1.0)


def test_cells_are_kept_beside_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    row = ROWS[0]
    for model in MODELS[:2]:
        results.store(our_cell(model, row, 5), {"name": model.name})
        results.store(peer_cell(model, row, 5) or CELLS[0], {"name": f"peer of {model.name}"})
    assert results.find(row.group, MODELS[0].name, row.name, "compress-model") == {
        "name": MODELS[0].name
    }
    stored = json.loads((tmp_path / f"quality_{row.group}.json").read_text())
    assert len(stored["models"]) == 2
    assert all(len(tools) == 2 for rows in stored["models"].values() for tools in rows.values())
    assert results.find(row.group, MODELS[2].name, row.name, "compress-model") is None
