"""What the report says that scores lose behind a norm, held to queries and keys as transformers
makes them: behind norm and rotation, in the source and in what was written."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from compress.blocks.author import Author
from compress.checkpoint import Checkpoint
from compress.formats import open_weights
from compress.passes.calibration_tokens import built
from compress.recipe import Recipe
from compress.verbs import run
from helpers.in_transformers import load
from helpers.short_runs import recipe, text_source

pytestmark = pytest.mark.usefixtures("answered_here")
HEADS, GROUPS = 4, 2  # of keys and values, before and behind


def rows(asked: Recipe, source: Path) -> Tensor:
    """The calibration's tokens, [rows, length]."""
    assert asked.calibration is not None
    weights = open_weights(Checkpoint.open(source))
    author = Author(weights, lambda: pytest.fail("it writes no text"))
    tokens = built(asked.calibration, author)
    assert tokens.mask is None
    return tokens.ids


def first_layer(monkeypatch: pytest.MonkeyPatch, folder: Path, ids: Tensor) -> tuple[Tensor, ...]:
    """Queries and keys that the first layer's scores are made of: fp64 [heads, tokens, width]."""
    model = load(folder)
    module = importlib.import_module(type(model).__module__)
    rotate, seen = module.apply_rotary_pos_emb, []

    def watched(*args: Any, **named: Any) -> Any:
        seen.append(rotate(*args, **named))
        return seen[-1]

    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(module, "apply_rotary_pos_emb", watched)
        model(ids)
    return tuple(x.double().transpose(0, 1).flatten(1, 2) for x in seen[0])


def energy(x: Tensor) -> Tensor:
    """Of each pair that is turned, over all tokens: [heads, width / 2]."""
    return x.square().sum(dim=1).unflatten(1, (2, -1)).sum(dim=1)


@pytest.mark.parametrize(
    ("family", "pool", "heads"),
    [("qwen3", "mean", 4), ("qwen3", "pca", 8), ("gemma3_text", "pca", 4)],
)
def test_the_reported_loss_is_that_of_the_keys_which_were_written(
    tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, pool: str, heads: int
) -> None:
    sizes = {"num_attention_heads": heads, "num_key_value_heads": HEADS}
    source = tiny(family, **sizes, dtype="fp32")
    stage = {"method": "gqa", "groups": GROUPS, "pool": pool, "repair": "none"}
    asked = recipe(stage, calibration=text_source(tmp_path, samples=12))
    report = run(asked, source, tmp_path / "out")
    ids = rows(asked, source)
    q, k = first_layer(monkeypatch, source, ids)
    _, made = first_layer(monkeypatch, tmp_path / "out", ids)

    said = next(x for x in report.stages[0].repairs if x.linear.endswith("0.self_attn.k_proj"))
    gains = [load_file(x / "model.safetensors") for x in (source, tmp_path / "out")]
    before, after = (x["model.layers.0.self_attn.k_norm.weight"] for x in gains)
    assert torch.equal(before, after) == (pool == "mean")
    together = said.note.split(": ")[1].split(";")[0].split(", ")
    members = [[int(head) for head in group.split()] for group in together]
    read = torch.empty_like(k)
    for group, index in enumerate(members):
        read[index] = made[group]
    weight = energy(q).unflatten(0, (HEADS, -1)).sum(dim=1)  # of the queries that read a head
    lost = (weight * energy(k - read)).sum() / (weight * energy(k)).sum()
    assert 0.01 < lost < 1
    assert said.before == pytest.approx(float(lost), rel=1e-4)
