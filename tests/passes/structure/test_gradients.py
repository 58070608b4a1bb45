"""`select: taylor`: what gradients say of a channel is what the loss does without it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from compress.checkpoint import Checkpoint
from compress.errors import OutputError, RecipeError
from compress.events import silent
from compress.formats import open_weights
from compress.passes.structure.files import keep
from compress.passes.structure.gradients import FILE, find_changes, read_changes
from compress.recipe import Recipe
from compress.verbs import make_plan, run
from helpers.short_runs import kill_at_each_fifth, recipe, text_source

pytestmark = pytest.mark.usefixtures("answered_here")
KINDS = ("llama", "phi3", "gpt2")  # linears apart, fused, Conv1D
TAYLOR: dict[str, Any] = {"method": "prune_width", "ffn": 0.5, "heads": 2, "select": "taylor"}


@pytest.mark.parametrize("family", KINDS)
def test_it_is_the_slope_of_the_loss(tiny, tmp_path: Path, family: str) -> None:
    """Of each column of what writes to the residual stream, by the gradients of plain transformers
    when the text is read as one."""
    source = tiny(family, dtype="fp32")
    weights = open_weights(Checkpoint.open(source))
    work: Any = SimpleNamespace(weights=weights, dtype=torch.float32, device="cpu", progress=silent)
    ids = torch.randint(0, 100, (3, 24), generator=torch.Generator().manual_seed(0))
    found = read_changes(tmp_path, find_changes(work, (ids, None), tmp_path))
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    logits = model(ids).logits[:, :-1].flatten(0, 1)
    cross_entropy(logits, ids[:, 1:].flatten()).backward()
    layers = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList))
    for linear in (x for x in weights.spec.blocks[1].linears if x.role in ("o", "down")):
        parameter = layers[1].get_submodule(linear.module).weight
        product = (parameter * parameter.grad).detach().double()
        want = product.sum(1 if linear.transposed else 0)
        torch.testing.assert_close(found[linear.name][0], want, rtol=1e-3, atol=1e-6)


def test_a_run_keeps_what_the_loss_would_miss(tiny, tmp_path: Path) -> None:
    source, data = tiny("llama", dtype="fp32"), text_source(tmp_path)
    asked = recipe(TAYLOR, calibration=data)
    report = run(asked, source, tmp_path / "out")
    assert report.loads is not None
    assert report.loads.proof == "logits"
    assert {(x.kept, x.of) for x in report.stages[0].repairs} == {(32, 64), (48, 96)}
    assert not list(tmp_path.glob("out*/working/*"))
    others = recipe({**TAYLOR, "select": "magnitude"}, calibration=data)
    assert most_bytes(asked, source) > most_bytes(others, source)


def test_what_was_kept_of_them_is_held_to_its_hash(tmp_path: Path) -> None:
    path = tmp_path / "out.partial" / "working" / FILE
    path.parent.mkdir(parents=True)
    sha256 = keep(path, save({"a:0": torch.ones(2)}))
    assert read_changes(path.parent, sha256)["a"][0].tolist() == [1, 1]
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    changed = rf"was changed while the run was stopped; remove {tmp_path}/out.partial and start"
    with pytest.raises(OutputError, match=changed):
        read_changes(path.parent, sha256)
    path.unlink()
    with pytest.raises(OutputError, match=r"cannot read .*: No such file"):
        read_changes(path.parent, sha256)


def most_bytes(asked: Recipe, source: Path) -> int:
    plan = make_plan(asked, source)
    return max(size.bytes for size in plan.run_size.edits)


def test_a_search_refuses_it(tiny, tmp_path: Path) -> None:
    stage = {"method": "prune", "budget": {"params": 0.8}, "select": "taylor"}
    with pytest.raises(RecipeError, match="is 'taylor'; allowed: obs"):
        run(recipe(stage, calibration=text_source(tmp_path)), tiny("llama"), tmp_path / "out")


@pytest.mark.long
def test_killed_anywhere_it_goes_on_to_the_same_bytes(tiny, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    asked = recipe(TAYLOR, calibration=text_source(tmp_path, samples=2, length=8))
    small = {"hidden_size": 32, "num_hidden_layers": 1}
    assert kill_at_each_fifth(asked, tiny("llama", **small), tmp_path / "runs", 0).total()
