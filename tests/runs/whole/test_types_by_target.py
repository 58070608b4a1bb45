"""Types of a whole GGUF file, by name or by a budget."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from compress.checkpoint import Checkpoint
from compress.checkpoint.outline import outline_of
from compress.errors import CompressError
from compress.formats import open_weights
from compress.plan.budget import Sensitivities, budget_units, with_choice
from compress.plan.plan import Plan
from compress.recipe import Recipe, dump
from compress.recipe.reading.parse import parse
from compress.verbs import RunOptions, make_plan, run
from compress_exporters.gguf import target
from helpers.short_runs import recipe, text_source

CANDIDATES = ["Q4_0", "Q5_0", "Q8_0"]
UNCACHED = RunOptions(cache=False)


@pytest.fixture(autouse=True)
def quick_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loaders have tests of their own; they take seconds."""
    monkeypatch.setattr(target, "has_llamacpp", lambda: False)
    monkeypatch.setattr(target, "has_accelerate", lambda: False)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache folder, empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "compress-model"


def asking(folder: Path, **options: Any) -> Recipe:
    stage = {"method": "k_quants", "type": "Q8_0", "candidates": CANDIDATES, **options}
    return recipe(stage, calibration=text_source(folder))


def by_name(folder: Path, *types: Any, **options: Any) -> Recipe:
    stage = {"method": "k_quants", "type": "Q4_0", "types": list(types), **options}
    return recipe(stage, calibration=text_source(folder))


def bounds(source: Path, folder: Path) -> tuple[int, int]:
    """Bytes of the file with all linears of the blocks in the smallest, and in the largest type."""
    sizes = []
    for kind in (CANDIDATES[0], CANDIDATES[-1]):
        whole = {"type": kind, "layers": ["model.layers.*"]}
        sizes.append(make_plan(by_name(folder, whole, type="Q8_0"), source).shards.total_bytes)
    return sizes[0], sizes[1]


def chosen(plan: Plan) -> dict[str, str]:
    assert plan.file is not None
    return {m.linear.name: m.kind for m in plan.file.modules}


@pytest.mark.parametrize(("family", "sensitivity"), [("llama", "kl"), ("mixtral", "output_error")])
def test_the_file_stays_within_its_bytes(
    tiny: Any, tmp_path: Path, cache: Path, family: str, sensitivity: str
) -> None:
    source, out = tiny(family), tmp_path / "out"
    low, high = bounds(source, tmp_path)
    limit = (low + high) // 2
    asked = asking(tmp_path, target={"bytes": limit}, sensitivity=sensitivity)
    before = make_plan(asked, source)
    assert before.budget is not None
    assert (before.budget.low, before.budget.high) == (low, limit)
    assert before.shards.total_bytes == low
    report = run(asked, source, out, options=UNCACHED)
    after = make_plan(asked, source)  # what was measured is kept
    assert after.budget is not None
    assert not after.budget.is_open
    size = (out / "model.gguf").stat().st_size
    assert size == after.shards.total_bytes == report.result.bytes
    assert low < size <= limit
    assert len({kind for name, kind in chosen(after).items() if "layers" in name}) > 1
    weights = open_weights(Checkpoint.open(out))
    held = {x.name: weights.stored_in(x.tensor) for x in weights.spec.all_linears()}
    assert chosen(after).items() <= held.items()
    # The recipe of the result has the types by name, and makes the same bytes.
    written = parse((out / "recipe.yaml").read_text())
    assert written.stages[0].target is None
    run(written, source, tmp_path / "again", options=UNCACHED)
    assert (tmp_path / "again" / "model.gguf").read_bytes() == (out / "model.gguf").read_bytes()


def test_the_choice_is_that_of_brute_force(tiny: Any, tmp_path: Path, cache: Path) -> None:
    source = tiny("llama", num_hidden_layers=1)
    low, high = bounds(source, tmp_path)
    asked = asking(tmp_path, target={"bytes": low + (high - low) // 3})
    run(asked, source, tmp_path / "out", options=UNCACHED)
    outline = outline_of(Checkpoint.open(source))
    units = budget_units(asked, outline, outline)
    (path,) = cache.glob("sensitivity-*.json")
    found = Sensitivities(**json.loads(path.read_text()))
    best, limit = float("inf"), low + (high - low) // 3
    for picks in itertools.product(*(range(len(unit.sizes)) for unit in units)):
        if sum(u.sizes[i] for u, i in zip(units, picks, strict=True)) <= limit:
            total = sum(found.loss(u, u.schemes[i]) for u, i in zip(units, picks, strict=True))
            best = min(best, total)
    assert with_choice(asked, units, found)[1].predicted == pytest.approx(best, rel=1e-12)


def test_measured_losses_are_those_of_what_was_written(
    tiny: Any, tmp_path: Path, cache: Path
) -> None:
    """Rounding as it was measured, one block: nothing before it is rounded, as the embedding keeps
    its bits."""
    source = tiny("llama", num_hidden_layers=1, dtype="fp32")
    options = {"compensate": False, "target": {"bits_per_weight": 6}, "sensitivity": "kl"}
    report = run(asking(tmp_path, **options), source, tmp_path / "out", options=UNCACHED)
    assert report.budget is not None
    assert report.budget.loss.planned > 0
    # Embedding and head are rounded to 8 bits before the block, and counted in no loss.
    assert report.budget.loss.measured == pytest.approx(report.budget.loss.planned, rel=0.02)
    linears = [x for x in report.layers if x.block is not None]
    bits = 8 * sum(x.bytes_after for x in linears)
    assert bits / sum(x.bytes_before * 8 / 32 for x in linears) <= 6


def test_a_type_by_name(tiny: Any, tmp_path: Path) -> None:
    """The first that names a layer counts, and all else has the mixture's."""
    source = tiny("llama")
    named = {"type": "q8_0", "layers": ["model.layers.0.mlp.down_proj"]}
    rest = {"type": "Q5_1", "layers": ["down_proj", "lm_head"]}
    asked = by_name(tmp_path, named, rest)
    kinds = chosen(make_plan(asked, source))
    assert kinds["model.layers.0.mlp.down_proj"] == "Q8_0"
    assert kinds["model.layers.1.mlp.down_proj"] == kinds["lm_head"] == "Q5_1"
    assert kinds["model.layers.1.mlp.up_proj"] == "Q4_0"
    assert parse(dump(asked)) == asked
    given = asking(tmp_path, target={"bytes": 10**6})
    assert parse(dump(given)) == given


SIX = {"bits_per_weight": 6}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "target: is missing; candidates are chosen by it, {bytes: 4GB} of the file or"),
        ({"candidates": [], "target": SIX}, "candidates: is missing; give two types or more"),
        ({"candidates": ["Q4_0"], "target": SIX}, "of which 1 differ; give two types or more"),
        ({"candidates": ["W4", "Q8_0"], "target": SIX}, "is 'W4'; the types are Q4_0, Q4_1"),
        ({"target": {"of": "prune"}}, "is the bytes of prune, and a whole file shares none"),
        ({"candidates": [], "sensitivity": "kl"}, "is kl; it goes with candidates and target"),
        ({"types": [{"type": "Q4_0", "layers": []}]}, "layers is empty; name those that have the"),
        ({"target": {"bytes": 1000}}, "the budget is 1,000 bytes, but the smallest schemes of all"),
        ({"target": SIX, "types": [{"type": "Q4_0", "layers": ["nix"]}]}, "'nix' names no layer"),
        ({"target": SIX, "types": [{"type": "Q4_0", "layers": ["*"]}]}, "is left to choose a type"),
    ],
)
def test_refusals(tiny: Any, tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(CompressError) as raised:
        make_plan(asking(tmp_path, **options), tiny("llama"))
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
