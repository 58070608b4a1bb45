"""What `train: changed` is counted to train, against what edits change and what a run trains."""

from pathlib import Path
from typing import Any

import pytest
import torch

from compress.arch.resize.names import block_name
from compress.distill.memory import all_shapes
from compress.distill.trained import Trained
from compress.edits.distill import trained_shapes
from compress.passes.training import whole
from compress.passes.training.setting import TrainingPass
from compress.recipe import Recipe
from compress.verbs import make_plan, run
from helpers.short_runs import WHOLE, mla, recipe, text_source

pytestmark = pytest.mark.usefixtures("answered_here")
FEW = {"method": "distill", "tokens": 64, "length": 8}
CHANGED = {**FEW, "scope": "model", "train": "changed"}
FFN, HEADS = {"method": "prune_width", "ffn": 48}, {"method": "prune_width", "heads": 2}
DEPTH, FP32 = {"method": "prune_depth", "keep": [0, 1, 3]}, {"method": "cast", "dtype": "fp32"}


class Stopped(Exception):
    """What is trained is known."""


def trained_by(
    asked: Recipe, source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[TrainingPass, Trained]:
    """The training of a run that goes no further."""
    found: list[tuple[TrainingPass, Trained]] = []
    trained_of = whole._trained

    def stop(each: TrainingPass, student: Any) -> Trained:
        found.append((each, trained_of(each, student)))
        raise Stopped

    monkeypatch.setattr(whole, "_trained", stop)
    with pytest.raises(Stopped):
        run(asked, source, out)
    return found[0]


def moved(each: TrainingPass) -> set[str]:
    """Tensors that are no longer what the source's are in their dtype."""
    before, after, spec = each.source.checkpoint, each.work.checkpoint, each.source.spec
    was = {block_name(spec, name, each.planned.origin): name for name in before.tensors}
    found = set()
    for name in after.tensors:
        now, old = after.read(name), before.read(was[name]) if name in was else None
        if old is None or old.shape != now.shape or not torch.equal(old.to(now.dtype), now):
            found.add(name)
    return found


@pytest.mark.parametrize(
    ("family", "edits"),
    [
        pytest.param("llama", [DEPTH], id="depth"),
        pytest.param("mixtral", [FP32, {"method": "prune_width", "experts": 2}], id="experts"),
        *(
            pytest.param(family, edits, id=name, marks=pytest.mark.long)
            for name, family, edits in (
                ("ffn", "llama", [FFN]),
                ("ffn, not refitted", "llama", [{**FFN, "repair": "none"}]),
                ("heads", "olmo2", [HEADS]),
                ("hidden", "qwen2", [{"method": "prune_hidden", "hidden": 48}]),
                ("channels", "gemma2", [{"method": "prune_hidden", "hidden": 48}]),
                ("groups", "qwen3", [{"method": "gqa", "groups": 1}]),
                ("latent", "llama", [mla(**WHOLE)]),
                ("depth and width", "gpt2", [DEPTH, FFN]),
                ("untied", "llama", [FFN, {"method": "untie"}]),
                ("cast behind", "llama", [FFN, FP32]),
                ("twice", "llama", [{"method": "cast", "dtype": "fp16"}, FP32]),
                ("blocks trained", "llama", [FFN, {**FEW, "scope": "block"}]),
            )
        ),
    ],
)
def test_the_plan_counts_what_edits_change_and_the_run_trains(
    tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, edits: list[Any]
) -> None:
    deep = {"n_layer": 4} if family == "gpt2" else {"num_hidden_layers": 4}
    source = tiny(family, tied=family != "mixtral", **deep)
    asked = recipe(*edits, CHANGED, calibration=text_source(tmp_path))
    plan = make_plan(asked, source)
    student = plan.model.student_of(plan.model.edits[-1])
    counted = sorted(trained_shapes(asked.edits[-1].config, student))
    each, trained = trained_by(asked, source, tmp_path / "out", monkeypatch)
    landed = {x for x in student.changed if x.endswith("kv_a_layernorm.weight")}
    absent = [student.model.shapes[name] for name in landed]  # factors while it is trained
    shapes = [tuple(x.shape) for x in trained.parameters.values()]
    assert sorted([*shapes, *absent]) == counted
    assert moved(each) <= student.changed
    if "depth" in edits[0]["method"] and len(edits) == 1:
        assert not any(".0." in name for name in student.changed)  # nothing went before it
        assert len(counted) < len(all_shapes(student.model))
