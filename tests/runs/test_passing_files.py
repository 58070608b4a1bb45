"""The plan knows what passes keep on disk, and what a search takes before one."""

from pathlib import Path
from typing import Any

import pytest
import torch

from compress.checkpoint import disk
from compress.errors import OutputError
from compress.passes.structure.files import WORKING
from compress.runs.output import disk_space, require_space
from compress.verbs import make_plan, run
from helpers.short_runs import SELF, recipe, text_source

SMALL = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
DISTILL = {"method": "distill", "tokens": 128, "batch": 4, "every": 4, "length": 8}


@pytest.mark.usefixtures("answered_here")
def test_no_pass_keeps_more_on_disk_than_was_planned(
    tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before each removal and renaming, which are where the most is there."""
    seen: dict[str, int] = {}

    def watched(real: Any) -> Any:
        def call(*args: Any) -> None:
            folder = tmp_path / "out.partial" / WORKING
            sizes = {p.name: p.stat().st_size for p in folder.rglob("*")} if folder.is_dir() else {}
            seen["most"] = max(seen.get("most", 0), sum(sizes.values()))
            seen.update(dict.fromkeys(sizes, 1))
            real(*args)

        return call

    for name in ("unlink", "rename"):
        monkeypatch.setattr(disk, name, watched(getattr(disk, name)))
    monkeypatch.setattr("compress.passes.training.whole.SAVED_EVERY", 0.0)
    narrow = {"method": "prune_hidden", "hidden": 24}
    asked = recipe(narrow, DISTILL, calibration=text_source(tmp_path, length=8))
    source = tiny("llama", **SMALL)
    planned = disk_space(make_plan(asked, source), tmp_path / "out.partial", torch.float32).passing
    run(asked, source, tmp_path / "out")
    assert {"training.state", "training.state.new", "teacher.ids", "states.edited.1"} <= seen.keys()
    # Headers of files are no numbers of the model.
    headers = 40_000
    assert 0.5 * planned < seen["most"] < planned + headers


@pytest.mark.parametrize(("key", "bound"), [("tokens", {}), ("samples", {"samples": 100_000})])
def test_a_full_disk_is_told_by_what_fills_it(
    tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, bound: dict[str, int]
) -> None:
    texts = text_source(tmp_path)["sources"]
    asked = recipe({**DISTILL, "tokens": "3M", "scope": "model", "sources": texts, **bound})
    plan, partial = make_plan(asked, tiny("llama")), tmp_path / "out.partial"
    needed = disk_space(plan, partial, torch.float32).needed
    assert needed > (8 * 100_000 if bound else 3_000_000) * 64 * 6
    monkeypatch.setattr("compress.runs.output.free_bytes", lambda _: needed // 2)
    with pytest.raises(OutputError, match=rf"--set stages\[0\].{key}=\d+ would fit"):
        require_space(plan, partial, torch.float32)


def test_less_rows_than_a_training_takes_are_not_proposed(
    tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = text_source(tmp_path)["sources"]
    stage = {**DISTILL, "tokens": "3M", "scope": "block", "samples": 100_000, "sources": texts}
    plan, partial = make_plan(recipe(stage), tiny("llama")), tmp_path / "out.partial"
    space = disk_space(plan, partial, torch.float32)
    rest = space.result + space.between + space.evaluating + space.files.fixed
    for rows, proposed in ((1, False), (2, True)):
        free = rest + rows * space.files.each
        monkeypatch.setattr("compress.runs.output.free_bytes", lambda _, free=free: free)
        with pytest.raises(OutputError) as caught:
            require_space(plan, partial, torch.float32)
        assert ("would fit" in str(caught.value)) is proposed


@pytest.mark.parametrize(
    ("opened", "settled"),
    [
        (
            {"method": "prune", "budget": {"params": 0.9}, "axes": ["ffn", "layers"]},
            {"method": "prune", "sizes": {"ffn": 48}},
        ),
        ({"method": "prune_depth", "layers": 3}, {"method": "prune_depth", "keep": [0, 1, 2]}),
    ],
)
def test_a_search_is_in_memory_time_and_disk(
    tiny, tmp_path: Path, opened: dict[str, Any], settled: dict[str, Any]
) -> None:
    source = tiny("llama", num_hidden_layers=4)
    wide = {**SELF, "samples": 64, "length": 128}
    plans = [make_plan(recipe(x, calibration=wide), source) for x in (opened, settled)]
    before, known = (plan.run_size.edits for plan in plans)
    assert [x.name for x in before] == [f"choosing for {opened['method']}", opened["method"]]
    assert [x.name for x in known] == [opened["method"]]
    choosing = before[0].work
    assert choosing is not None
    assert choosing.products > 0
    parts = [need.part for need in plans[0].estimate.needs]
    assert f"choosing for {opened['method']}" in parts
